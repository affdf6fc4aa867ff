"""Cuts for a cost with floors and jumps: many walks through the prompt at once, each within its own bound."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from isochunk.core.cost import CostModel

__all__ = ["best_walk"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_WALKS = 96
_RANGE = (0.45, 2.4)  # bounds tried, in parts of the law's target
_EDGES = 64  # bounds at which a cheap size just fits
_FINE, _RATIO = 64, 1.015  # sizes: so many multiples of the block, then this far apart
_HISTORIES = 6  # places in the prompt at which the cheapest size is looked up, where history has to be re-read
_TURNS = 110  # where a walk takes more steps, it takes some alike at a time
_ROUGH_TURNS, _KEPT = 40, 24  # long walks are taken roughly first, and the best of them again
_MOST_TURNS = 600
_MOST_STEPS = 16_384
_ENDINGS = 8  # chunks that the last two may become


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Sizes of a step, ascending, and for each the cheapest at or below it."""

    tokens: Floats
    line: Floats
    cheapest: Ints  # shape (histories, sizes)


@dataclass(frozen=True, slots=True)
class _Prompt:
    start: int
    end: int
    limit: int
    block: int
    stages: int


def best_walk(
    model: CostModel, start: int, end: int, limit: int, block: int, stages: int, target: float, known: float
) -> list[int] | None:
    """The best cut into chunks that end where a token is cheap; None where there is none that is better.

    Every walk has a bound on the seconds of a step. At each place it takes, of the sizes within the bound, the one
    with the fewest seconds a token; with many steps that is the best cut within the bound, since attention
    takes the same in all cuts. The walk with the least ``sum(t) + (P-1)*max(t)`` is the cut.

    Args:
        target: seconds of a step by the law for the model's straight line.
        known: the TTFT of another cut, which this one must beat.
    """
    most = min(limit, end - start) // block * block
    if most < block:
        return None
    sizes = _sizes(model, start, end, most, block)
    bounds = _bounds(model, sizes, start, end, target, known / stages)
    bounds = _promising(model, sizes, bounds, start, end, stages, known)
    if not len(bounds):
        return None
    reach = _reach(model, sizes, bounds)
    prompt = _Prompt(start, end, limit, block, stages)
    typical = float(sizes.tokens[max(int((reach[len(bounds) // 3] >= (start + end) / 2).sum()) - 1, 0)])
    # Each step takes the least one at least.
    most_steps = (known - model.work(start, end) + model.c1 * (end - start)) / model.line(1.0)
    kinds = np.unique(sizes.cheapest).size + len(sizes.cheapest)  # a size is taken for as long as it is the cheapest
    steps = min((end - start) / typical, kinds)
    for turns, kept in ((_ROUGH_TURNS, _KEPT), (_TURNS, 1)):
        if kept > 1 and steps <= _TURNS / 2:
            continue  # few enough for all walks to be taken step by step
        alike = max(int(steps / turns), 1)
        enough = min(int(most_steps / alike) + 3, _MOST_TURNS)
        taken, counts = _walk(model, sizes, reach, bounds, prompt, alike, enough)
        ttft = _ttft(model, taken, counts, prompt)
        best = np.sort(np.argsort(ttft, kind="stable")[:kept])
        bounds, reach = bounds[best], reach[best]
    if not np.isfinite(ttft[best[0]]):
        return None
    return np.repeat(taken[:, best[0]], counts[:, best[0]]).astype(int).tolist()


def _sizes(model: CostModel, start: int, end: int, most: int, block: int) -> _Sizes:
    fine = block * np.arange(1, min(_FINE, most // block) + 1, dtype=np.float64)
    parts: list[Floats] = [fine, np.array([float(most)])]
    if fine[-1] < most:
        count = int(np.log(most / fine[-1]) / np.log(_RATIO)) + 2
        parts.append(np.floor(np.geomspace(fine[-1], most, count) / block) * block)
    if model.curve is not None:
        parts.append(np.floor(np.array(model.curve.tokens) / block) * block)
    tokens = np.unique(np.concatenate(parts))
    tokens = tokens[(tokens >= block) & (tokens <= most)]
    line = model.line(tokens)
    reread = model.c3 * np.linspace(start, end, _HISTORIES if model.c3 else 1)
    each = (line + reread[:, None]) / tokens
    least = np.minimum.accumulate(each, axis=1)
    index = np.where(each <= least, np.arange(len(tokens)), 0)
    return _Sizes(tokens, line, np.maximum.accumulate(index, axis=1))


def _bounds(model: CostModel, sizes: _Sizes, start: int, end: int, target: float, longest: float) -> Floats:
    """Seconds of a step that walks keep to, ascending, at most ``longest``."""
    low, high = max(_RANGE[0] * target, model.line(1.0)), min(_RANGE[1] * target, longest)
    if high <= low:
        low = high / 2
    edges = sizes.tokens[np.unique(sizes.cheapest[0])]
    edges = edges[model.c0 + model.c1 * edges < high]
    edges = edges[np.linspace(0, len(edges) - 1, min(_EDGES, len(edges))).astype(int)]
    at_edges = [model.seconds(edges, np.full(len(edges), float(start))), model.seconds(edges, end - edges)]
    longest = min(model.seconds(float(sizes.tokens[-1]), max(end - float(sizes.tokens[-1]), 0.0)), longest)
    bounds = np.concatenate((np.geomspace(low, high, _WALKS), *at_edges))
    bounds = np.minimum(bounds[(bounds >= low) & (bounds <= high)], longest)
    return np.asarray(np.unique(bounds) * (1 + 1e-12))


def _promising(
    model: CostModel, sizes: _Sizes, bounds: Floats, start: int, end: int, stages: int, known: float
) -> Floats:
    """The bounds within which a cut may come before ``known``."""
    widest = np.searchsorted(model.seconds(sizes.tokens, float(start)), bounds, side="right") - 1
    cheapest = sizes.cheapest[0, np.maximum(widest, 0)]
    token = (sizes.line / sizes.tokens)[cheapest]
    least = (end - start) * token + (stages - 1) * sizes.line[cheapest]
    attention = model.work(start, end) - model.c1 * (end - start)
    return np.asarray(bounds[(widest >= 0) & (least + attention < known)])


def _reach(model: CostModel, sizes: _Sizes, bounds: Floats) -> Floats:
    """The longest history with which a size keeps to a bound, shape (bounds, sizes); falls with the size."""
    size = sizes.tokens
    spare = bounds[:, None] - model.seconds(size, 0.0 * size)
    rate = model.c2 * size + model.c3
    with np.errstate(divide="ignore", invalid="ignore"):
        reach = np.where(spare >= 0, spare / rate, -1.0)
        if model.bend is not None:
            at, factor = model.bend.tokens, model.bend.factor
            before, behind = np.maximum(at - size, 0.0), np.full(len(size), at)
            t_before, t_behind = model.seconds(size, before), model.seconds(size, behind)
            between = before + (bounds[:, None] - t_before) / (t_behind - t_before) * (behind - before)
            beyond = at + (bounds[:, None] - t_behind) / (model.c2 * factor * size + model.c3)
            reach = np.where(bounds[:, None] > t_before, between, reach)
            reach = np.where(bounds[:, None] > t_behind, beyond, reach)
    reach = np.nan_to_num(reach, nan=np.inf, posinf=np.inf)
    return np.asarray(np.minimum.accumulate(reach, axis=1))


def _walk(
    model: CostModel,
    sizes: _Sizes,
    reach: Floats,
    bounds: Floats,
    prompt: _Prompt,
    alike: int,
    turns: int,
) -> tuple[Floats, Ints]:
    """Chunks of all walks: sizes and how often each is taken, shape (turns, walks).

    A size is taken for as long as it is the one to take, and at least ``alike`` times.
    """
    start, end = prompt.start, prompt.end
    walks, kinds = reach.shape
    lane = np.arange(walks)
    reach = np.clip(reach, -1.0, end + 1.0)
    # Ascending in the size and from walk to walk, so that one look-up serves all walks.
    base, rows = lane * 4.0 * (end + 2), lane * kinds
    ordered = (base[:, None] - reach).ravel()
    places = len(sizes.cheapest)
    apart = (end - start) / max(places - 1, 1)  # histories for which the cheapest sizes are known

    def look(ahead: Floats) -> tuple[Ints, Ints]:
        widest = np.maximum(np.searchsorted(ordered, base - ahead, side="right") - rows, 1) - 1
        place = ((ahead - start) / apart + 0.5).astype(int) if places > 1 else 0
        return sizes.cheapest[place, widest], widest

    at, last = np.full(walks, float(start)), np.zeros(walks)
    taken, counts = [], []
    for turn in range(turns):
        cheap, widest = look(np.minimum(at + (alike - 1) * last, end) if alike > 1 else at)
        size = sizes.tokens[cheap]
        room = end - at - 2 * sizes.tokens[widest]  # the last two or so share what is left
        until = reach[lane, cheap]
        if places > 1:
            until = np.minimum(until, start + (np.floor((at - start) / apart + 0.5) + 0.5) * apart)
        times = np.maximum((until - at) // size + 1, alike)
        if turn == 0 and start % prompt.block:
            size, times = size - start % prompt.block, 1.0
        times = np.where(room > 0, np.maximum(np.minimum(times, room // size), 1), 0.0)
        if not times.any():
            break
        taken.append(size)
        counts.append(times)
        at = at + times * size
        last = np.where(times > 0, size, 0.0)
    walked = at + 2 * sizes.tokens[look(at)[1]] >= end
    for _ in range(_ENDINGS):
        which = np.flatnonzero(walked & (at < end))
        if not len(which):
            break
        cheap, widest = look(at)
        size = np.zeros(walks)
        here = np.stack([at, end - at, sizes.tokens[cheap] - at % prompt.block, sizes.tokens[widest], bounds])[:, which]
        size[which] = _ending(model, here, prompt)
        taken.append(size)
        counts.append((size > 0) * 1.0)
        at = at + size
    return np.array(taken), np.array(counts).astype(int)


def _ending(model: CostModel, walks: Floats, prompt: _Prompt) -> Floats:
    """The first of at most two chunks that end the prompt: both of them, one cheap and a rest, or two halves."""

    at, left, size, wide, bounds = walks
    block, limit, stages = prompt.block, prompt.limit, prompt.stages

    def aligned(tokens: Floats) -> Floats:
        return np.asarray(np.floor((at + tokens) / block) * block - at)

    half = aligned(left / 2 + block / 2)
    tried = np.stack([left, size, aligned(wide), aligned(left - size), aligned(left - wide), half])
    tried = np.where(tried <= 0, half, np.minimum(tried, left))
    rest = left - tried
    second = np.where(rest > 0, model.seconds(rest, at + tried), 0.0)
    first = model.seconds(tried, at + 0 * tried)
    late = np.maximum(np.maximum(first, second) - bounds, 0.0)
    cost = np.where(np.maximum(tried, rest) > limit, np.inf, first + second + stages * late)
    return np.asarray(np.take_along_axis(tried, cost.argmin(axis=0)[None], axis=0)[0])


def _ttft(model: CostModel, taken: Floats, counts: Ints, prompt: _Prompt) -> Floats:
    """Predicted seconds of each walk, without the attention, which all have; infinite where it did not end in time."""
    through = taken * counts
    at = prompt.start + np.cumsum(through, axis=0) - through
    used = counts > 0
    line = np.where(used, model.line(taken), 0.0) * counts
    reread = model.c3 * (counts * at + taken * counts * (counts - 1) / 2)
    longest = np.where(used, model.seconds(taken, at + taken * np.maximum(counts - 1, 0)), 0.0)
    ttft = (line + reread).sum(axis=0) + (prompt.stages - 1) * longest.max(axis=0)
    endless = (through.sum(axis=0) < prompt.end - prompt.start) | (counts.sum(axis=0) > _MOST_STEPS)
    return np.asarray(np.where(endless, np.inf, ttft))
