"""Warms and calibrates a running server, and shows how well its cost model predicts before and after."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from isochunk.bench.arms import Arm
from isochunk.bench.client import Server, Status
from isochunk.bench.solo import PATIENCE_S, Solo, Turn, check_lengths, ended_by, left_out, policy_restored
from isochunk.core.cost import CostModel
from isochunk.core.errors import ConfigError, ServerError
from isochunk.core.flowshop import makespan

__all__ = ["Calibration", "as_dict", "calibrate", "verdict"]

_OPTIMAL = Arm("optimal")
_FAR_OFF = 0.1  # a median error from which a model that did not change is worth a word


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """All that a calibration saw.

    Attributes:
        url: the server whose model was calibrated.
        name: of the language model.
        tokens: length of every prompt.
        before: the server's status as it was found.
        after: its status when the last prompt had its first token.
        turns: the prompts in the order in which they were sent, the disturbed ones included.
        notes: what the client noticed under way.
        ended: why it ended before all prompts were sent; None when it did not.
    """

    url: str
    name: str
    tokens: int
    seed: int
    before: Status
    after: Status
    turns: tuple[Turn, ...] = field(repr=False)
    notes: tuple[str, ...] = ()
    ended: str | None = None

    @property
    def clean(self) -> list[Turn]:
        """The prompts that nothing spoilt."""
        return [turn for turn in self.turns if turn.disturbed is None]

    @property
    def moved(self) -> dict[str, int]:
        """The server's counters that moved, and by how much."""
        before, after = self.before["counters"], self.after["counters"]
        return {name: after[name] - before[name] for name in after if after[name] != before[name]}

    @property
    def learnt(self) -> bool:
        """Whether the server changed its model."""
        return bool(self.moved.get("refits") or self.moved.get("alarms"))

    def error(self, status: Status) -> float | None:
        """Median over the clean prompts of ``|predicted/measured - 1|`` of TTFT under the status's cost model.

        None without a model or a clean prompt.
        """
        predicted = [(predict(status, turn), turn.record["measured_ttft_s"]) for turn in self.clean]
        errors = [abs(seconds / measured - 1) for seconds, measured in predicted if seconds is not None]
        return median(errors) if errors else None

    @property
    def warnings(self) -> list[str]:
        """Why it ended early, what spoilt prompts, and what kept the server from learning."""
        warnings = [f"ended early, {len(self.turns)} prompts are kept: {self.ended}"] if self.ended else []
        warnings += [*self.notes, *left_out(turn.disturbed for turn in self.turns)]
        if guarded := sum(turn.record["policy"] != "optimal" for turn in self.clean):
            warnings.append(f"{guarded} x isochunk's guard used vLLM's own chunks after a plan did harm (counted in)")
        if self.before["policy"] != "optimal":
            found = f"{self.before['policy']} {self.before['chunk'] or ''}".rstrip()
            warnings.append(f"the policy was {found}; the run used optimal and put it back")
        if not self.before["need_timing"]:
            warnings.append(
                "need_timing is off on this server, so traffic teaches it nothing; start it with need_timing on"
            )
        elif not self.learnt and (self.error(self.after) or 0.0) > _FAR_OFF:
            warnings.append(
                f"nothing was learnt from {self.moved.get('steps', 0)} steps although the model is far off; "
                "send more or longer prompts (--requests, --tokens)"
            )
        return warnings


async def calibrate(
    server: Server,
    *,
    tokens: int | None = None,
    requests: int,
    seed: int,
    front: Server | None = None,
    patience_s: float = PATIENCE_S,
    progress: Callable[[Turn], None] = lambda turn: None,
) -> Calibration:
    """Send ``requests`` fresh prompts of exactly ``tokens`` tokens, one at a time, one output token each.

    The server plans them with its own policy ``optimal``; another policy is put back at the end, also when
    the calibration is cancelled. What was measured before that, or before the server failed for good, is returned.

    Args:
        tokens: None for the longest prompt that the server takes.
        front: where the prompts are sent when a proxy stands in front of ``server``.
        patience_s: seconds for which a prompt that a failure broke off is tried again.
        progress: called after each prompt.

    Raises:
        ConfigError: the prompts don't fit the server.
        ServerError: the server can't be reached, refuses, or is busy with other requests, and nothing was measured.
    """
    if requests < 1:
        raise ConfigError(f"requests = {requests} must be at least 1")
    tokens = await _longest(server) if tokens is None else tokens
    await check_lengths(server, [tokens])
    name = await server.model()
    turns: list[Turn] = []
    ended = None
    try:
        async with policy_restored(server) as found:
            solo = Solo(server, seed, front=front)
            for _ in range(requests):
                turns.append(await solo.turn(tokens, _OPTIMAL, patience_s=patience_s if turns else 0.0))
                progress(turns[-1])
    except (ServerError, asyncio.CancelledError) as error:
        if not turns:
            raise
        ended = ended_by(error)
    return Calibration(
        url=server.url,
        name=name,
        tokens=tokens,
        seed=seed,
        before=found,
        after=turns[-1].after,
        turns=tuple(turns),
        notes=(*server.notes, *(front.notes if front not in (None, server) else ())),
        ended=ended,
    )


def predict(status: Status, turn: Turn) -> float | None:
    """TTFT in the engine, seconds, that a status's cost model gives for the chunks that the prompt had."""
    if status["model"] is None:
        return None
    model = CostModel.of(status["model"])
    steps = zip(turn.record["chunks"], turn.record["histories"], strict=True)
    return makespan([model.seconds(chunk, history) for chunk, history in steps], status["stages"])


def verdict(result: Calibration) -> str:
    """One sentence: what became of the model and how far off it is."""
    if not result.clean:
        return "No prompt was clean, so nothing can be said about the model."
    before, after = result.error(result.before), result.error(result.after)
    if after is None:
        return "The server has no cost model and learnt none: vLLM's own chunks are used."
    now = f"its predictions of {result.tokens} tokens are {after:.1%} off at the median"
    if not result.learnt:
        return f"The model was left as it was: {now}."
    was = "there was none" if before is None else f"{before:.1%} before, for the same prompts"
    return f"The model was changed: {now} ({was})."


def as_dict(result: Calibration) -> dict[str, Any]:
    """Plain data for JSON."""
    return {
        "url": result.url,
        "model": result.name,
        "tokens": result.tokens,
        "seed": result.seed,
        "stages": result.after["stages"],
        "verdict": verdict(result),
        "warnings": result.warnings,
        "before": _fit(result, result.before),
        "after": _fit(result, result.after),
        "counters": result.moved,
        "requests": [_request(result, turn) for turn in result.turns],
    }


def _fit(result: Calibration, status: Status) -> dict[str, Any]:
    return {"coefficients": status["model"], "source": status["source"], "median_error": result.error(status)}


def _request(result: Calibration, turn: Turn) -> dict[str, Any]:
    record = turn.record
    return {
        "ttft_s": turn.answer.ttft_s,
        "engine_s": record["measured_ttft_s"],
        "predicted_s": record["predicted_ttft_s"],
        "predicted_before_s": predict(result.before, turn),
        "predicted_after_s": predict(result.after, turn),
        "disturbed": turn.disturbed,
        "record": record,
    }


async def _longest(server: Server) -> int:
    limit = await server.max_model_len()
    if limit is None:
        raise ConfigError(f"{server.url} does not say its max_model_len; give the prompts' length with --tokens")
    return limit - 1
