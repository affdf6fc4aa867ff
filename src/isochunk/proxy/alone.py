"""Requests that one node answers: what needs no prompt computed elsewhere, and APIs whose KV can't be handed over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import aiohttp

from isochunk.proxy.body import Pieces, parse_body
from isochunk.proxy.client import Client
from isochunk.proxy.config import ProxyConfig, Role
from isochunk.proxy.errors import NodeFailedError, NodeRefusedError, ProxyError, StreamError
from isochunk.proxy.events import Cutter
from isochunk.proxy.exchange import Exchange, passed
from isochunk.proxy.fleet import Fleet
from isochunk.proxy.nodes import Node
from isochunk.proxy.request import passed_headers
from isochunk.proxy.router import choose_any
from isochunk.proxy.stored import UNSAID
from isochunk.proxy.trail import Judge, Trail

__all__ = ["ONE_NODE", "Alone"]

log = logging.getLogger("isochunk.proxy")

# Who answers: generation is D's, which computes the prompt itself; what only reads a prompt is P's.
ONE_NODE = {
    "/tokenize": Role.DECODE,
    "/detokenize": Role.DECODE,
    "/v1/responses": Role.DECODE,
    "/v1/messages": Role.DECODE,
    "/v1/messages/count_tokens": Role.DECODE,
    "/v1/embeddings": Role.PREFILL,
    "/v1/score": Role.PREFILL,
    "/v1/rerank": Role.PREFILL,
    "/pooling": Role.PREFILL,
    "/classify": Role.PREFILL,
}
_BYTES_A_TOKEN = 4


@dataclass(frozen=True, slots=True)
class _Order:
    path: str
    headers: Mapping[str, str]


class Alone:
    """Hands a request to one node, and its answer back; another node is tried while nothing has gone out."""

    def __init__(self, config: ProxyConfig, fleet: Fleet, exchange: Exchange, judge: Judge) -> None:
        self._config = config
        self._timeouts = config.timeouts
        self._fleet = fleet
        self._exchange = exchange
        self._judge = judge

    async def serve(self, client: Client) -> None:
        """Answer one request.

        Raises:
            ProxyError: what the client gets in place of an answer, or at the end of its stream.
        """
        body = await client.read()
        order = _Order(client.path, passed_headers(client, self._config))
        pool = self._fleet.pools[ONE_NODE[client.path]]
        trail = self._judge.trail(client.id)
        trail.lenient = client.path == "/v1/responses" and await _goes_on(body)
        unknown: set[str] = set()
        while True:
            node = choose_any(pool, trail.tried)
            client.notes[str(node.role)] = node.name
            try:
                tokens = len(body) // _BYTES_A_TOKEN
                with ExitStack() as held, node.health.attempt() as answered, node.load.job(tokens):
                    held.callback(answered)
                    await self._ask(node, order, client, trail, [memoryview(body)], held)
                return
            except (NodeRefusedError, NodeFailedError) as error:
                goes_on = self._judge.goes_on(node, error, trail, midway=client.started) and not client.started
                if trail.lenient and error.status == 404:
                    unknown.add(node.name)
                    if not goes_on and any(one.name not in unknown for one in pool):
                        raise ProxyError(503, "service_unavailable", UNSAID, retry_after_s=2) from error
                if not goes_on:
                    raise
                log.info("request %s: %s; trying again", client.id, error)

    async def _ask(
        self, node: Node, order: _Order, client: Client, trail: Trail, pieces: Pieces, held: ExitStack
    ) -> None:
        async with (
            self._exchange.patience(node, self._timeouts.answer_s) as patience,
            self._exchange.post(node, order, trail.next_id(), pieces, {}) as response,
        ):
            if response.content_type == "text/event-stream":
                await self._stream(node, client, trail, response, patience, held)
                return
            data = await response.read()
            if not data:
                raise NodeFailedError(node.name, node.role, f"answered {response.status} and nothing else")
            held.close()
            self._judge.well(node, trail)
            patience.reschedule(None)
            await client.answer(response.status, passed(response), data)

    async def _stream(
        self,
        node: Node,
        client: Client,
        trail: Trail,
        response: aiohttp.ClientResponse,
        patience: asyncio.Timeout,
        held: ExitStack,
    ) -> None:
        cutter, clock = Cutter(), asyncio.get_running_loop().time
        while piece := await response.content.readany():
            try:
                events = cutter.feed(piece)
            except StreamError as error:
                raise NodeFailedError(node.name, node.role, str(error)) from None
            if not events:
                continue
            if not client.started:
                held.close()
                self._judge.began(node, trail)
                client.start(response.status, passed(response))
            patience.reschedule(None)
            await client.send(events)
            patience.reschedule(clock() + self._timeouts.silence_s)
        if not client.started or cutter.rest:
            raise NodeFailedError(node.name, node.role, "ended its stream in the middle")
        self._judge.well(node, trail)
        await client.send(b"", last=True)


async def _goes_on(body: bytearray) -> bool:
    """Whether the request goes on from an answer that only one node keeps."""
    return isinstance((await parse_body(body)).values.get("previous_response_id"), str)
