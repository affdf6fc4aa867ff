"""One request of a client, and its answer."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING

from isochunk.proxy.errors import ClientGoneError, ProxyError

if TYPE_CHECKING:
    from isochunk.proxy.connection import Connection

__all__ = ["Client"]

Headers = Sequence[tuple[bytes, bytes]]

_PHRASES = {status.value: status.phrase.encode() for status in HTTPStatus}
_ODD = re.compile(r"[^\x21-\x7e]+")
_ORIGIN = re.compile(r"^https?://[^/?]*", re.IGNORECASE)  # of a target as clients of a forward proxy write it
_LONGEST_ID = 64


class Client:
    """Reads one request and writes its answer.

    Attributes:
        method, path, query: of the request line.
        headers: names in lower case.
        id: for answers, logs and nodes; begins with the client's own. Unique even when clients repeat theirs: the
            connectors match P's and D's requests by it.
        refusal: the error to answer in place of anything else.
        keep_alive: the connection may serve another request after this one.
        body: what has come of it.
        started: the status line is on its way, so the answer can't be replaced by an error any more.
        ended: the answer is whole.
        gone: nobody is left to answer.
        status, sent: of the answer so far: 0 before it began, and bytes of its body.
        notes: what the access log says of it beside.
    """

    def __init__(
        self, connection: Connection, method: str, target: str, headers: list[tuple[str, str]], *, modern: bool
    ) -> None:
        self._connection = connection
        self._modern = modern
        self.method = method
        self.path, _, self.query = _ORIGIN.sub("", target).partition("?")
        self.headers = headers
        given = _ODD.sub("", self.header("x-request-id") or "")[:_LONGEST_ID]
        self.id = f"{given}-{uuid.uuid4().hex[:12]}" if given else uuid.uuid4().hex
        self.began = time.monotonic()
        self.refusal: ProxyError | None = None
        self.keep_alive = True
        self.body = bytearray()
        self.started = self.ended = self.gone = False
        self.status = self.sent = 0
        self.notes: dict[str, str] = {}
        self._complete = False
        self._body_error: ProxyError | None = None
        self._reader: asyncio.Future[None] | None = None
        self._head = b""
        self._chunked = False

    @property
    def peer(self) -> str:
        """Whom it counts for."""
        return self._connection.peer

    @property
    def closes(self) -> bool:
        """The connection ends with the answer; also when the body was not waited for."""
        return not self.keep_alive or not self._complete or self._connection.must_close

    def header(self, name: str) -> str | None:
        """The first header of this name."""
        return next((value for key, value in self.headers if key == name), None)

    async def read(self) -> bytearray:
        """The body, once it is here.

        Raises:
            ProxyError: it breaks a limit.
        """
        if not self._complete and self._body_error is None:
            if not self.body and (self.header("expect") or "").lower() == "100-continue":
                self._connection.expect(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if self._body_error is not None:
            raise self._body_error
        return self.body

    def body_ends(self, error: ProxyError | None = None) -> None:
        """The body is complete, or there will be no more of it."""
        self._complete = error is None
        self._body_error = error
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def forget(self) -> None:
        """It is over: let go of the body, and of errors, which hold what was under way when they were raised."""
        self.body = bytearray()
        self.refusal = self._body_error = None

    def start(self, status: int, headers: Headers, *, length: int | None = None) -> None:
        """Say the status; it goes out with the first part of the body. Without a length, the body is a stream."""
        self.started = True
        self.status = status
        lines = [b"HTTP/1.1 %d %b" % (status, _PHRASES.get(status, b"")), b"date: " + self._connection.date()]
        lines += [name + b": " + value for name, value in headers if name != b"x-request-id"]
        lines.append(b"x-request-id: " + self.id.encode())
        if length is not None:
            lines.append(b"content-length: %d" % length)
        elif self._modern:
            self._chunked = True
            lines.append(b"transfer-encoding: chunked")
        if self.closes:
            self.keep_alive = False
            lines.append(b"connection: close")
        self._head = b"\r\n".join([*lines, b"\r\n"])

    async def send(self, data: bytes, *, last: bool = False) -> None:
        """Send a part of the body; waits while the client is slow.

        Raises:
            ClientGoneError: it took nothing for too long, or closed the connection.
        """
        if self.gone:
            raise ClientGoneError
        self.sent += len(data)
        self.ended = last
        parts = [self._head]
        self._head = b""
        if self.method != "HEAD":
            if self._chunked and data:
                parts += [b"%x\r\n" % len(data), data, b"\r\n"]
            else:
                parts.append(data)
            if self._chunked and last:
                parts.append(b"0\r\n\r\n")
        await self._connection.write(self, b"".join(parts))

    async def answer(self, status: int, headers: Headers, data: bytes) -> None:
        """Send a whole answer."""
        self.start(status, headers, length=len(data))
        await self.send(data, last=True)

    async def fail(self, error: ProxyError) -> None:
        """Send an error: as the answer, or as the last event of the stream that has begun."""
        if self.started:
            await self.send(b"data: " + error.body() + b"\n\n", last=True)
        else:
            await self.answer(error.status, error.headers(), error.body())
