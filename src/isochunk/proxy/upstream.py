"""HTTP to the nodes.

On aiohttp: at 64 requests at once, one with a short streamed answer costs it 0.06 ms of a core, and httpx 0.83 ms
(``benchmarks/proxy_clients.py``), which would be more than the whole budget of the proxy.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import ssl
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from isochunk.proxy.body import SLICE, Pieces
from isochunk.proxy.config import Timeouts
from isochunk.proxy.errors import ExhaustedError, NodeFailedError, NodeUnreachableError
from isochunk.proxy.nodes import Node

__all__ = ["Upstream", "end_to_end"]

_KEEPALIVE_S = 3.0  # below the 5 s after which vLLM closes idle connections, or requests would meet the closing
_MOST_TOLD = 4 << 20  # bytes of what a node says of itself
_OURS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)
_HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
     "transfer-encoding", "upgrade"}
)  # fmt: skip


def end_to_end(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The headers that are not about one connection only, names in lower case (RFC 9110, 7.6.1)."""
    pairs = [(name.lower(), value) for name, value in headers]
    named = {part.strip().lower() for name, value in pairs if name == "connection" for part in value.split(",")}
    return [(name, value) for name, value in pairs if name not in _HOP_BY_HOP and name not in named]


class Upstream:
    """One pool of connections to all nodes; to be made inside the running event loop."""

    def __init__(self, timeouts: Timeouts, node_ca: Path | None = None) -> None:
        tls = ssl.create_default_context(cafile=node_ca) if node_ca else True
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S, ssl=tls),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=timeouts.connect_s),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept-Encoding", "Content-Type"),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    @asynccontextmanager
    async def post(
        self, node: Node, path: str, headers: Mapping[str, str], pieces: Pieces
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request; leaving the context early closes the connection, at which the node stops working.

        Raises:
            NodeUnreachableError: no connection.
            NodeFailedError: the connection broke.
        """
        size = sum(len(piece) for piece in pieces)
        data = b"".join(pieces) if size <= SLICE else _feed(pieces)
        sized = {**headers, "Content-Length": str(size)}
        with _translated(node):
            async with self._session.post(node.url + path, data=data, headers=sized, allow_redirects=False) as response:
                yield response

    async def get(
        self, url: str, headers: Mapping[str, str], seconds: float, *, method: str = "GET"
    ) -> tuple[int, Any]:
        """Status and body, parsed when it is JSON.

        Raises:
            OSError: no answer; a `TimeoutError` when it took too long.
            ValueError: the answer is not what it says it is.
            ExhaustedError: the proxy can't ask.
        """
        try:
            async with (
                asyncio.timeout(seconds),
                self._session.request(method, url, headers=headers, allow_redirects=False) as response,
            ):
                data = await _all_of(response)
                if response.content_type == "application/json":
                    return response.status, json.loads(data)
                return response.status, data
        except RecursionError as error:
            raise ValueError(f"{url} answers with too much nesting") from error
        except aiohttp.ClientError as error:
            if _is_exhausted(error):
                raise ExhaustedError from error
            raise OSError(str(error) or type(error).__name__) from error


async def _all_of(response: aiohttp.ClientResponse) -> bytes:
    parts, size = [], 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > _MOST_TOLD:
            raise ValueError(f"{response.url} answers more than {_MOST_TOLD} bytes")
        parts.append(part)
    return b"".join(parts)


@contextmanager
def _translated(node: Node) -> Iterator[None]:
    """Turns the client library's errors into the proxy's."""
    try:
        yield
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        if _is_exhausted(error):
            raise ExhaustedError from error
        node.suspect()
        raise NodeUnreachableError(
            node.name, node.role, f"can't be reached: {error}", public="can't be reached", answered=True
        ) from error
    except (aiohttp.ClientError, ConnectionError) as error:
        node.look_now.set()
        what = f"broke the connection: {str(error) or type(error).__name__}"
        raise NodeFailedError(node.name, node.role, what, public="broke the connection", broke=True) from error


def _is_exhausted(error: aiohttp.ClientError) -> bool:
    """Whether the connection failed for want of something of ours."""
    cause = getattr(error, "os_error", error)
    if isinstance(cause, OSError) and cause.errno in _OURS:
        return True
    if isinstance(error, aiohttp.ClientConnectorError):  # a failed name look-up does not say why
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as own:
            return own.errno in _OURS
    return False


async def _feed(pieces: Pieces) -> AsyncIterator[bytes | memoryview]:
    """Slices small enough that writing one never holds up the event loop."""
    for piece in pieces:
        for at in range(0, len(piece), SLICE):
            yield piece[at : at + SLICE]
