"""One request, from the client through P and D and back."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from contextlib import ExitStack
from typing import Any

import aiohttp

from isochunk.proxy.body import Pieces
from isochunk.proxy.client import Client
from isochunk.proxy.config import ProxyConfig, Role
from isochunk.proxy.errors import ClientGoneError, NodeFailedError, NodeUnreachableError, ProxyError
from isochunk.proxy.exchange import Exchange, parsed, passed, whole
from isochunk.proxy.fleet import Fleet
from isochunk.proxy.metrics import Metrics
from isochunk.proxy.nodes import Node
from isochunk.proxy.prompt import TokenEstimate
from isochunk.proxy.protocol import decode_body, plan_handover, prefill_body
from isochunk.proxy.request import ProxyRequest, read_request
from isochunk.proxy.router import Choice, choose_decode, choose_prefill
from isochunk.proxy.upstream import Upstream

__all__ = ["Relay"]

log = logging.getLogger("isochunk.proxy")

_DONE = b"data: [DONE]"


class Relay:
    """Takes requests to a P and then to a D node, and says so when it can't."""

    def __init__(self, config: ProxyConfig, fleet: Fleet, upstream: Upstream, metrics: Metrics) -> None:
        self._config = config
        self._timeouts = config.timeouts
        self._fleet = fleet
        self._exchange = Exchange(upstream)
        self._metrics = metrics
        self._estimate = TokenEstimate()

    async def serve(self, client: Client) -> None:
        """Answer one request. Whatever happens, the client gets an answer or an error, and all counters go back."""
        outcome = "ok"
        path = client.path
        with self._metrics.request(path) as request:
            try:
                await self._try_nodes(await read_request(client, self._config, self._estimate), client)
            except asyncio.CancelledError:
                request.done("client_gone")
                raise
            except ClientGoneError:
                outcome = "client_gone"
            except ProxyError as error:
                outcome = "broken" if client.started else "refused" if error.status < 500 else "failed"
                if error.status >= 500:
                    log.warning("%s: %s", path, error)
                outcome = await _tell(client, error, outcome)
            request.done(outcome)

    async def _try_nodes(self, request: ProxyRequest, client: Client) -> None:
        """One attempt after the other, until one has begun to answer or there have been enough."""
        failed: set[str] = set()
        for attempt in range(1, self._config.attempts + 1):
            try:
                await self._attempt(request, client, f"{request.id}-{attempt}", frozenset(failed))
                return
            except NodeFailedError as error:
                failed.add(error.node)
                self._metrics.failed(error.node)
                if client.started or attempt == self._config.attempts:
                    raise
                log.info("request %s: %s; trying again", request.id, error)

    async def _attempt(self, request: ProxyRequest, client: Client, attempt_id: str, failed: frozenset[str]) -> None:
        choice = choose_prefill(self._fleet.pools[Role.PREFILL], request.prompt, request.tokens, failed)
        self._check_deadline(choice)
        with ExitStack() as until_first_byte:
            until_first_byte.enter_context(choice.node.hold())
            params = await self._prefill(request, choice, attempt_id)
            await self._decode(request, client, params, attempt_id, failed, until_first_byte)

    def _check_deadline(self, choice: Choice) -> None:
        deadline = self._config.deadline_s
        if deadline is None or choice.ttft_s is None or choice.ttft_s <= deadline:
            return
        message = f"the first token is predicted in {choice.ttft_s:.1f} s, later than the deadline of {deadline:g} s"
        raise ProxyError(429, "overloaded", message, retry_after_s=math.ceil(choice.ttft_s - deadline))

    async def _prefill(self, request: ProxyRequest, choice: Choice, attempt_id: str) -> dict[str, Any] | None:
        """Have P compute the prompt; what D must be told of it."""
        node = choice.node
        handover = plan_handover(node, attempt_id)
        pieces = prefill_body(request.body, handover, chat=request.chat)
        unseen = request.prompt.prints[choice.cached_pieces :]
        node.prefix.add(request.prompt.prints)
        began = time.monotonic()
        try:
            with node.load.job(choice.tokens, choice.busy_s):
                async with (
                    self._exchange.patience(node, self._timeouts.prefill_s),
                    self._exchange.post(node, request, attempt_id, pieces, handover.headers) as response,
                ):
                    answer = parsed(node, await whole(node, response))
        except BaseException:
            node.prefix.forget(unseen)
            raise
        self._metrics.prefilled(time.monotonic() - began, choice.ttft_s)
        self._learn(request, choice, answer)
        params = handover.decode_params(answer)
        if params is None:
            self._metrics.recomputed()
        return params

    def _learn(self, request: ProxyRequest, choice: Choice, answer: dict[str, Any]) -> None:
        """Compare the estimates with what P counted."""
        usage = answer.get("usage")
        if not isinstance(usage, dict) or not isinstance(usage.get("prompt_tokens"), int):
            return
        self._estimate.learn(request.prompt, usage["prompt_tokens"])
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if isinstance(cached, int) and choice.cached_pieces and usage["prompt_tokens"] > 0:
            had = int(len(request.prompt.prints) * cached / usage["prompt_tokens"]) + 1
            if had < choice.cached_pieces:
                self._metrics.missed(choice.cached_pieces - had)

    async def _decode(
        self,
        request: ProxyRequest,
        client: Client,
        params: dict[str, Any] | None,
        attempt_id: str,
        failed: frozenset[str],
        until_first_byte: ExitStack,
    ) -> None:
        """Have a D node answer; one that can't be connected to leaves the KV for the next."""
        pieces = decode_body(request.body, params)
        unreachable: set[str] = set()
        while True:
            node = choose_decode(self._fleet.pools[Role.DECODE], failed | unreachable)
            try:
                with node.load.job(request.tokens):
                    await self._answer(node, request, client, attempt_id, pieces, until_first_byte)
                return
            except NodeUnreachableError as error:
                if node.name in unreachable:
                    raise
                unreachable.add(node.name)
                self._metrics.failed(error.node)

    async def _answer(
        self,
        node: Node,
        request: ProxyRequest,
        client: Client,
        attempt_id: str,
        pieces: Pieces,
        until_first_byte: ExitStack,
    ) -> None:
        seconds = self._timeouts.first_s if request.stream else self._timeouts.answer_s
        async with (
            self._exchange.patience(node, seconds) as patience,
            self._exchange.post(node, request, attempt_id, pieces, {}) as response,
        ):
            headers = [*passed(response), (b"x-request-id", request.id.encode())]
            if not request.stream:
                data = await whole(node, response)
                patience.reschedule(None)
                await client.answer(response.status, headers, data)
                return
            piece = await response.content.readany()
            if not piece:
                raise NodeFailedError(node.name, "ended its stream before the first byte")
            until_first_byte.close()
            client.start(response.status, headers)
            await self._stream(node, client, response.content, piece, patience)

    async def _stream(
        self, node: Node, client: Client, content: aiohttp.StreamReader, piece: bytes, patience: asyncio.Timeout
    ) -> None:
        """Hand on pieces as they come, at the client's pace."""
        clock = asyncio.get_running_loop().time
        tail = b""
        while piece:
            patience.reschedule(None)  # the client's slowness is not the node's
            await client.send(piece)
            tail = (tail + piece)[-2 * len(_DONE) :]
            patience.reschedule(clock() + self._timeouts.silence_s)
            piece = await content.readany()
        if _DONE not in tail:
            raise NodeFailedError(node.name, "ended its stream without an end mark")
        await client.send(b"", last=True)


async def _tell(client: Client, error: ProxyError, outcome: str) -> str:
    try:
        await client.fail(error)
    except ClientGoneError:
        return "client_gone"
    return outcome
