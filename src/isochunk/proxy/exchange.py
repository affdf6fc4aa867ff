"""One request to one node: sent, waited for, and judged."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from isochunk.proxy.body import Pieces
from isochunk.proxy.errors import NodeFailedError, NodeRefusedError
from isochunk.proxy.nodes import Node
from isochunk.proxy.request import ProxyRequest
from isochunk.proxy.upstream import Upstream, end_to_end

__all__ = ["Exchange", "parsed", "passed", "whole"]


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
            raise NodeFailedError(node.name, "did not answer in time", status=504) from error

    @asynccontextmanager
    async def post(
        self, node: Node, request: ProxyRequest, attempt_id: str, pieces: Pieces, more: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send the request to a node; past here it has accepted it.

        Raises:
            NodeRefusedError: the node found fault with the request.
            NodeFailedError: the node is at fault.
        """
        headers = {**request.headers, **more, "X-Request-Id": attempt_id}
        async with self._upstream.post(node, request.path, headers, pieces) as response:
            if response.status >= 500:
                text = (await response.read())[:300].decode(errors="replace")
                raise NodeFailedError(node.name, f"answered {response.status}: {text}")
            if response.status != 200:
                raise NodeRefusedError(node.name, response.status, passed(response), await response.read())
            yield response


async def whole(node: Node, response: aiohttp.ClientResponse) -> bytes:
    """The whole answer; an empty one is the node's fault."""
    data = await response.read()
    if not data:
        raise NodeFailedError(node.name, f"answered {response.status} and nothing else")
    return data


def parsed(node: Node, data: bytes) -> dict[str, Any]:
    """The answer as an object; anything else is the node's fault."""
    try:
        answer = json.loads(data)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise NodeFailedError(node.name, f"answered something else than a JSON object: {data[:80]!r}")
    return answer


def passed(response: aiohttp.ClientResponse) -> list[tuple[bytes, bytes]]:
    """The node's headers that go on to the client."""
    own = ("content-length", "date", "server", "x-request-id")
    return [
        (name.encode("latin-1"), value.encode("latin-1"))
        for name, value in end_to_end(response.headers.items())
        if name not in own
    ]
