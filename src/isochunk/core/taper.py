"""Cuts for stages that differ: steps that grow towards a slow last stage and shrink after a slow first one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from isochunk.core.cost import CostModel

__all__ = ["tapered_ends"]

Floats = npt.NDArray[np.float64]

_STARTS = ((1.0, 1.0), (0.7, 1.1), (0.5, 1.1), (0.5, 1.25), (0.3, 1.1), (0.3, 1.25), (0.15, 1.25), (0.15, 1.6))
_ROUNDS = 5
_MOST_STAGES = 32


def tapered_ends(
    models: Sequence[CostModel], slowest: CostModel, start: int, end: int, counts: Sequence[int]
) -> Floats:
    """Where the chunks of the best tapered cut end, not rounded.

    With the slowest stage never idle, a prompt takes the first step's time on the stages before it, all steps'
    time on it, and the last step's time on the stages after it. So the first steps should be short when there
    are stages before it, and the last steps when there are stages after it; but a step must not be so much
    longer than the one before it that the slowest stage waits. The family searched is: a ramp up from a share
    ``s`` of the full step by a ratio ``r`` a step, the full step, and the mirrored ramp down.

    Args:
        slowest: the model of the slowest stage.
        counts: numbers of chunks to try.
    """
    where = models.index(slowest)
    best: tuple[float, int, tuple[float, ...]] = (math.inf, 1, ())
    for count in counts:
        score = _scorer(models, slowest, start, end, count)
        for up in _STARTS if where > 0 else _STARTS[:1]:
            for down in _STARTS if where < len(models) - 1 else _STARTS[:1]:
                if where == 0 or where == len(models) - 1 or up == down or (1.0, 1.0) in (up, down):
                    best = min(best, (score((*up, *down)), count, (*up, *down)))
    _, count, shape = best
    shape = _refined(_scorer(models, slowest, start, end, count), shape)
    return _ends(slowest, start, end, _weights(shape, count))


def _refined(score: Callable[[Sequence[float]], float], shape: tuple[float, ...]) -> tuple[float, ...]:
    """A pattern search: each number up and down by a factor, which shrinks."""
    best = score(shape)
    factor = 1.3
    for _ in range(_ROUNDS):
        for index, value in enumerate(shape):
            for moved in (value * factor, value / factor):
                # A share is at most the whole step, and a ramp never runs the wrong way.
                kept = min(max(moved, 0.02), 1.0) if index % 2 == 0 else max(moved, 1.0)
                tried = (*shape[:index], kept, *shape[index + 1 :])
                if (found := score(tried)) < best:
                    best, shape = found, tried
        factor = math.sqrt(factor)
    return shape


def _scorer(
    models: Sequence[CostModel], slowest: CostModel, start: int, end: int, count: int
) -> Callable[[Sequence[float]], float]:
    if len(models) > _MOST_STAGES:  # the shape shows on some of them
        models = [*models[:: math.ceil(len(models) / _MOST_STAGES)], slowest]

    def score(shape: Sequence[float]) -> float:
        ends = _ends(slowest, start, end, _weights(shape, count))
        histories = np.concatenate(([float(start)], ends[:-1]))
        return _last_exit([model.seconds(ends - histories, histories).tolist() for model in models])

    return score


def _weights(shape: Sequence[float], count: int) -> Floats:
    """Relative lengths of the steps."""
    up, up_ratio, down, down_ratio = shape
    index = np.arange(count)
    # The exponent is bounded so that a steep ramp over many steps stays a number.
    rise = up * np.exp(np.minimum(index * math.log(up_ratio), 50.0))
    fall = down * np.exp(np.minimum(index[::-1] * math.log(down_ratio), 50.0))
    return np.asarray(np.minimum(1.0, np.minimum(rise, fall)))


def _ends(model: CostModel, start: int, end: int, weights: Floats) -> Floats:
    """Ends of chunks whose times on ``model``, without c0, are in proportion to ``weights``."""
    share: Floats = np.cumsum(weights) / weights.sum()
    ends = model.ends_of_work(start, share * model.work(start, end))
    if model.c3 == 0:
        return ends
    # With a cost of history the work of a chunk is its time less c3*H; H is taken from the cut without it.
    reread = model.c3 * (np.concatenate(([float(start)], ends[:-1])))
    seconds = weights * (model.work(start, end) + reread.sum()) / weights.sum()
    work = np.cumsum(np.maximum(seconds - reread, 0.0))
    return model.ends_of_work(start, work * (model.work(start, end) / work[-1]))


def _last_exit(stages: Sequence[Sequence[float]]) -> float:
    """When the last step leaves the last stage; a list of step times for each stage."""
    ready = [0.0] * len(stages[0])
    for times in stages:
        free = 0.0
        for step, seconds in enumerate(times):
            at = ready[step]
            free = (at if at > free else free) + seconds
            ready[step] = free
    return ready[-1]
