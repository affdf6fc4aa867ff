"""What a client sends on one connection: parsed into requests, within the limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httptools

from isochunk.proxy.client import Client
from isochunk.proxy.errors import ProxyError
from isochunk.proxy.limits import Gate

__all__ = ["Inbound"]

_WIRE_SLACK = 64 << 10  # bytes of chunk sizes and trailers that a body may have beside eight times its own


class Inbound:
    """Reads requests until one breaks a limit; then it is deaf.

    Args:
        peer: whom the requests count for.
        make: a `Client` from method, target, headers, and whether it is of HTTP/1.1.
        take: gets each request when its head is here.
        refuse: gets the error of a request whose head breaks a limit.

    Attributes:
        deaf: nothing more is read from this connection.
        reading: the request whose body is coming.
        in_head: a request has begun and its headers are not complete.
    """

    def __init__(
        self,
        gate: Gate,
        peer: str,
        make: Callable[[str, str, list[tuple[str, str]], bool], Client],
        take: Callable[[Client], None],
        refuse: Callable[[ProxyError], None],
    ) -> None:
        self._gate = gate
        self._limits = gate.limits
        self._peer = peer
        self._make = make
        self._take = take
        self._refuse = refuse
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._timer: asyncio.TimerHandle | None = None
        self.deaf = False
        self.reading: Client | None = None
        self.in_head = False
        self._target = b""
        self._headers: list[tuple[str, str]] = []
        self._head_bytes = 0
        self._heads = 0
        self._wire_bytes = 0
        self._body_since = 0.0

    def feed(self, data: bytes) -> None:
        """Parse what came."""
        if self.deaf:
            return
        idle = self.reading is None and not self.in_head
        if idle:
            self.expect_head()
        body, heads = self.reading, self._heads
        rest = data
        while rest:
            rest = self._parse(rest)
        if self._stopped():
            return
        if self.in_head and heads == self._heads and not idle:
            self._head_bytes += len(data)
        elif body is not None and body is self.reading:
            self._wire_bytes += len(data)
        if self._head_bytes > self._limits.head_bytes:
            self._fail(self._head_too_large())
        elif self._wire_bytes > 8 * len(body.body if body else b"") + _WIRE_SLACK:
            self._fail(ProxyError(400, "invalid_request_error", "more framing than content"))

    def _parse(self, data: bytes) -> bytes:
        """What is left to parse: after an upgrade, which is ignored, the request again without it."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            head = self._plain_head()
            self._parser = httptools.HttpRequestParser(self)
            return b"" if self.deaf else head + data[upgrade.args[0] :]
        except httptools.HttpParserError:
            self._fail(ProxyError(400, "invalid_request_error", "this is not a request of HTTP/1.1"))
        return b""

    def _plain_head(self) -> bytes:
        lines = [b"%b %b HTTP/%b" % (self._parser.get_method(), self._target, self._parser.get_http_version().encode())]
        for name, value in self._headers:
            parts = value.split(",") if name == "connection" else [value]
            kept = ",".join(part for part in parts if part.strip().lower() != "upgrade")
            if name != "upgrade":
                lines.append(f"{name}: {kept}".encode("latin-1"))
        return b"\r\n".join([*lines, b"\r\n"])

    def _stopped(self) -> bool:
        return self.deaf

    def stop(self) -> None:
        """Hear nothing more."""
        self.deaf = True
        self._disarm()

    def forget(self) -> None:
        """The connection is closed: let go of it, and of the parser, which holds this object."""
        self.stop()
        del self._parser, self._make, self._take, self._refuse
        self.reading = None

    # Time

    def expect_head(self) -> None:
        """The headers of a request are due."""
        self.in_head = True
        self._head_bytes = 0
        self._arm(self._limits.head_s, lambda: self._fail(_late("the request's head")))

    def rest(self, over: Callable[[], None]) -> None:
        """No request is under way: ``over`` is called when there is none for too long."""
        if not (self.in_head or self.reading or self.deaf):
            self._arm(self._limits.idle_s, over)

    def _body_is_due(self) -> None:
        assert self.reading is not None
        seconds = self._limits.body_s + len(self.reading.body) / self._limits.body_rate
        left = self._body_since + seconds - self._loop.time()
        if left > 0:
            self._arm(left, self._body_is_due)
        else:
            self._fail(_late("the body"))

    def _arm(self, seconds: float, then: Callable[[], None]) -> None:
        self._disarm()
        self._timer = self._loop.call_later(seconds, then)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # What the parser finds

    def on_message_begin(self) -> None:
        """A request begins."""
        self.in_head = True
        self._target = b""
        self._headers = []

    def on_url(self, url: bytes) -> None:
        """Its target, or a part of it."""
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header; trailers are dropped."""
        if self.in_head and len(self._headers) <= self._limits.headers:
            self._headers.append((name.decode("latin-1").lower(), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        """All is known but the body."""
        self.in_head = False
        self._heads += 1
        self._head_bytes = self._wire_bytes = 0
        self._disarm()
        if self.deaf:
            return
        size = len(self._target) + sum(len(name) + len(value) + 4 for name, value in self._headers)
        if size > self._limits.head_bytes or len(self._headers) > self._limits.headers:
            self._fail(self._head_too_large())
            return
        parser = self._parser
        if parser.should_upgrade():
            if parser.get_method() == b"CONNECT":
                self._fail(ProxyError(405, "invalid_request_error", "this is no tunnel"))
            return
        if error := _ill_framed(parser.get_http_version(), self._headers):
            self._fail(error)
            return
        modern = parser.get_http_version() == "1.1"
        client = self._make(parser.get_method().decode(), self._target.decode("latin-1"), self._headers, modern)
        client.keep_alive = modern and parser.should_keep_alive()
        self.reading = client
        length = client.header("content-length") or "0"
        size = int(length) if length.isdigit() and len(length) < 20 else 0
        if error := self._too_long(size) or self._gate.room(self._peer, size):
            self._fail(error)
        else:
            self._body_since = self._loop.time()
            self._arm(self._limits.body_s, self._body_is_due)
        self._take(client)

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        client = self.reading
        if client is None or self.deaf:
            return
        held = len(client.body)
        if error := self._too_long(held + len(body)) or self._gate.hold(self._peer, held, len(body)):
            self._fail(error)
        else:
            client.body += body

    def on_message_complete(self) -> None:
        """The request is here."""
        if self.reading is not None and not self.deaf:
            self._disarm()
            client, self.reading = self.reading, None
            client.body_ends()

    # Refusals

    def _fail(self, error: ProxyError) -> None:
        """A request breaks a limit: it is answered so, if it is not answered yet, and the connection ends."""
        self.stop()
        client, self.reading = self.reading, None
        if client is None:
            self._refuse(error)
        else:
            client.keep_alive = False
            client.body_ends(error)

    def _head_too_large(self) -> ProxyError:
        limit = f"{self._limits.head_bytes} bytes or {self._limits.headers} headers"
        return ProxyError(431, "invalid_request_error", f"the request's head is larger than {limit}")

    def _too_long(self, size: int) -> ProxyError | None:
        if size <= self._limits.body_bytes:
            return None
        return ProxyError(413, "invalid_request_error", f"the body is longer than {self._limits.body_bytes} bytes")


def _ill_framed(version: str, headers: list[tuple[str, str]]) -> ProxyError | None:
    """What another server may read otherwise than this one (RFC 9112, 2.3, 3.2 and 6.1)."""
    if version not in ("1.0", "1.1"):
        return ProxyError(505, "invalid_request_error", "this server speaks HTTP/1.1")
    hosts = sum(name == "host" for name, _ in headers)
    if hosts > 1 or (hosts == 0 and version == "1.1"):
        return ProxyError(400, "invalid_request_error", "a request has one Host header")
    codings = [value.strip().lower() for name, value in headers if name == "transfer-encoding"]
    if codings and (version == "1.0" or codings != ["chunked"]):
        return ProxyError(400, "invalid_request_error", "of transfer encodings only chunked is known, in HTTP/1.1")
    return None


def _late(what: str) -> ProxyError:
    return ProxyError(408, "timeout_error", f"{what} did not come in time")
