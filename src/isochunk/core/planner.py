"""The law: the chunks of one prompt that give the earliest first token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from isochunk.core.cost import CostModel
from isochunk.core.errors import IsochunkError, PlanError
from isochunk.core.flowshop import makespan, through_stage
from isochunk.core.taper import tapered_ends
from isochunk.core.walks import best_walk

__all__ = ["POLICIES", "Plan", "Policy", "evaluate", "law_target", "plan", "static_plan", "static_ttft"]

Policy = Literal["optimal", "first_chunk", "fixed"]
POLICIES: tuple[Policy, ...] = get_args(Policy)

MAX_TOKENS = 100_000_000
MAX_STAGES = 1024
MAX_STEPS = 1 << 17

_SWEPT = 64  # no plan is above the best of the fixed sizes that are multiples of this
_MOST_STEPS = 16_384  # of a size tried, or of a target; a million tokens in steps of 64
_MOST_EQUAL = 1024  # steps of a cut that is solved for exactly
_MOST_TAPERED = 256
_MOST_LIMITED = 64  # of the token limit; with more of them what it costs is little

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The chunks of one prompt and what they are predicted to cost.

    Attributes:
        policy: the rule that made the cut.
        chunks: new tokens of each step, in order.
        target_s: seconds of a step that the rule aims at.
        ttft_s: predicted seconds from the first step's entry to the last step's exit.
        step_seconds: predicted seconds of each step on one stage (on the slowest one when they differ).
    """

    policy: Policy
    chunks: tuple[int, ...]
    target_s: float
    ttft_s: float
    step_seconds: tuple[float, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self) | {"chunks": list(self.chunks), "step_seconds": list(self.step_seconds)}


def law_target(model: CostModel, queued_work: float, stages: int, step_cost: float | None = None) -> float:
    """Seconds of a step that make the mean TTFT least: ``T* = c0e + sqrt(c0e*Abar/(P-1))``.

    ``queued_work`` is Abar: the mean, over the waiting prompts, of the seconds of work queued up to and
    including each. For one prompt it is that prompt's work. ``step_cost`` is c0e (`CostModel.step_cost`).
    """
    cost = model.c0 if step_cost is None else step_cost
    return cost + math.sqrt(cost * queued_work / max(stages - 1, 1))


def plan(
    model: CostModel | Sequence[CostModel],
    tokens: int,
    stages: int | None = None,
    *,
    cached: int = 0,
    max_chunk: int | None = None,
    block: int = 1,
    policy: Policy = "optimal",
) -> Plan:
    """Cut one prompt into chunks.

    Args:
        model: the cost of a step on one stage, or one model a stage when they differ.
        tokens: length of the prompt, its cached part included.
        stages: number of pipeline stages P; may be left out with one model a stage.
        cached: tokens at the start that are in the KV cache already (a prefix hit).
        max_chunk: most new tokens a step can hold (``max_num_batched_tokens``); None for no limit.
        block: KV block size; inner cut points are multiples of it.
        policy: ``optimal`` is the law; ``first_chunk`` the published rule, whose target is the time of a
            first chunk of ``max_chunk`` tokens; ``fixed`` vLLM's own fixed size ``max_chunk``.

    Raises:
        PlanError: an argument is out of its range.
    """
    models = _models(model, stages)
    limit = _check(tokens, cached, max_chunk, block, policy)
    slowest = max(models, key=lambda m: m.work(cached, tokens))
    if policy == "optimal":
        candidates = _optimal_cuts(models, slowest, cached, tokens, limit, block)
        return min((_as_plan(policy, models, cached, cut, t) for cut, t in candidates), key=_preference)
    target = slowest.seconds(limit)
    if policy == "fixed":
        return _as_plan(policy, models, cached, _static_cut(cached, tokens, limit), target)
    return _as_plan(policy, models, cached, _timed_cut(slowest, cached, tokens, target, limit, block), target)


def static_plan(model: CostModel | None, tokens: int, stages: int, *, cached: int, max_chunk: int) -> Plan | None:
    """What vLLM's own size would do with a recorded prompt; None without a model, or where no plan can be made."""
    if model is None:
        return None
    try:
        return plan(model, tokens, stages, cached=cached, max_chunk=max_chunk, policy="fixed")
    except IsochunkError:
        return None


def evaluate(
    model: CostModel | Sequence[CostModel],
    chunks: Sequence[int],
    stages: int | None = None,
    *,
    cached: int = 0,
) -> float:
    """Predicted TTFT in seconds of a given cut: the flow-shop makespan of its steps."""
    return _passage(_models(model, stages), cached, chunks)[1]


