"""The interleaved A/B on one running server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from random import Random

from isochunk.bench.arms import Arm
from isochunk.bench.client import Server
from isochunk.bench.results import Comparison, Sample
from isochunk.bench.solo import PATIENCE_S, Solo, check_lengths, ended_by, policy_restored
from isochunk.core.errors import ConfigError, ServerError

__all__ = ["compare", "different_arms"]

_TRIES = 3


async def compare(
    server: Server,
    *,
    arms: Sequence[Arm],
    lengths: Sequence[int],
    rounds: int,
    seed: int,
    patience_s: float = PATIENCE_S,
    progress: Callable[[Sample], None] = lambda sample: None,
) -> Comparison:
    """Measure every arm at every length ``rounds`` times, in random order, every prompt fresh.

    The arms of one length follow each other directly, so that a round's ratios see the same machine. The
    server's policy is put back at the end, also when the comparison is cancelled. What was measured before a
    cancellation, or before the server failed for good, is returned as a comparison that `ended` early.

    Args:
        patience_s: seconds for which a prompt that a failure of the server or the network broke off is tried again.
        progress: called with each sample that counts.

    Raises:
        ConfigError: a length does not fit the server.
        ServerError: the server can't be reached, refuses, or is busy with other requests, and nothing was measured.
    """
    if not arms or not lengths or rounds < 1:
        raise ConfigError(f"{len(arms)} policies, {len(lengths)} lengths and {rounds} rounds: give at least 1 of each")
    await check_lengths(server, lengths)
    solo = Solo(server, seed)
    order = Random(seed)
    samples: list[Sample] = []
    ended = None
    model = await server.model()
    try:
        async with policy_restored(server) as found:
            status = found
            await _warm_up(solo, arms, lengths)
            for number in range(rounds):
                for tokens in order.sample(list(lengths), len(lengths)):
                    different = different_arms(arms, tokens)
                    for arm in order.sample(different, len(different)):
                        samples += await _measure(solo, number, tokens, arm, patience_s)
                        progress(samples[-1])
            status = await server.status()
    except (ServerError, asyncio.CancelledError) as error:
        if not samples:
            raise
        ended = ended_by(error)
    return Comparison(
        url=server.url,
        model=model,
        seed=seed,
        arms=tuple(arms),
        lengths=tuple(lengths),
        rounds=rounds,
        status={name: value for name, value in status.items() if name != "prompts"},
        samples=tuple(samples),
        notes=tuple(server.notes),
        ended=ended,
    )


def different_arms(arms: Sequence[Arm], tokens: int) -> list[Arm]:
    """The arms that can differ on a prompt: of the fixed sizes that take it in one step, the largest is enough."""
    one_step = [arm for arm in arms if arm.policy == "fixed" and (arm.chunk or 0) >= tokens]
    largest = max(one_step, key=lambda arm: arm.chunk or 0, default=None)
    return [arm for arm in arms if arm not in one_step or arm == largest]


async def _warm_up(solo: Solo, arms: Sequence[Arm], lengths: Sequence[int]) -> None:
    """Every arm once at the least length, and every length once under the first arm, not counted."""
    for arm in arms[1:]:
        await solo.turn(min(lengths), arm)
    for tokens in lengths:
        await solo.turn(tokens, arms[0])


async def _measure(solo: Solo, number: int, tokens: int, arm: Arm, patience_s: float) -> list[Sample]:
    """One sample, the last of the list; before it those that had to be measured again."""
    samples: list[Sample] = []
    while len(samples) < _TRIES and (not samples or samples[-1].disturbed):
        turn = await solo.turn(tokens, arm, patience_s=patience_s)
        samples.append(
            Sample(
                round=number,
                tokens=tokens,
                arm=arm,
                ttft_s=turn.answer.ttft_s,
                record=turn.record,
                disturbed=turn.disturbed,
            )
        )
    return samples
