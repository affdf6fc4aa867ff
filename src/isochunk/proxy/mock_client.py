"""The client's side of one request, on the ASGI channels."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from contextlib import suppress
from typing import Any

from isochunk.proxy.errors import ClientGoneError, ProxyError

__all__ = ["Client"]

Message = MutableMapping[str, Any]
Headers = list[tuple[bytes, bytes]]


class Client:
    """Reads one request and writes its answer.

    Args:
        patience_s: seconds in which the client must take what it is sent.

    Attributes:
        started: the status line is on its way, so the answer can't be replaced by an error any more.
    """

    def __init__(
        self,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
        patience_s: float,
    ) -> None:
        self._receive = receive
        self._send = send
        self._patience_s = patience_s
        self.started = False

    async def read(self, limit: int) -> bytes:
        """The body.

        Raises:
            ProxyError: 413, it is longer than ``limit`` bytes.
            ClientGoneError: it did not come to its end.
        """
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise ProxyError(413, "invalid_request_error", f"the body is longer than {limit} bytes")
            parts.append(part)
            if not message.get("more_body"):
                return b"".join(parts)

    async def while_there(self, work: Coroutine[Any, Any, None]) -> None:
        """Do the work, and cancel it when the client goes away.

        Raises:
            ClientGoneError: the client went away.
        """
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(self._wait_until_gone())
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientGoneError
            await task
        finally:
            gone.cancel()
            task.cancel()
            with suppress(asyncio.CancelledError, ProxyError, ClientGoneError):
                await task

    async def start(self, status: int, headers: Headers) -> None:
        """Send the status line and the headers."""
        self.started = True
        await self._put({"type": "http.response.start", "status": status, "headers": headers})

    async def send(self, data: bytes, *, last: bool = False) -> None:
        """Send a part of the body; waits while the client is slow.

        Raises:
            ClientGoneError: it took nothing for too long, or closed the connection.
        """
        await self._put({"type": "http.response.body", "body": data, "more_body": not last})

    async def answer(self, status: int, headers: Headers, data: bytes) -> None:
        """Send a whole answer."""
        await self.start(status, [*headers, (b"content-length", str(len(data)).encode())])
        await self.send(data, last=True)

    async def fail(self, error: ProxyError) -> None:
        """Send an error: as the answer, or as the last event of the stream that has begun."""
        if self.started:
            await self.send(b"data: " + error.body() + b"\n\n", last=True)
        else:
            await self.answer(error.status, error.headers(), error.body())

    async def _put(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._patience_s):
                await self._send(message)
        except (TimeoutError, OSError) as error:
            raise ClientGoneError from error

    async def _wait_until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
