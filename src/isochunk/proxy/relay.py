"""One request, from the client through P and D and back."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from isochunk.proxy.body import Pieces
from isochunk.proxy.client import Client
from isochunk.proxy.config import ProxyConfig, Role
from isochunk.proxy.detour import Detour, OutputEstimate
from isochunk.proxy.errors import ClientGoneError, NodeFailedError, NodeRefusedError, ProxyError, RecomputedError
from isochunk.proxy.exchange import Exchange, whole
from isochunk.proxy.fleet import Fleet
from isochunk.proxy.metrics import Metrics
from isochunk.proxy.nodes import Node
from isochunk.proxy.prompt import TokenEstimate
from isochunk.proxy.protocol import decode_body, plan_handover, prefill_body
from isochunk.proxy.reply import Reply
from isochunk.proxy.request import ProxyRequest, read_request
from isochunk.proxy.router import Choice, choose_decode, choose_prefill, choose_without_prefill
from isochunk.proxy.trail import Judge, Trail

__all__ = ["Relay"]

log = logging.getLogger("isochunk.proxy")

_NEWS_S = 1.0  # to wait for a first D node to prove itself


@dataclass(frozen=True, slots=True)
class _Prefilled:
    """What D must be told of a prompt that P has computed."""

    params: dict[str, Any] | None
    attempt_id: str
    cached: int | None


class Relay:
    """Takes requests to a P and then to a D node, and says so when it can't."""

    def __init__(self, config: ProxyConfig, fleet: Fleet, exchange: Exchange, metrics: Metrics, judge: Judge) -> None:
        self._config = config
        self._timeouts = config.timeouts
        self._fleet = fleet
        self._exchange = exchange
        self._metrics = metrics
        self._judge = judge
        self._estimate = TokenEstimate()
        self._outputs = OutputEstimate()
        self._detour = Detour(config.skip_prefill)

    async def serve(self, client: Client) -> None:
        """Answer one request. Whatever happens, the client gets an answer or an error, and all counters go back."""
        outcome = "ok"
        with self._metrics.request(client.path) as counted:
            try:
                request = await read_request(client, self._config, self._estimate, self._fleet.longest())
                await self._answer(request, client)
            except asyncio.CancelledError:
                counted.done("client_gone" if client.gone else "error")
                raise
            except ClientGoneError:
                outcome = "client_gone"
            except ProxyError as error:
                outcome = "broken" if client.started else "refused" if error.status < 500 else "failed"
                if error.status >= 500:
                    log.warning("request %s: %s", client.id, error)
                outcome = await _tell(client, error, outcome)
            counted.done(outcome)

    async def _answer(self, request: ProxyRequest, client: Client) -> None:
        """One try after the other, until a node has begun to answer or there have been enough."""
        trail = self._judge.trail(request.id)
        reply = Reply(request, client, self._timeouts.silence_s)
        while True:
            trail.again = False
            with ExitStack() as held:
                try:
                    if request.whole:
                        await self._prefill_whole(request, trail, reply)
                    elif (node := self._without_prefill(request, trail)) is not None:
                        await self._decode_alone(node, request, trail, reply)
                    else:
                        prefilled = await self._prefill(request, client, trail, held)
                        reply.cached = prefilled.cached
                        await self._decode(request, trail, reply, prefilled, held)
                    self._outputs.learn(reply.tokens)
                    return
                except RecomputedError:
                    if not trail.may_restart():
                        raise ProxyError(502, "upstream_error", "decode nodes gave it up again and again") from None
                    self._metrics.resubmitted()
                    request = await request.continued(*reply.said(), self._estimate)
                except (NodeRefusedError, NodeFailedError) as error:
                    if reply.begun or not trail.again:
                        raise
                    log.info("request %s: %s; trying again", request.id, error)
            await asyncio.sleep(self._config.retry_delay_s)

    # P

    async def _prefill(self, request: ProxyRequest, client: Client, trail: Trail, held: ExitStack) -> _Prefilled:
        """Have a P node compute the prompt."""
        pool = self._fleet.pools[Role.PREFILL]
        while True:
            choice = choose_prefill(pool, request.prompt, request.tokens, trail.tried)
            self._check_deadline(choice)
            client.notes["prefill"] = choice.node.name
            try:
                with choice.node.health.attempt():
                    prefilled = await self._prefill_at(request, choice, trail.next_id())
                self._judge.well(choice.node, trail)
                held.enter_context(choice.node.hold())
                return prefilled
            except (NodeRefusedError, NodeFailedError) as error:
                if not self._judge.goes_on(choice.node, error, trail):
                    raise

    def _check_deadline(self, choice: Choice) -> None:
        deadline = self._config.deadline_s
        if deadline is None or choice.ttft_s is None or choice.ttft_s <= deadline:
            return
        message = f"the first token is predicted in {choice.ttft_s:.1f} s, later than the deadline of {deadline:g} s"
        raise ProxyError(429, "overloaded", message, retry_after_s=math.ceil(choice.ttft_s - deadline))

    async def _prefill_at(self, request: ProxyRequest, choice: Choice, attempt_id: str) -> _Prefilled:
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
                    _, answer = await whole(node, response)
        except BaseException:
            node.prefix.forget(unseen)
            raise
        self._metrics.prefilled(time.monotonic() - began, choice.ttft_s)
        cached = self._learn(request, choice, answer)
        params = handover.decode_params(answer)
        if params is None:
            self._metrics.recomputed()
            cached = None
        return _Prefilled(params, attempt_id, cached)

    def _learn(self, request: ProxyRequest, choice: Choice, answer: dict[str, Any]) -> int | None:
        """Compare the estimates with what P counted; its prefix hit, if it says so."""
        usage = answer.get("usage")
        if not isinstance(usage, dict) or not isinstance(usage.get("prompt_tokens"), int):
            return None
        self._estimate.learn(request.prompt, usage["prompt_tokens"])
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        if not isinstance(cached, int):
            return None
        if choice.cached_pieces and usage["prompt_tokens"] > 0:
            had = int(len(request.prompt.prints) * cached / usage["prompt_tokens"]) + 1
            if had < choice.cached_pieces:
                self._metrics.missed(choice.cached_pieces - had)
        return cached

    async def _prefill_whole(self, request: ProxyRequest, trail: Trail, reply: Reply) -> None:
        """Have a P node answer all of it."""
        pool = self._fleet.pools[Role.PREFILL]
        pieces = decode_body(request.body, None)
        while True:
            choice = choose_prefill(pool, request.prompt, request.tokens, trail.tried)
            self._check_deadline(choice)
            try:
                with (
                    ExitStack() as held,
                    choice.node.health.attempt() as answered,
                    choice.node.load.job(choice.tokens, choice.busy_s),
                ):
                    held.callback(answered)
                    await self._reply(choice.node, request, trail, reply, trail.next_id(), pieces, held)
                return
            except (NodeRefusedError, NodeFailedError) as error:
                if not self._judge.goes_on(choice.node, error, trail, midway=reply.begun) or reply.begun:
                    raise

    # D

    def _without_prefill(self, request: ProxyRequest, trail: Trail) -> Node | None:
        """A D node that has so much of the prompt, or so little to compute, that P is not worth the way."""
        if trail.tried or not self._detour.wanted:
            return None
        most = self._detour.threshold(self._fleet.pools[Role.PREFILL])
        return choose_without_prefill(self._fleet.pools[Role.DECODE], request.prompt, request.tokens, most)

    async def _decode_alone(self, node: Node, request: ProxyRequest, trail: Trail, reply: Reply) -> None:
        """Have a D node compute the prompt and answer."""
        self._metrics.skipped()
        pieces = decode_body(request.body, None)
        with ExitStack() as held, node.health.attempt() as answered, node.load.job(self._care_of(request)):
            held.callback(answered)
            try:
                await self._reply(node, request, trail, reply, trail.next_id(), pieces, held)
            except (NodeRefusedError, NodeFailedError) as error:
                trail.failed_decode = True
                trail.again = self._judge.goes_on(node, error, trail, midway=reply.begun)
                raise
        node.prefix.add(request.prompt.prints)

    def _care_of(self, request: ProxyRequest) -> int:
        """Tokens that a D node will hold for the request, halfway through its answer."""
        return request.tokens + self._outputs.tokens(request.wanted) // 2

    async def _decode(
        self, request: ProxyRequest, trail: Trail, reply: Reply, prefilled: _Prefilled, held: ExitStack
    ) -> None:
        """Have a D node answer; one that does not touch the KV leaves it for the next."""
        pieces = decode_body(request.body, prefilled.params)
        while True:
            node = await self._place(trail)
            try:
                with node.health.attempt() as answered, node.load.job(self._care_of(request)):
                    held.callback(answered)
                    await self._reply(node, request, trail, reply, prefilled.attempt_id, pieces, held)
                node.prefix.add(request.prompt.prints)
                return
            except (NodeRefusedError, NodeFailedError) as error:
                goes_on = self._judge.goes_on(node, error, trail, midway=reply.begun) and not reply.begun
                untouched = isinstance(error, NodeRefusedError) or error.untouched
                if not (goes_on and untouched):
                    trail.failed_decode = True
                    trail.again = goes_on
                    raise

    async def _place(self, trail: Trail) -> Node:
        pool = self._fleet.pools[Role.DECODE]
        end = time.monotonic() + _NEWS_S
        wary = trail.failed_decode
        while (left := end - time.monotonic()) > 0:
            node = choose_decode(pool, trail.tried, wary=wary, patient=True)
            if node is not None:
                return node
            await pool.news.wait(left)
        node = choose_decode(pool, trail.tried, wary=wary)
        assert node is not None
        return node

    async def _reply(
        self,
        node: Node,
        request: ProxyRequest,
        trail: Trail,
        reply: Reply,
        attempt_id: str,
        pieces: Pieces,
        until_first_byte: ExitStack,
    ) -> None:
        """Have a node answer, and hand its answer on."""

        asked = time.monotonic()

        def began() -> None:
            until_first_byte.close()
            self._judge.began(node, trail)
            if node.role is Role.DECODE and request.stream:
                self._detour.handed_over(time.monotonic() - asked)

        reply.client.notes[str(node.role)] = node.name

        seconds = self._timeouts.first_s if request.stream else self._timeouts.answer_s
        async with (
            self._exchange.patience(node, seconds) as patience,
            self._exchange.post(node, request, attempt_id, pieces, {}) as response,
        ):
            await reply.take(node, response, patience, began)
        self._judge.well(node, trail)


async def _tell(client: Client, error: ProxyError, outcome: str) -> str:
    try:
        await client.fail(error)
    except ClientGoneError:
        return "client_gone"
    return outcome
