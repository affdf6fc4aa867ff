"""Where clients connect: all their connections, and how they end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from email.utils import formatdate

from isochunk.proxy.client import Client
from isochunk.proxy.connection import Connection
from isochunk.proxy.errors import ClientGoneError, ProxyError
from isochunk.proxy.limits import Gate

__all__ = ["Listener"]

log = logging.getLogger("isochunk.proxy")

_MOST_LINGERING = 256


class Listener:
    """Makes connections and knows them.

    Args:
        app: answers one request; may raise `ProxyError` and `ClientGoneError`.
        patience_s: seconds in which a client must take what it is sent.
        finished: called after each request, for the access log.

    Attributes:
        connections: that are open.
        closing: each connection ends with the answer it has now.
    """

    def __init__(
        self,
        app: Callable[[Client], Awaitable[None]],
        gate: Gate,
        *,
        patience_s: float,
        finished: Callable[[Client], None],
    ) -> None:
        self._app = app
        self.gate = gate
        self.patience_s = patience_s
        self._finished = finished
        self.closing = False
        self.connections: set[Connection] = set()
        self._uncounted = 0
        self._date = (0.0, b"")

    def connection(self) -> Connection:
        """The protocol of a new connection."""
        return Connection(self)

    def enter(self, connection: Connection) -> ProxyError | None:
        """A client has connected; the error when it must go again."""
        error = self.gate.enter(connection.peer)
        self.connections.add(connection)
        self._uncounted += error is not None
        return error

    def left(self, connection: Connection, *, counted: bool) -> None:
        """A connection is closed."""
        self.connections.discard(connection)
        if counted:
            self.gate.leave(connection.peer)
        else:
            self._uncounted -= 1

    def may_linger(self) -> bool:
        """Whether there are descriptors to wait for clients that must go."""
        return self._uncounted <= _MOST_LINGERING

    def date(self) -> bytes:
        """Now, as HTTP writes it."""
        now = time.time()
        if now - self._date[0] >= 1 or now < self._date[0]:
            self._date = (now // 1, formatdate(now, usegmt=True).encode())
        return self._date[1]

    async def answer(self, client: Client) -> None:
        """Answer a request, whatever happens to it."""
        try:
            with suppress(ClientGoneError):
                await self._try(client)
        except asyncio.CancelledError:
            if not client.gone:
                raise
        finally:
            self._finished(client)

    async def _try(self, client: Client) -> None:
        try:
            if client.refusal is not None:
                raise client.refusal
            await self._app(client)
        except ProxyError as error:
            await client.fail(error)
        except (ClientGoneError, asyncio.CancelledError):
            raise
        except Exception:  # one request's surprise must not end the others
            log.exception("request %s: unforeseen", client.id)
            if not client.started:
                await client.fail(ProxyError(500, "internal_error", "the proxy made a mistake"))

    async def drain(self, seconds: float) -> None:
        """Let running requests end, so many seconds at most."""
        self.closing = True
        for connection in list(self.connections):
            connection.finish()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.connections:
                    await asyncio.sleep(0.02)
        for connection in list(self.connections):
            log.warning("drain time is over: request %s is cut", connection.client and connection.client.id)
            connection.cancel()
        await asyncio.sleep(0)
