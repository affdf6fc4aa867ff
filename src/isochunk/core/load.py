"""The law under load: how long a step should be when prompts share the pipeline."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

__all__ = ["Load", "Stream"]

_DEEPEST = 64  # steps in flight that are remembered; pipelines are shallower
_BURST = 0.75  # rounds expected of prompts that came together
_GROWTH = 8.0  # more rounds for each round that came while others were served
_STREAM = 6.0  # most rounds expected
_ARRIVALS = 16  # last arrivals whose number in system tells a closed from an open loop
_OPEN = 0.25  # index of dispersion of the number in system from which on arrivals are an open loop's; fitted


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What waits, what is in the pipeline and what is expected to come; all in seconds of work on a stage.

    Work is what does not depend on the cut; the overhead of a step is c0 and the re-reading of histories.
    A step of ``x`` seconds of work and ``overhead`` seconds of fixed cost costs the prompts of the queue

        D(x) = abar*v + max(x - own, 0)/2*v + (P-1)*T,    v = 1 + overhead/x,   T = x + overhead

    on average: the work ahead of them, stretched by the overhead; the wait for the others in the same step, when
    it holds several; and the way through the pipeline. While the stream goes on, each further round of the
    prompts in the system costs

        R(x) = max(system*v, max(own, x)*v + (P-1)*T)

    whichever is later: the whole round's work on a stage, or one prompt's way through all stages, when there is
    too little work to fill them. The steps that make ``D + rounds*R`` least are the law's.

    Attributes:
        stages: pipeline stages P, at least 2.
        abar: mean over the queued prompts of the work queued up to and including each.
        own: work of one prompt.
        system: work of all prompts without a first token, what is done of it too, and of those expected at once.
        rounds: prompts that are expected before the pipeline runs empty, for each one in the queue.
        before: seconds of the longest step in the pipeline, which no step after it can overtake.
    """

    stages: int
    abar: float
    own: float
    system: float
    rounds: float
    before: float = 0.0

    def times(self, factor: float) -> Load:
        """The same load with every prompt's work ``factor`` times as long."""
        return replace(self, abar=self.abar * factor, own=self.own * factor, system=self.system * factor)

    def cost(self, work: float, overhead: float, *, split: bool = False) -> float:
        """``D + rounds*R`` for steps of ``work`` seconds.

        ``split``: the steps' ends fall within prompts, so that a prompt waits for one more step.
        """
        stretch = 1 + overhead / work
        gaps = self.stages - 1
        way = gaps * (work + overhead)
        together = max(work, self.own) + (self.own if split else 0.0)
        cost = (self.abar + (together - self.own) / 2) * stretch + max(way, gaps * self.before)
        if self.rounds:
            cost += self.rounds * max(self.system * stretch, together * stretch + way)
        return cost

    def work(self, overhead: float) -> float:
        """The seconds of work in a step that cost least.

        D and both sides of R are convex, for steps of several prompts and for parts of one: the least cost is
        where one side's is, or at the kink between them. For parts of one prompt and no further rounds it is
        ``sqrt(overhead*abar/(P-1))``.
        """
        gaps = self.stages - 1
        work = self._least(overhead, gaps)
        if work + overhead >= self.before:
            return work
        return max(work, min(self._least(overhead, 0), self.before - overhead))

    def _least(self, overhead: float, way: int) -> float:
        """The work that costs least when a longer step delays the queue's prompts in ``way`` stages."""
        gaps, rounds = self.stages - 1, self.rounds
        ahead = self.abar - self.own / 2
        full = math.sqrt(overhead * (ahead + rounds * self.system) / (way + 0.5))
        sparse = math.sqrt(overhead * ahead / (way + 0.5 + rounds * self.stages))
        several = min(max(self.system / self.stages, sparse), full)
        if several >= self.own:
            return several
        least = (self.system - self.own) / gaps
        if slope := way + rounds * gaps:
            least = max(least, math.sqrt(overhead * (self.abar + rounds * self.own) / slope))
        else:
            least = self.own
        if way:
            least = min(least, math.sqrt(overhead * (self.abar + rounds * self.system) / way))
        return min(least, self.own)

    def pieces(self, work: float, overhead: float) -> int:
        """Into how many steps to cut ``work`` seconds of one prompt."""
        ideal = work / self.work(overhead)
        low = max(math.floor(ideal), 1)
        if ideal <= low:
            return low
        return low if self.cost(work / low, overhead) <= self.cost(work / (low + 1), overhead) else low + 1


