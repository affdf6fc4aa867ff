"""Why a prompt would be cut as it is: the law's terms, the cut, and what every other cut would cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from isochunk.core.cost import CostModel
from isochunk.core.errors import PlanError
from isochunk.core.flowshop import makespan
from isochunk.core.planner import Plan, plan, static_ttft

__all__ = ["Alternative", "Explanation", "explain", "words"]

_SMALLEST = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another cut of the same prompt.

    Attributes:
        label: what tables call it.
        steps: how many steps it takes.
        ttft_s: predicted seconds to the first token.
    """

    label: str
    steps: int
    ttft_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One prompt alone on the pipeline; seconds and tokens.

    Attributes:
        tokens: of the prompt, of which ``cached`` are a prefix hit.
        work_s: of the prompt's tokens on one stage, which no cut changes.
        step_cost_s: of one more step: its fixed cost and the re-reading of the history.
        ideal_steps: ``sqrt((P-1)*work/step cost)``, the law's number of steps before rounding.
        fill_s: ``(P-1)`` times the longest step: the way of the last step through the other stages.
        queue: running and waiting requests of the server at that moment, which the plan for a prompt alone leaves out.
        alternatives: fixed sizes, the published rule and vLLM's own size, the quickest first.
    """

    tokens: int
    cached: int
    stages: int
    model: dict[str, Any]
    work_s: float
    step_cost_s: float
    ideal_steps: float
    target_s: float
    chunks: tuple[int, ...]
    step_seconds: tuple[float, ...]
    fill_s: float
    ttft_s: float
    queue: dict[str, int]
    alternatives: tuple[Alternative, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def explain(status: Mapping[str, Any], tokens: int, cached: int = 0) -> Explanation:
    """Explain the plan that a server with this status would make for a prompt alone.

    Args:
        status: what ``GET /isochunk/status`` answers.
        tokens: of the prompt; ``cached`` of them at its start are in the prefix cache.

    Raises:
        PlanError: the length is out of range, or the server has no cost model.
    """
    if status["model"] is None:
        raise PlanError("the server has no cost model yet, so vLLM's own chunks are used; its log says why")
    model = CostModel(**status["model"])
    stages, largest, block = status["stages"], status["max_num_batched_tokens"], status["alignment"]
    chosen = plan(model, tokens, stages, cached=cached, max_chunk=largest, block=block)
    work, step_cost = model.work(cached, tokens), model.step_cost(cached, tokens)
    return Explanation(
        tokens=tokens,
        cached=cached,
        stages=stages,
        model=model.as_dict(),
        work_s=float(work),
        step_cost_s=float(step_cost),
        ideal_steps=math.sqrt((stages - 1) * work / step_cost),
        target_s=chosen.target_s,
        chunks=chosen.chunks,
        step_seconds=chosen.step_seconds,
        fill_s=(stages - 1) * max(chosen.step_seconds),
        ttft_s=chosen.ttft_s,
        queue=dict(status.get("queue") or {}),
        alternatives=tuple(_alternatives(model, chosen, tokens, cached, stages, largest, block)),
    )


def _alternatives(
    model: CostModel, chosen: Plan, tokens: int, cached: int, stages: int, largest: int, block: int
) -> list[Alternative]:
    sizes = [largest]
    while sizes[-1] // 2 >= _SMALLEST:
        sizes.append(sizes[-1] // 2)
    # All sizes that take the prompt in one step are one cut: the smallest of them stands for the rest.
    rest = tokens - cached
    whole = [size for size in sizes if size >= rest]
    sizes = [size for size in sizes if size < rest] + whole[-1:]
    ttfts = static_ttft(model, cached, tokens, np.array(sizes, dtype=np.float64), stages)
    found = [
        Alternative(
            label=f"fixed {largest} (vLLM's own)" if size == largest or size in whole else f"fixed {size}",
            steps=math.ceil(rest / size),
            ttft_s=float(ttft),
        )
        for size, ttft in zip(sizes, ttfts, strict=True)
    ]
    with suppress(PlanError):  # far beyond any context the rule's steps become single blocks, too many to count
        rule = plan(model, tokens, stages, cached=cached, max_chunk=largest, block=block, policy="first_chunk")
        found.append(Alternative(label=f"first chunk {largest}", steps=len(rule.chunks), ttft_s=rule.ttft_s))
    for count in (len(chosen.chunks) // 2, 2 * len(chosen.chunks)):
        if 1 <= count <= rest and count != len(chosen.chunks) and rest / count <= largest:
            # As many steps of equal time would take: the same work, more or fewer fixed costs, a shorter or longer way.
            step = model.step_cost(cached, tokens) + model.work(cached, tokens) / count
            ttft = makespan([float(step)] * count, stages)
            steps = "step" if count == 1 else "steps"
            found.append(Alternative(label=f"{count} {steps} of equal time", steps=count, ttft_s=ttft))
    return sorted(found, key=lambda each: each.ttft_s)


def words(told: Explanation) -> list[str]:
    """The explanation in sentences, with its numbers."""
    gap = told.stages - 1
    hit = f" with {told.cached:,} cached" if told.cached else ""
    more = "stage" if gap == 1 else "stages"
    sentences = [
        f"A prompt of {told.tokens:,} tokens{hit} is {told.work_s:.3g} s of work on each of {told.stages} stages, "
        "however it is cut.",
        f"Each step adds {1e3 * told.step_cost_s:.3g} ms (launch, hand-over, reading the history once more), and the "
        f"last one still has {gap} {more} to go: few steps make that way long, many pay the fixed cost often.",
        f"The two are even at sqrt({gap} x {told.work_s:.3g} s / {told.step_cost_s:.3g} s) = {told.ideal_steps:.1f} "
        f"steps; the plan takes {len(told.chunks)}, each of about {1e3 * told.target_s:.3g} ms: {_listed(told.chunks)} "
        "tokens.",
        f"Its first token is predicted after {told.ttft_s:.3g} s, of which {told.fill_s:.3g} s are the last way.",
    ]
    own = next((each for each in told.alternatives if "vLLM's own" in each.label), None)
    best = next(each for each in told.alternatives if each.label.startswith("fixed"))
    if own is not None:
        sentences.append(
            f"vLLM's own size would take {own.ttft_s:.3g} s, {own.ttft_s / told.ttft_s:.2f} times as long."
        )
    if best is not own:
        sentences.append(
            f"The best fixed size tried ({best.label}) would take {best.ttft_s:.3g} s, "
            f"{best.ttft_s / told.ttft_s:.2f} times as long; it is another one for other lengths."
        )
    if sum(told.queue.values()):
        sentences.append(
            f"The server has {told.queue.get('running', 0)} running and {told.queue.get('waiting', 0)} waiting "
            "requests now: beside them steps are cut for all together, and grow with the queue."
        )
    return sentences


def _listed(chunks: Sequence[int]) -> str:
    if len(chunks) <= 8:
        return ", ".join(map(str, chunks))
    return f"{', '.join(map(str, chunks[:4]))}, ... {', '.join(map(str, chunks[-2:]))}"
