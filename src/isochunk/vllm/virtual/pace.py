"""How fast a stage's clock runs over time."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Pace", "Span"]


@dataclass(slots=True)
class Span:
    """From ``start`` to ``end`` (monotonic seconds) the clock runs at ``rate``: 0.5 is half as fast, 0 stands still."""

    start: float
    end: float
    rate: float


class Pace:
    """Rate 1, but for the spans that were added; where they overlap their rates multiply."""

    def __init__(self) -> None:
        self._spans: list[Span] = []

    def add(self, span: Span) -> None:
        """From now on this span counts too."""
        self._spans.append(span)

    def end(self, now: float) -> None:
        """No span goes on after ``now``; what was before stays as it was."""
        for span in self._spans:
            span.end = min(span.end, now)

    def forget(self, before: float) -> None:
        """Spans that ended before this time will not be asked for again."""
        self._spans = [span for span in self._spans if span.end > before]

    def rate(self, at: float) -> float:
        """Seconds of work done in a second at this time."""
        return math.prod(span.rate for span in self._spans if span.start <= at < span.end)

    def finish(self, start: float, work: float) -> float:
        """When ``work`` seconds of a clock of rate 1 are done that begin at ``start``; infinite when never."""
        if not self._spans:
            return start + work
        edges = sorted({edge for span in self._spans for edge in (span.start, span.end) if edge > start})
        at = start
        for edge in [*edges, math.inf]:
            rate = self.rate(at)
            done = at + work / rate if rate > 0 else math.inf
            if done <= edge:
                return done
            work -= (edge - at) * rate
            at = edge
        return math.inf