class Stream:
    """What the planner remembers of the steps it has made.

    Prompts that meet an empty pipeline together may be all there is. Those that come while others are served
    are a stream. In a closed loop each comes because another has its first token, so that the number of prompts in
    the system stays as it is; what delays one round delays the next, and the stream goes on. In an open loop their
    number goes up and down (from a third of capacity on, the variance over the mean of what Poisson arrivals find is
    above `_OPEN`), and little more than those that are here now is to be expected.
    """

    def __init__(self) -> None:
        self._ended: deque[tuple[float, int]] = deque(maxlen=_DEEPEST)
        self._head = ("", 0)
        self._taken = 0.0
        self._together: float | None = None
        self._asked: tuple[str, int] | None = None
        self._last = 0.0
        self._left = 0
        self._in_system = 0
        self._found: deque[int] = deque(maxlen=_ARRIVALS)
        self._usual = 0.0
        self._closed = 1.0  # 1 in a closed loop, 0 in an open one
        self._replaced = False

    def ask(self, key: str, history: int, waiting: int, steps: int) -> None:
        """A step is asked for while this prompt is first of ``waiting``, and ``steps`` are in the pipeline.

        Asked again as it was, the last one was never made.
        """
        if self._asked == (key, history) and self._last:
            self._taken = max(self._taken - self._last, 0.0)
            self._left += self._ended.pop()[1]
        self._asked, self._last = (key, history), 0.0
        self._in_system = waiting + sum(ends for _, ends in self._flying(steps))
        new = waiting - self._left
        self._left = waiting
        if 0 < new < self._in_system:  # those that meet an empty pipeline tell nothing
            self._came(new)

    def _came(self, new: int) -> None:
        self._replaced = True
        self._found.extend([self._in_system] * min(new, _ARRIVALS))
        self._usual = sum(self._found) / len(self._found)
        variance = sum((found - self._usual) ** 2 for found in self._found) / len(self._found)
        self._closed = max(1 - variance / self._usual / _OPEN, 0.0)

    def restart(self) -> None:
        """The pipeline is empty."""
        self._taken = 0.0
        self._together = None
        self._replaced = False

    def rounds(self, queued: float) -> float:
        """Rounds of the ``queued`` seconds of work that are expected before the pipeline runs empty."""
        came = self._taken + queued
        if self._together is None:
            self._together = came
        most = _BURST + (_STREAM - _BURST) * self._closed
        return min(_BURST + _GROWTH * max(came - self._together, 0.0) / queued, most)

    @property
    def missing(self) -> float:
        """Prompts that are about to come in place of those that have just left."""
        return self._closed * max(self._usual - self._in_system, 0.0) if self._replaced else 0.0

    def start_of(self, key: str, history: int) -> int:
        """Tokens that the first prompt of the queue had in the KV cache before its first step."""
        if self._head[0] != key:
            self._head = (key, history)
        return self._head[1]

    def in_flight(self, steps: int) -> float:
        """Work of the prompts that end in the last ``steps`` steps."""
        return sum(work for work, _ in self._flying(steps))

    def _flying(self, steps: int) -> Iterator[tuple[float, int]]:
        return islice(reversed(self._ended), steps)

    def take(self, work: float, ended: float, ends: int, *, asked: bool = True) -> None:
        """A step takes ``work`` seconds from the queue, and ``ends`` prompts of ``ended`` seconds in all end in it.

        ``asked``: `ask` was called for it, and can undo it.
        """
        self._taken += work
        self._last = work if asked else 0.0
        self._left -= ends
        self._ended.append((ended, ends))