def static_ttft(model: CostModel, start: int, end: int, sizes: npt.ArrayLike, stages: int) -> Floats:
    """Predicted TTFT of tokens ``start`` to ``end`` under each fixed chunk size, identical stages.

    Closed form of `makespan` for equal chunks with a shorter last one. ``sizes`` has shape (n,), so has
    the result, in seconds.
    """
    size = np.minimum(np.asarray(sizes, dtype=np.float64), end - start)
    steps = np.ceil((end - start) / size)
    last_start = start + (steps - 1) * size
    histories = steps * start + size * steps * (steps - 1) / 2
    rest = end - start - (steps - 1) * size
    linear = (steps - 1) * model.line(size) + model.line(rest)
    total = linear + model.work(start, end) - model.c1 * (end - start) + model.c3 * histories
    last = model.seconds(end - last_start, last_start)
    full = np.where(steps > 1, model.seconds(size, np.maximum(last_start - size, start)), 0.0)
    return np.asarray(total + (stages - 1) * np.maximum(last, full))


def _preference(candidate: Plan) -> tuple[float, int]:
    return (candidate.ttft_s, len(candidate.chunks))


def _models(model: CostModel | Sequence[CostModel], stages: int | None) -> tuple[CostModel, ...]:
    if isinstance(model, CostModel):
        if stages is None:
            raise PlanError("stages is missing: give the pipeline-parallel size")
        if not 1 <= stages <= MAX_STAGES:
            raise PlanError(f"stages = {stages} must be from 1 to {MAX_STAGES}, the pipeline-parallel size")
        return (model,) * stages
    models = tuple(model)
    if not models or stages not in (None, len(models)):
        raise PlanError(f"{len(models)} stage models do not fit stages = {stages}")
    return models


def _check(tokens: int, cached: int, max_chunk: int | None, block: int, policy: Policy) -> int:
    if policy not in POLICIES:
        raise PlanError(f"policy = {policy!r} must be one of {', '.join(POLICIES)}")
    if not 1 <= tokens <= MAX_TOKENS:
        raise PlanError(f"tokens = {tokens} must be from 1 to {MAX_TOKENS}")
    if not 0 <= cached < tokens:
        raise PlanError(f"cached = {cached} must be at least 0 and below tokens = {tokens}")
    if block < 1:
        raise PlanError(f"block = {block} must be at least 1")
    if max_chunk is None:
        if policy != "optimal":
            raise PlanError(f"policy {policy} needs max_chunk, the size of its first chunk")
        return tokens - cached
    if max_chunk < 1:
        raise PlanError(f"max_chunk = {max_chunk} must be at least 1")
    if (steps := math.ceil((tokens - cached) / max_chunk)) > MAX_STEPS:
        raise PlanError(
            f"tokens = {tokens} take {steps} steps of max_chunk = {max_chunk}; at most {MAX_STEPS} are planned"
        )
    return max_chunk


def _as_plan(policy: Policy, models: tuple[CostModel, ...], cached: int, chunks: Sequence[int], target: float) -> Plan:
    seconds, ttft = _passage(models, cached, chunks)
    return Plan(
        policy=policy,
        chunks=tuple(chunks),
        target_s=float(target),
        ttft_s=ttft,
        step_seconds=tuple(seconds.tolist()),
    )


def _passage(models: tuple[CostModel, ...], cached: int, chunks: Sequence[int]) -> tuple[Floats, float]:
    """Seconds of each step on its slowest stage, and when the last one leaves the last stage."""
    sizes = np.asarray(chunks, dtype=np.float64)
    histories = cached + np.concatenate(([0.0], np.cumsum(sizes)[:-1]))
    if models.count(models[0]) == len(models):
        seconds = models[0].seconds(sizes, histories)
        return seconds, makespan(seconds, len(models))
    slowest = left = np.zeros(len(sizes))
    for model in models:
        seconds = model.seconds(sizes, histories)
        slowest = np.maximum(slowest, seconds)
        left = through_stage(left, seconds)
    return slowest, float(left[-1])


def _static_cut(start: int, end: int, size: int) -> list[int]:
    full, rest = divmod(end - start, size)
    return [size] * full + ([rest] if rest else [])


def _timed_cut(model: CostModel, start: int, end: int, target: float, limit: int, block: int) -> list[int]:
    """Chunks that each take about ``target`` seconds, as many as the prompt needs."""
    chunks = []
    at = start
    while at < end:
        size = align(at, model.chunk(target, at), limit, block)
        size = min(size, end - at)
        chunks.append(size)
        at += size
        if len(chunks) > _MOST_STEPS:
            raise PlanError(f"steps of {target:.3g} s each are more than {_MOST_STEPS}; give a larger max_chunk")
    return chunks


