"""Step times from outside: when a step went into the pipeline and when it came out."""

from __future__ import annotations

from isochunk.core.errors import PlanError

__all__ = ["StageClock"]


class StageClock:
    """Solves the pipeline's recursion for each step's seconds on one of P identical stages.

    A step that entered at s and takes t on each stage leaves the last one at

        e = max over p of (A_p + (P - p + 1)*t),   A_1 = max(s, f_1),   A_p = f_p

    where f_p is when the step before left stage p. So ``t = min over p of (e - A_p)/(P - p + 1)``, whatever
    the order of small and large steps. It needs no device synchronisation, and t includes the scheduling
    and transfer time that a forward-only timer misses.
    """

    def __init__(self, stages: int) -> None:
        if stages < 1:
            raise PlanError(f"stages = {stages} must be at least 1")
        self._left = [float("-inf")] * stages

    def step(self, entered: float, exited: float) -> float:
        """Seconds a stage that the step took; steps are given in the order of their entry."""
        seconds = self.most(entered, exited)
        self.foretell(entered, seconds)
        self._left[-1] = exited
        return seconds

    def most(self, entered: float, exited: float) -> float:
        """Seconds a stage of a step that goes in and comes out at these moments, behind those given so far."""
        stages = len(self._left)
        return max(min((exited - at) / (stages - p) for p, at in enumerate(self._free(entered))), 0.0)

    def foretell(self, entered: float, seconds: float) -> None:
        """A step goes in that is to take so many seconds on each stage."""
        free = self._free(entered)
        ready = free[0]
        for p, at in enumerate(free):
            ready = max(ready, at) + seconds
            self._left[p] = ready

    def copy(self) -> StageClock:
        """One that goes on from here by itself."""
        other = StageClock(len(self._left))
        other._left = list(self._left)
        return other

    def _free(self, entered: float) -> list[float]:
        return [max(entered, self._left[0]), *self._left[1:]]
