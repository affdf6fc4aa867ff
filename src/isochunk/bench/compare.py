"""The interleaved A/B on one running server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any

from isochunk.bench.arms import Arm
from isochunk.bench.client import Answer, Server, Status
from isochunk.bench.prompts import PromptMaker
from isochunk.bench.results import Comparison, Sample
from isochunk.core.errors import ConfigError, ServerError

__all__ = ["compare", "different_arms"]

_TRIES = 3
_IDLE_SECONDS = 10.0
_RECORD_SECONDS = 5.0
_POLL_SECONDS = 0.05


async def compare(
    server: Server,
    *,
    arms: Sequence[Arm],
    lengths: Sequence[int],
    rounds: int,
    seed: int,
    progress: Callable[[Sample], None] = lambda sample: None,
) -> Comparison:
    """Measure every arm at every length ``rounds`` times, in random order, every prompt fresh.

    The arms of one length follow each other directly, so that a round's ratios see the same machine. The
    server's policy is put back at the end, also when the comparison is cancelled.

    Args:
        progress: called with each sample that counts.

    Raises:
        ConfigError: a length does not fit the server.
        ServerError: the server can't be reached, refuses, or is busy with other requests.
    """
    await _check(server, arms, lengths, rounds)
    bench = _Bench(server, PromptMaker(server, seed))
    order = Random(seed)
    samples: list[Sample] = []
    async with _policy_restored(server):
        await bench.warm_up(arms, lengths)
        for number in range(rounds):
            for tokens in order.sample(list(lengths), len(lengths)):
                different = different_arms(arms, tokens)
                for arm in order.sample(different, len(different)):
                    samples += await bench.measure(number, tokens, arm)
                    progress(samples[-1])
        status = await server.status()
    return Comparison(
        url=server.url,
        model=await server.model(),
        seed=seed,
        arms=tuple(arms),
        lengths=tuple(lengths),
        rounds=rounds,
        status={name: value for name, value in status.items() if name != "prompts"},
        samples=tuple(samples),
    )


def different_arms(arms: Sequence[Arm], tokens: int) -> list[Arm]:
    """The arms that can differ on a prompt: of the fixed sizes that take it in one step, the largest is enough."""
    one_step = [arm for arm in arms if arm.policy == "fixed" and (arm.chunk or 0) >= tokens]
    largest = max(one_step, key=lambda arm: arm.chunk or 0, default=None)
    return [arm for arm in arms if arm not in one_step or arm == largest]


class _Bench:
    def __init__(self, server: Server, prompts: PromptMaker) -> None:
        self._server = server
        self._prompts = prompts

    async def warm_up(self, arms: Sequence[Arm], lengths: Sequence[int]) -> None:
        """Every arm once at the least length, and every length once under the first arm, not counted."""
        await self._idle()
        for arm in arms[1:]:
            await self._once(min(lengths), arm)
        for tokens in lengths:
            await self._once(tokens, arms[0])

    async def measure(self, number: int, tokens: int, arm: Arm) -> list[Sample]:
        """One sample, the last of the list; before it those that had to be measured again."""
        samples: list[Sample] = []
        while len(samples) < _TRIES and (not samples or samples[-1].disturbed):
            before = await self._idle()
            answer, after, record = await self._once(tokens, arm)
            samples.append(
                Sample(
                    round=number,
                    tokens=tokens,
                    arm=arm,
                    ttft_s=answer.ttft_s,
                    record=record,
                    disturbed=_disturbance(before, after, answer, record, tokens, arm),
                )
            )
        return samples

    async def _once(self, tokens: int, arm: Arm) -> tuple[Answer, Status, dict[str, Any]]:
        prompt = await self._prompts.prompt(tokens)
        await self._server.use(arm.policy, arm.chunk)
        answer = await self._server.complete(prompt)
        for _ in range(int(_RECORD_SECONDS / _POLL_SECONDS)):
            status = await self._server.status()
            for record in reversed(status["prompts"]):
                if answer.request_id in record["request_id"]:
                    return answer, status, record
            await asyncio.sleep(_POLL_SECONDS)
        raise ServerError(
            f"{self._server.url} answered a prompt of {tokens} tokens but its status does not list it; "
            "is a proxy in between, or is the server swamped with other requests?"
        )

    async def _idle(self) -> Status:
        for _ in range(int(_IDLE_SECONDS / _POLL_SECONDS)):
            status = await self._server.status()
            queue = status["queue"]
            if not queue["running"] and not queue["waiting"]:
                return status
            await asyncio.sleep(_POLL_SECONDS)
        raise ServerError(
            f"{self._server.url} is busy with other requests ({queue['running']} running, {queue['waiting']} waiting); "
            "an A/B needs the server to itself: stop them and try again"
        )


def _disturbance(
    before: Status, after: Status, answer: Answer, record: dict[str, Any], tokens: int, arm: Arm
) -> str | None:
    """What makes a sample worthless; None when nothing does."""
    cached = max(record["cached"], answer.cached_tokens or 0)
    if cached:
        return f"prefix hit: {cached} tokens were in the cache already (take another seed)"
    if record["tokens"] != tokens:
        return f"the server cut a prompt of {tokens} tokens to {record['tokens']}"
    if after["policy"] != arm.policy or after["chunk"] != arm.chunk:
        return f"somebody changed the policy to {after['policy']} {after['chunk'] or ''}".rstrip()
    if record["policy"] != arm.policy and arm.policy != "optimal":
        return "isochunk's guard used vLLM's own chunks in place of the policy's"
    ours = len(record["chunks"])
    steps = after["counters"]["steps"] - before["counters"]["steps"]
    if not record["alone"] or steps > ours + after["stages"]:
        return "other traffic on the server"
    return None


async def _check(server: Server, arms: Sequence[Arm], lengths: Sequence[int], rounds: int) -> None:
    if not arms or not lengths or rounds < 1:
        raise ConfigError(f"{len(arms)} policies, {len(lengths)} lengths and {rounds} rounds: give at least 1 of each")
    limit = await server.max_model_len()
    for tokens in lengths:
        if tokens < 1 or (limit is not None and tokens + 1 > limit):
            raise ConfigError(
                f"length {tokens} must be from 1 to {'any' if limit is None else limit - 1}: the server takes "
                f"{limit} tokens (max_model_len), one of them for the answer"
            )


@asynccontextmanager
async def _policy_restored(server: Server) -> AsyncIterator[None]:
    found = await server.status()
    try:
        yield
    except BaseException as error:  # cancellation (Ctrl-C) too: somebody else's server is left as it was
        try:
            await server.use(found["policy"], found["chunk"])
        except ServerError as gone:
            error.add_note(f"the policy could not be put back to {found['policy']}: {gone}")
        raise
    await server.use(found["policy"], found["chunk"])
