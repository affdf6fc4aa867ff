"""Steps on their way through the stages: when each comes out, also when the stages' pace changes meanwhile."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from isochunk.vllm.virtual.pace import Pace, Span

__all__ = ["Pipeline", "StageDiedError", "Step"]


class StageDiedError(RuntimeError):
    """A virtual worker was told to die; vLLM's engine ends as it does when a real one died."""


@dataclass(slots=True, eq=False)
class Step:
    """A step in the pipeline.

    Attributes:
        entered: monotonic seconds.
        seconds: what it takes on each stage at rate 1.
        left: when it leaves each stage, as things stand.
        due: when its result is back at the engine.
    """

    entered: float
    seconds: Sequence[float]
    left: list[float]
    due: float = math.inf


class Pipeline:
    """P clocks in a row. A stage takes the next step when it has it and is done with the one before.

    Times are a function of entries, seconds and pace; so a change of pace now recomputes the steps that are
    still inside, and leaves their past as it was. Thread-safe.

    Args:
        stages: number of stages.
        hand_over: seconds from leaving a stage to being at the next one.
        back: seconds from leaving the last stage to being at the engine.
    """

    def __init__(self, stages: int, *, hand_over: float = 0.0, back: float = 0.0) -> None:
        self.stages = stages
        self._hand_over = hand_over
        self._back = back
        self._paces = [Pace() for _ in range(stages)]
        self._inside: deque[Step] = deque()
        self._free = [-math.inf] * stages  # when the stages are done with the last step that is out
        self._changed = threading.Condition()
        self._dead: str | None = None

    def enter(self, seconds: Sequence[float]) -> Step:
        """A step that takes these seconds on the stages enters now."""
        with self._changed:
            now = time.monotonic()
            self._retire(now)
            step = Step(now, seconds, [0.0] * self.stages)
            self._pass_through(step, self._inside[-1].left if self._inside else self._free)
            self._inside.append(step)
            return step

    def wait(self, step: Step, timeout: float) -> None:
        """Return when the step's result is back.

        Raises:
            TimeoutError: that takes longer than ``timeout`` from its entry on.
            StageDiedError: a stage is dead.
        """
        deadline = step.entered + timeout
        with self._changed:
            while (now := time.monotonic()) < step.due or self._dead:
                if self._dead:
                    raise StageDiedError(self._dead)
                if now >= deadline:
                    raise TimeoutError(f"a step did not come out of the virtual stages within {timeout:g} s")
                self._changed.wait(min(step.due, deadline) - now)

    def is_back(self, step: Step) -> bool:
        """Whether `wait` would return or raise at once."""
        return self._dead is not None or time.monotonic() >= step.due

    def slow(self, span: Span, stage: int | None = None) -> None:
        """Add a span to one stage's pace, or to every stage's; it counts for steps that are inside too."""
        with self._changing():
            for pace in self._paces if stage is None else [self._paces[stage]]:
                pace.add(Span(span.start, span.end, span.rate))

    def resume(self) -> None:
        """Every stage runs at rate 1 from now on."""
        with self._changing() as now:
            for pace in self._paces:
                pace.end(now)

    @contextmanager
    def _changing(self) -> Iterator[float]:
        """Steps that are still inside after a change of pace are computed anew, and who waits for them looks again."""
        with self._changed:
            now = time.monotonic()
            self._retire(now)
            yield now
            left: Sequence[float] = self._free
            for step in self._inside:
                self._pass_through(step, left)
                left = step.left
            oldest = self._inside[0].entered if self._inside else now
            for pace in self._paces:
                pace.forget(oldest)
            self._changed.notify_all()

    def die(self, why: str) -> None:
        """No step comes out any more: whoever waits gets `StageDiedError`."""
        with self._changed:
            self._dead = why
            self._changed.notify_all()

    @property
    def dead(self) -> str | None:
        """Why no step comes out any more, if so."""
        return self._dead

    def rates(self) -> list[float]:
        """Each stage's pace now."""
        now = time.monotonic()
        return [pace.rate(now) for pace in self._paces]

    def _pass_through(self, step: Step, free: Sequence[float]) -> None:
        ready = step.entered
        for stage, pace in enumerate(self._paces):
            step.left[stage] = pace.finish(max(ready, free[stage]), step.seconds[stage])
            ready = step.left[stage] + self._hand_over
        step.due = step.left[-1] + self._back

    def _retire(self, now: float) -> None:
        """Steps that are back can't change any more."""
        while self._inside and self._inside[0].due <= now:
            self._free = self._inside.popleft().left
