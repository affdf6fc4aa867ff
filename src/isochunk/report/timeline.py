"""When each stage worked on each step."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["busy_intervals", "idle_share"]

Interval = tuple[float, float]


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
