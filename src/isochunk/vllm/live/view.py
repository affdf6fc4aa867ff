"""The numbers that the page draws, each from the status alone, so that anybody can compute them again."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import numpy as np

from isochunk.core.cost import CostModel
from isochunk.core.flowshop import busy_intervals, idle_share
from isochunk.core.planner import Plan, static_plan

__all__ = ["view"]

_TIMELINES = 8
_INTERVALS = 20_000  # of all timelines: more are no more to be seen, and take a browser long to draw
_GRID = 24


def view(status: Mapping[str, Any]) -> dict[str, Any]:
    """Timelines of the last prompts, predicted against measured steps, and the cost surface.

    Args:
        status: what ``GET /isochunk/status`` answers.

    Returns:
        ``timelines``: one a prompt, newest first, with what the status says of it, ``idle`` (part of the stages' time),
        ``stages`` (for each, [start, end] of each step in seconds from the first entry), and ``fixed``: the same of
        vLLM's own chunks, as the cost model predicts them. ``steps``: [chunk, history, predicted, measured] of each.
        ``surface``: ``chunks``, ``histories`` and ``seconds`` at each of both.
    """
    model = CostModel(**status["model"]) if status["model"] else None
    prompts = [prompt for prompt in status["prompts"] if prompt["chunks"]]
    return {
        "timelines": [_timeline(prompt, model, status) for prompt in _shown(prompts, status["stages"])],
        "steps": [
            list(step)
            for prompt in prompts
            for step in zip(
                prompt["chunks"], prompt["histories"], prompt["predicted_s"], prompt["measured_s"], strict=True
            )
        ],
        "surface": _surface(model, status, prompts) if model is not None else None,
    }


def _shown(prompts: list[Mapping[str, Any]], stages: int) -> list[Mapping[str, Any]]:
    """The newest prompts, newest first: at least one, and of those of many steps fewer."""
    shown = prompts[: -_TIMELINES - 1 : -1]
    intervals = list(accumulate(stages * len(prompt["chunks"]) for prompt in shown))
    return shown[: max(bisect_right(intervals, _INTERVALS), 1)]


def _timeline(prompt: Mapping[str, Any], model: CostModel | None, status: Mapping[str, Any]) -> dict[str, Any]:
    busy = busy_intervals(prompt["entered_s"], prompt["measured_s"], status["stages"])
    kept = ("request_id", "tokens", "cached", "policy", "alone", "predicted_ttft_s", "measured_ttft_s", "chunks")
    fixed = static_plan(
        model,
        prompt["tokens"],
        status["stages"],
        cached=prompt["cached"],
        max_chunk=status["max_num_batched_tokens"],
    )
    return {
        **{name: prompt[name] for name in kept},
        "idle": idle_share(busy),
        "stages": busy,
        "fixed": fixed
        and {"chunks": fixed.chunks, "ttft_s": fixed.ttft_s, "stages": _planned(fixed, status["stages"])},
    }


def _planned(fixed: Plan, stages: int) -> list[list[tuple[float, float]]]:
    return busy_intervals([0.0] * len(fixed.chunks), fixed.step_seconds, stages)


def _surface(model: CostModel, status: Mapping[str, Any], prompts: list[Mapping[str, Any]]) -> dict[str, Any]:
    largest = status["max_num_batched_tokens"]
    longest = max((prompt["tokens"] for prompt in prompts), default=4 * largest)
    chunks = np.unique(np.geomspace(min(64, largest), largest, _GRID).round())
    histories = np.linspace(0, max(longest, largest), _GRID).round()
    seconds = model.seconds(chunks[None, :], histories[:, None])
    return {"chunks": chunks.tolist(), "histories": histories.tolist(), "seconds": np.asarray(seconds).tolist()}
