"""One client's connection: its requests are answered one after the other."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, cast

from isochunk.proxy.client import Client
from isochunk.proxy.errors import ClientGoneError, ProxyError
from isochunk.proxy.inbound import Inbound
from isochunk.proxy.limits import client_of

if TYPE_CHECKING:
    from isochunk.proxy.listener import Listener

__all__ = ["Connection"]

_LINGER_S = 3.0  # in which the client reads why it is closed; what it still sends must not reset the connection
_LINGER_BYTES = 64 << 20
_HIGH_WATER = 64 << 10
_HALF_S = 1.0  # in which the answer must begin for a client that has closed its side, or closed at all


class Connection(asyncio.Protocol):
    """Has the listener's app answer what a client sends.

    Attributes:
        peer: whom it counts for in the limits.
        client: the request that is being answered.
    """

    _transport: asyncio.Transport
    _inbound: Inbound

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self.peer = ""
        self.client: Client | None = None
        self._task: asyncio.Task[None] | None = None
        self._waiting: deque[Client] = deque()
        self._writable: asyncio.Future[None] | None = None
        self._linger: asyncio.TimerHandle | None = None
        self._dropped = 0
        self._counted = False
        self._half = False

    # The transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Let it in, or say why not."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_HIGH_WATER)
        self.peer = client_of(transport.get_extra_info("peername"))
        refused = self._listener.enter(self)
        self._counted = refused is None
        self._inbound = Inbound(self._listener.gate, self.peer, self._make, self._take, self._refuse)
        if refused is None:
            self._inbound.expect_head()
        else:
            self._refuse(refused)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody is left to answer."""
        self._inbound.forget()
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        self._half = False
        self._listener.left(self, counted=self._counted)
        while self._waiting:
            self._release(self._waiting.popleft())
        self._wake()
        if self.client is not None:
            self.client.gone = True
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        """Parse what came; of a connection that is to be closed, drop it."""
        if not self._inbound.deaf:
            self._inbound.feed(data)
            return
        self._dropped += len(data)
        if self._dropped > _LINGER_BYTES:
            self._transport.abort()

    def eof_received(self) -> bool:
        """The client sends nothing more: it waits for the answer, or it is gone, which looks the same.

        So an answer that begins soon is given, and one that has begun goes on: if nobody is there, writing it tells.
        """
        waits = self.client is not None and self._inbound.reading is None
        self._half = waits and self._transport.can_write_eof()  # TLS ends both sides at once
        if self._half:
            self._hurry()
        return self._half

    def _hurry(self) -> None:
        self._loop.call_later(_HALF_S, self._give_up, self.client)

    def _give_up(self, client: Client | None) -> None:
        if self._half and client is not None and client is self.client and not client.started:
            self._transport.abort()

    def pause_writing(self) -> None:
        """The client is slow."""
        self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        """It has caught up."""
        self._wake()

    def _wake(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

    # Requests

    def _make(self, method: str, target: str, headers: list[tuple[str, str]], modern: bool) -> Client:
        return Client(self, method, target, headers, modern=modern)

    def _refuse(self, error: ProxyError) -> None:
        """Answer an error in its turn, and then close."""
        self._inbound.stop()
        client = self._make("-", "-", [], True)
        client.keep_alive = False
        client.refusal = error
        self._take(client)

    def _take(self, client: Client) -> None:
        if self.client is None and not self._waiting:
            self._answer(client)
        else:
            self._waiting.append(client)
            self._transport.pause_reading()

    def _answer(self, client: Client) -> None:
        self.client = client
        if self._half:
            self._hurry()
        self._task = self._loop.create_task(self._run(client))

    async def _run(self, client: Client) -> None:
        try:
            await self._listener.answer(client)
        finally:
            self._release(client)
            self.client = self._task = None
            self._next(client)

    def _release(self, client: Client) -> None:
        self._listener.gate.release(self.peer, len(client.body))
        client.forget()

    def _next(self, last: Client) -> None:
        """After one request: the next one, a pause, or the end."""
        if last.gone or self._transport.is_closing():
            self._transport.abort()
        elif not last.ended:
            self._transport.abort()  # cut short on purpose: it must not look whole
        elif last.closes:
            self._close()
        elif self._waiting:
            self._answer(self._waiting.popleft())
            if not self._waiting:
                self._transport.resume_reading()
        elif self._half:
            self._close()
        else:
            self._inbound.rest(self.finish)

    def _close(self) -> None:
        """Close so that what was written arrives."""
        self._inbound.stop()
        while self._waiting:
            self._release(self._waiting.popleft())
        if self._transport.can_write_eof() and self._listener.may_linger():
            self._transport.resume_reading()
            self._transport.write_eof()
            self._linger = self._loop.call_later(_LINGER_S, self._transport.abort)
        else:
            self._transport.close()

    def finish(self) -> None:
        """Close now if nothing is being answered, else after the answer."""
        if self.client is not None:
            self.client.keep_alive = False
        elif not self._inbound.deaf:
            self._inbound.stop()
            self._transport.close()

    def cancel(self) -> None:
        """Answer nothing more."""
        self._transport.abort()

    # Answers

    def expect(self, data: bytes) -> None:
        """Write at once what is no answer yet."""
        self._transport.write(data)

    async def write(self, client: Client, data: bytes) -> None:
        """Write a part of an answer.

        Raises:
            ClientGoneError: it is gone, or took nothing for too long.
        """
        self._transport.write(data)
        if self._writable is None:
            return
        try:
            async with asyncio.timeout(self._listener.patience_s):
                await asyncio.shield(self._writable)
        except TimeoutError:
            client.gone = True
        if client.gone:
            self._transport.abort()
            raise ClientGoneError

    def date(self) -> bytes:
        """Now, for a header."""
        return self._listener.date()

    @property
    def must_close(self) -> bool:
        """The server is going, or nothing more can be read."""
        return self._listener.closing or self._inbound.deaf
