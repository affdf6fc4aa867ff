"""Answers of the Responses API that a node keeps: asked for, or cancelled, later."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

from isochunk.proxy.client import Client
from isochunk.proxy.config import ProxyConfig, Role
from isochunk.proxy.errors import ProxyError
from isochunk.proxy.fleet import Fleet
from isochunk.proxy.nodes import Node
from isochunk.proxy.request import passed_headers
from isochunk.proxy.upstream import Upstream

__all__ = ["UNSAID", "Stored"]

_PATH = re.compile(r"/v1/responses/[\w-]{1,128}(/cancel)?", re.ASCII)
_SECONDS = 10.0
UNSAID = "a node that may keep this answer does not say"


class Stored:
    """Asks all D nodes, since the proxy keeps no list of who made which answer: only the one that did knows it."""

    def __init__(self, config: ProxyConfig, fleet: Fleet, upstream: Upstream) -> None:
        self._config = config
        self._fleet = fleet
        self._upstream = upstream

    async def serve(self, client: Client) -> None:
        """Answer one request.

        Raises:
            ProxyError: no node knows the answer, or one that may know it can't be asked.
        """
        if not _PATH.fullmatch(client.path):
            raise ProxyError(404, "not_found_error", "there is no such route")
        if client.query:
            raise ProxyError(400, "invalid_request_error", "a kept answer is told whole: ask without a query")
        await client.read()
        headers = passed_headers(client, self._config)
        told = await asyncio.gather(*(self._ask(node, client, headers) for node in self._fleet.pools[Role.DECODE]))
        for status, answer in told:
            if 200 <= status < 300 or (400 <= status < 500 and status != 404):
                await client.answer(status, [(b"content-type", b"application/json")], json.dumps(answer).encode())
                return
        if any(status != 404 for status, _ in told):
            raise ProxyError(503, "service_unavailable", UNSAID, retry_after_s=2)
        raise ProxyError(404, "not_found_error", "no node keeps such an answer")

    async def _ask(self, node: Node, client: Client, headers: dict[str, str]) -> tuple[int, Any]:
        method = "POST" if client.path.endswith("/cancel") else "GET"
        try:
            status, answer = await self._upstream.get(node.url + client.path, headers, _SECONDS, method=method)
        except (OSError, ValueError):
            return 0, None
        return (0, None) if isinstance(answer, bytes) else (status, answer)
