"""How long steps take to pass through pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from isochunk.core.errors import PlanError

__all__ = ["busy_intervals", "completion_times", "idle_share", "makespan", "through_stage"]

Interval = tuple[float, float]


def makespan(step_seconds: npt.ArrayLike, stages: int | None = None) -> float:
    """Seconds from the first step's entry to the last step's exit.

    Args:
        step_seconds: shape (steps,) for ``stages`` identical stages: the closed form
            ``sum(t) + (P-1)*max(t)``, exact for the flow shop. Shape (steps, stages) for stages that
            differ: the recursion of `completion_times`.
        stages: number of stages P; needed with one dimension, and checked with two.

    Raises:
        PlanError: wrong shape, or a time that is negative or not finite.
    """
    times = np.asarray(step_seconds, dtype=np.float64)
    if times.size == 0:
        return 0.0
    if not np.isfinite(times).all() or (times < 0).any():
        raise PlanError("step_seconds must be finite and at least 0")
    if times.ndim == 1:
        if stages is None or stages < 1:
            raise PlanError(f"stages = {stages} must be at least 1 when step_seconds has one dimension")
        return float(times.sum() + (stages - 1) * times.max())
    if times.ndim != 2 or stages not in (None, times.shape[1]):
        raise PlanError(f"step_seconds of shape {times.shape} does not fit {stages} stages")
    ready = np.zeros(len(times))
    for stage in times.T:
        ready = through_stage(ready, stage)
    return float(ready[-1])


def through_stage(ready: npt.NDArray[np.float64], seconds: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """When each step leaves a stage that takes ``seconds`` for it, from when it came; shape (steps,) all."""
    before = np.cumsum(seconds)
    return np.asarray(np.maximum.accumulate(ready - before + seconds) + before)


def completion_times(times: npt.NDArray[np.float64], in_flight: int | None = None) -> npt.NDArray[np.float64]:
    """When each step leaves each stage, all steps being ready at time 0.

    A step starts on a stage when it has left the one before and its predecessor has left this one; with
    ``in_flight`` = K, a step enters only once the step K before it has left the last stage.

    Args:
        times: shape (steps, stages), seconds.

    Returns:
        shape (steps, stages), seconds.
    """
    rows: Sequence[Sequence[float]] = times.tolist()
    previous = [0.0] * times.shape[1]
    done: list[list[float]] = []
    for index, row in enumerate(rows):
        ready = done[index - in_flight][-1] if in_flight is not None and index >= in_flight else 0.0
        current: list[float] = []
        for stage, seconds in enumerate(row):
            ready = max(ready, previous[stage]) + seconds
            current.append(ready)
        done.append(current)
        previous = current
    return np.array(done)


def busy_intervals(entered_s: Sequence[float], measured_s: Sequence[float], stages: int) -> list[list[Interval]]:
    """The flow-shop recursion from the recorded entries: a step starts on a stage when it has left the stage
    before and its predecessor has left this one.

    Args:
        entered_s: when each step entered, shape (steps,).
        measured_s: seconds of each step on one stage, shape (steps,).

    Returns:
        For each stage, (start, end) of each step in seconds, 0 being the first entry.
    """
    origin = entered_s[0] if entered_s else 0.0
    free = [0.0] * stages
    busy: list[list[Interval]] = [[] for _ in range(stages)]
    for entered, seconds in zip(entered_s, measured_s, strict=True):
        ready = entered - origin
        for stage in range(stages):
            start = max(ready, free[stage])
            ready = free[stage] = start + seconds
            busy[stage].append((start, ready))
    return busy


def idle_share(busy: Sequence[Sequence[Interval]]) -> float:
    """Part of all stages' time, from the first start to the last end, in which they did nothing."""
    span = max(intervals[-1][1] for intervals in busy)
    worked = sum(end - start for intervals in busy for start, end in intervals)
    return 1 - worked / (span * len(busy))
