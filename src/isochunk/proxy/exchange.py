"""One request to one node: sent, waited for, and judged."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

import aiohttp

from isochunk.proxy.body import Pieces
from isochunk.proxy.errors import NodeFailedError, NodeRefusedError
from isochunk.proxy.events import error_of
from isochunk.proxy.nodes import Node
from isochunk.proxy.upstream import Upstream, end_to_end

__all__ = ["Exchange", "passed", "said_error", "whole"]

_MOST_SAID = 1 << 20  # bytes of an error


class Sendable(Protocol):
    """What of a request goes to a node beside its body."""

    @property
    def path(self) -> str:
        """Of the route."""

    @property
    def headers(self) -> Mapping[str, str]:
        """The client's that are passed on."""


class Exchange:
    """Requests to nodes, with the proxy's time-outs and errors."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream

    @asynccontextmanager
    async def patience(self, node: Node, seconds: float) -> AsyncIterator[asyncio.Timeout]:
        """Wait so long for a node, and less when it is found to be lost."""
        try:
            async with asyncio.timeout(seconds) as timeout:
                with node.wait(timeout):
                    yield timeout
        except TimeoutError as error:
            node.look_now.set()
            raise NodeFailedError(node.name, node.role, "did not answer in time", status=504) from error

    @asynccontextmanager
    async def post(
        self, node: Node, request: Sendable, attempt_id: str, pieces: Pieces, more: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send the request to a node; past here it has accepted it.

        Raises:
            NodeRefusedError: the node found fault with the request.
            NodeFailedError: the node is at fault.
        """
        headers = {**request.headers, **more, "X-Request-Id": attempt_id}
        async with self._upstream.post(node, request.path, headers, pieces) as response:
            if response.status != 200 and not 400 <= response.status < 500:  # a redirect would tell its address
                text = (await response.content.read(_MOST_SAID))[:300].decode(errors="replace")
                what, public = f"answered {response.status}: {text}", f"answered {response.status}"
                raise NodeFailedError(node.name, node.role, what, public=public, answered=True)
            if response.status != 200:
                said = await response.content.read(_MOST_SAID)
                raise NodeRefusedError(node.name, response.status, passed(response), said)
            yield response


async def whole(node: Node, response: aiohttp.ClientResponse) -> tuple[bytes, dict[str, Any]]:
    """The whole answer and the object it is; anything else is the node's fault."""
    data = await response.read()
    if not data:
        raise NodeFailedError(node.name, node.role, f"answered {response.status} and nothing else")
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        public = "answered something else than a JSON object"
        raise NodeFailedError(node.name, node.role, f"{public}: {data[:80]!r}", public=public)
    if error := error_of(answer):
        raise said_error(node, error)
    return data, answer


def said_error(node: Node, error: dict[str, Any]) -> NodeFailedError:
    """A node that says 200 and then an error has failed."""
    message = str(error.get("message", error))[:300]
    code = error.get("code")
    status = code if isinstance(code, int) and 400 <= code < 600 else 502
    return NodeFailedError(node.name, node.role, f"answered an error: {message}", status=status)


def passed(response: aiohttp.ClientResponse) -> list[tuple[bytes, bytes]]:
    """The node's headers that go on to the client."""
    own = ("content-length", "date", "server", "x-request-id")
    return [
        (name.encode("latin-1"), value.encode("latin-1"))
        for name, value in end_to_end(response.headers.items())
        if name not in own
    ]
