"""What clients may take of the proxy: connections, bytes, time. Held before anything of a request is understood."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import resource
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, fields

from isochunk.core.errors import ConfigError
from isochunk.proxy.errors import ProxyError

__all__ = ["Gate", "Limits", "client_of", "raise_descriptors"]

FREE_BYTES = 64 << 10  # of each body count for nothing: the number of connections bounds them
_SPARE_DESCRIPTORS = 32  # for the log, the event loop, name look-ups
_RETRY_AFTER_S = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Bounds on clients; each is held with an answer that names it, then the connection is closed.

    Attributes:
        connections: of all clients; more get 503.
        connections_each: of one address (IPv6: of one /64); more get 429.
        head_bytes: of a request line with its headers; more get 431.
        headers: in one request; more get 431.
        head_s: from a connection's or a request's first moment to the end of its headers; later gets 408.
        body_bytes: of one request; more get 413.
        bodies_bytes: of all requests in flight, one client having half of them; more get 503 or 429.
        body_s, body_rate: a body has so many seconds, and one more for each ``body_rate`` bytes that came; later
            gets 408.
        idle_s: between two requests of a connection.
    """

    connections: int = 8192
    connections_each: int = 4096
    head_bytes: int = 64 << 10
    headers: int = 128
    head_s: float = 15.0
    body_bytes: int = 256 << 20
    bodies_bytes: int = 1 << 30
    body_s: float = 30.0
    body_rate: int = 64 << 10
    idle_s: float = 60.0

    def __post_init__(self) -> None:
        for item in fields(self):
            if not getattr(self, item.name) > 0:
                raise ConfigError(f"{item.name} = {getattr(self, item.name)} must be above 0")


class Gate:
    """Counts what clients hold now."""

    def __init__(self, limits: Limits, connections: int | None = None) -> None:
        self.limits = limits
        self.connections = min(limits.connections, connections or limits.connections)
        self._all = 0
        self._each: Counter[str] = Counter()
        self._bytes = 0
        self._bytes_each: Counter[str] = Counter()

    @property
    def held_bytes(self) -> int:
        """Of all bodies in flight."""
        return self._bytes

    def enter(self, client: str) -> ProxyError | None:
        """Count a connection; the error when it is one too many and not counted."""
        if self._all >= self.connections:
            return ProxyError(503, "overloaded", "too many connections", retry_after_s=_RETRY_AFTER_S)
        if self._each[client] >= self.limits.connections_each:
            return ProxyError(429, "rate_limit_error", "too many connections of yours", retry_after_s=_RETRY_AFTER_S)
        self._all += 1
        self._each[client] += 1
        return None

    def leave(self, client: str) -> None:
        """A counted connection is closed."""
        self._all -= 1
        _take(self._each, client, 1)

    def room(self, client: str, size: int) -> ProxyError | None:
        """The error when a body of ``size`` bytes would not fit beside the others."""
        return self._room(client, size) if size > FREE_BYTES else None

    def _room(self, client: str, more: int) -> ProxyError | None:
        if self._bytes + more > self.limits.bodies_bytes:
            return ProxyError(503, "overloaded", "too many large requests at once", retry_after_s=_RETRY_AFTER_S)
        if self._bytes_each[client] + more > max(self.limits.bodies_bytes // 2, self.limits.body_bytes):
            message = "too many large requests of yours at once"
            return ProxyError(429, "rate_limit_error", message, retry_after_s=_RETRY_AFTER_S)
        return None

    def hold(self, client: str, held: int, more: int) -> ProxyError | None:
        """Count ``more`` bytes of a body of which ``held`` are counted; the error when there is no room for them."""
        if held + more > FREE_BYTES and (error := self._room(client, more)):
            return error
        self._bytes += more
        self._bytes_each[client] += more
        return None

    def release(self, client: str, size: int) -> None:
        """A body is gone."""
        self._bytes -= size
        _take(self._bytes_each, client, size)


def _take(counter: Counter[str], key: str, amount: int) -> None:
    counter[key] -= amount
    if counter[key] <= 0:
        del counter[key]


def client_of(peer: object) -> str:
    """Whom a connection counts for: the address, of IPv6 the /64 that one host has to itself."""
    if not isinstance(peer, tuple) or not peer:
        return "local"
    try:
        address = ipaddress.ip_address(str(peer[0]).partition("%")[0])
    except ValueError:
        return str(peer[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))
    return str(address)


def raise_descriptors(connections: int) -> int:
    """Raise the limit of open files as far as it goes; how many of ``connections`` clients may connect then.

    Each client's request needs at most one connection to a node at a time. Room for all of them is made in the
    system's table of this process's files now: Linux copies it each time it grows, and a process with several threads
    waits until all cores have let go of the old one.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError):  # more than the system allows
            pass
    most = min(max((soft - _SPARE_DESCRIPTORS) // 2, 1), connections)
    with suppress(OSError), open(os.devnull, "rb") as any_file:
        os.close(fcntl.fcntl(any_file, fcntl.F_DUPFD_CLOEXEC, min(2 * most + _SPARE_DESCRIPTORS, soft) - 1))
    return most