def align(at: int, chunk: float, limit: int, block: int) -> int:
    """The chunk nearest to ``chunk`` that ends on a block boundary, at least one token, at most ``limit``."""
    chunk = min(chunk, limit + block)  # which may be endless, where a token costs nothing
    end = round((at + chunk) / block) * block
    if end - at > limit:
        end = (at + limit) // block * block
    if end <= at:
        end = (at // block + 1) * block
    return min(end - at, limit)


def _optimal_cuts(
    models: tuple[CostModel, ...], model: CostModel, start: int, end: int, limit: int, block: int
) -> list[tuple[list[int], float]]:
    """Candidate cuts with their targets: equal times around the law's count, walks, and the best fixed size."""
    stages = len(models)
    work = model.work(start, end)
    step_cost = model.step_cost(start, end)
    ideal = math.sqrt((stages - 1) * work / step_cost)
    fewest = math.ceil((end - start) / limit)
    most = math.ceil((end - start) / block)
    size, known = _best_static(model, start, end, limit, block, stages, ideal)
    cuts = [(_static_cut(start, end, size), model.seconds(size))]
    target = law_target(model, work, stages, step_cost)
    # Where the limit holds the first steps below the law's, equal times are not the best that is left.
    limited = model.marginal_chunk(target - model.c0, start) > limit and fewest <= _MOST_LIMITED
    if model.curve is not None or limited:
        walked = best_walk(model, start, end, limit, block, stages, target, known)
        if walked:  # where the curve is flat its steps are longer than the law's for the straight line
            cuts.append((walked, float(np.median(_passage((model,), start, walked)[0]))))
    counts = {min(max(n, fewest, 1), max(most, fewest)) for n in (math.floor(ideal), math.ceil(ideal))}
    if model.curve is None and min(counts) <= _MOST_EQUAL:
        for n in sorted(counts):
            target = _equal_target(model, start, end, n, limit)
            cuts.append((_equal_cut(model, start, end, n, target, limit, block), target))
    if models.count(model) < stages:
        around = {max(min(round(ideal * factor), _MOST_TAPERED), fewest, 1) for factor in (0.85, 1.1, 1.45)}
        if max(around) <= _MOST_TAPERED:
            ends = tapered_ends(models, model, start, end, sorted(around))
            cuts.append((_rounded_cut(ends, start, end, limit, block), law_target(model, work, stages, step_cost)))
    return cuts


def _equal_target(model: CostModel, start: int, end: int, n: int, limit: int) -> float:
    """Seconds T for which exactly ``n`` chunks of T seconds (at most ``limit`` tokens) cover the prompt."""
    if n == 1:
        return model.seconds(end - start, start)
    from scipy.optimize import brentq

    def uncovered(target: float) -> float:
        at = float(start)
        for _ in range(n):
            at += min(model.chunk(target, at), limit)
        return end - at

    # The mean of the steps' times lies between: too short for the last chunk, long enough for all.
    low = model.c0 + model.work(start, end) / n
    high = model.seconds(min(limit, end - start), end)
    if uncovered(low) <= 0:
        return low
    if uncovered(high) >= 0:
        return high
    return float(brentq(uncovered, low, high, xtol=low * 1e-6, rtol=1e-6))


def _rounded_cut(ends: Floats, start: int, end: int, limit: int, block: int) -> list[int]:
    """Chunks that end at the block boundaries next to ``ends``."""
    chunks = []
    at = start
    for ideal in ends[:-1].tolist():
        size = align(at, ideal - at, limit, block)
        if size >= end - at:
            break
        if ideal > at:
            chunks.append(size)
            at += size
    return chunks + _static_cut(at, end, limit)


def _equal_cut(model: CostModel, start: int, end: int, n: int, target: float, limit: int, block: int) -> list[int]:
    """At most ``n`` chunks of about ``target`` seconds, cut at block boundaries, covering the prompt."""
    chunks = []
    at, ideal = start, float(start)
    for left in range(n - 1, 0, -1):
        ideal += min(model.chunk(target, ideal), limit)
        size = align(at, max(ideal - at, end - at - left * limit), limit, block)
        if size >= end - at:
            break
        chunks.append(size)
        at += size
    while at < end:
        chunks.append(min(limit, end - at))
        at += chunks[-1]
    return chunks


def _best_static(
    model: CostModel, start: int, end: int, limit: int, block: int, stages: int, ideal: float
) -> tuple[int, float]:
    """The fixed size, a multiple of the block (or the limit), with the least predicted TTFT, and that TTFT.

    All multiples of `_SWEPT` are tried (of the block, where they are none of its); of a longer prompt than makes
    `_MOST_STEPS` of them, one for each number of steps.
    """
    most = min(limit, end - start)
    fewest = math.ceil((end - start) / limit)
    longest = min(max(math.ceil((end - start) / _MOST_STEPS), block), most)
    counts = np.arange(fewest, min(max(math.ceil(2 * ideal), fewest) + 9, _MOST_STEPS + fewest))
    even = np.ceil((end - start) / counts / block) * block
    apart = _SWEPT if _SWEPT % block == 0 else block
    first = math.ceil(longest / apart)
    swept = apart * np.linspace(first, max(most // apart, first), min(max(most // apart - first + 1, 1), _MOST_STEPS))
    sizes = np.unique(np.concatenate((even, even + block, np.floor(swept / apart) * apart, [most])))
    sizes = sizes[(sizes >= longest) & (sizes <= most)]
    ttft = static_ttft(model, start, end, sizes, stages)
    best = int(np.argmin(ttft))
    return int(sizes[best]), float(ttft[best])
