"""What happened to the last prompts: their chunks, predicted and measured seconds."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field, fields
from typing import Any

__all__ = ["Part", "PromptLog", "PromptRecord", "Run", "Step"]

_FINISHED = 32
_OPEN = 256


@dataclass(frozen=True, slots=True)
class Part:
    """One request's share of a step: ``chunk`` new tokens after ``history``, of ``prompt`` tokens in all."""

    request_id: str
    chunk: int
    history: int
    prompt: int

    @property
    def last(self) -> bool:
        """Whether this share ends the prompt."""
        return self.history + self.chunk >= self.prompt


@dataclass(slots=True, kw_only=True)
class PromptRecord:
    """A prompt's steps; one list entry a step, seconds on one stage."""

    request_id: str
    policy: str
    chunk: int | None
    cached: int
    predicted_ttft_s: float | None
    tokens: int = 0
    alone: bool = True
    measured_ttft_s: float = 0.0
    chunks: list[int] = field(default_factory=list)
    histories: list[int] = field(default_factory=list)
    predicted_s: list[float] = field(default_factory=list)
    measured_s: list[float] = field(default_factory=list)
    entered_s: list[float] = field(default_factory=list)
    exited_s: list[float] = field(default_factory=list)

    @property
    def steps(self) -> list[tuple[int, int, float]]:
        """Chunk, history and measured seconds of each step."""
        return list(zip(self.chunks, self.histories, self.measured_s, strict=True))


@dataclass(slots=True, eq=False)
class Run:
    """A prompt's one run through the pipeline: ``at`` tokens have entered it; nothing is noted once it is ``over``."""

    record: PromptRecord
    at: int
    over: bool = False


@dataclass(slots=True, kw_only=True)
class Step:
    """A step in the pipeline; times are monotonic seconds. ``output`` is what the scheduler made it from.

    ``runs`` are those of the parts, in their order; ``decodes`` are (new tokens, history) of whoever else is in it.
    """

    output: Any
    parts: list[Part]
    runs: list[Run]
    decodes: list[tuple[int, int]]
    predicted_s: float
    entered_s: float


class PromptLog:
    """Open and lately finished prompts, bounded both.

    A record is one run of one prompt. A request that is preempted begins another, as does one that comes under the id
    of an aborted one; what is still in the pipeline of a run that is over is noted nowhere.
    """

    def __init__(self) -> None:
        self._open: OrderedDict[str, Run] = OrderedDict()
        self._finished: deque[PromptRecord] = deque(maxlen=_FINISHED)

    def enter(self, part: Part) -> Run | None:
        """The run that this part goes on with; None when it begins one."""
        run = self._open.get(part.request_id)
        if run is None:
            return None
        if run.at != part.history:
            self.drop(part.request_id)
            return None
        run.at += part.chunk
        return run

    def open(self, record: PromptRecord, part: Part) -> Run:
        """Begin a run; the oldest open one is dropped when there are too many."""
        run = self._open[part.request_id] = Run(record, part.history + part.chunk)
        if len(self._open) > _OPEN:
            self.drop(next(iter(self._open)))
        return run

    def drop(self, request_id: str) -> None:
        """The run ends here: its request was preempted or aborted."""
        run = self._open.pop(request_id, None)
        if run is not None:
            run.over = True

    def share(self, request_id: str) -> None:
        """Others wait for a prompt or pass it, so it does not run alone."""
        if (run := self._open.get(request_id)) is not None:
            run.record.alone = False

    def share_all(self) -> None:
        """The engine pauses: no open prompt runs undisturbed."""
        for run in self._open.values():
            run.record.alone = False

    def step(self, run: Run, part: Part, step: Step, exited: float, seconds: float) -> PromptRecord | None:
        """Note a step that left the pipeline; returns the record when it was the prompt's last."""
        if run.over:
            return None
        record = run.record
        record.alone = record.alone and not step.decodes and len(step.parts) == 1
        record.chunks.append(part.chunk)
        record.histories.append(part.history)
        record.predicted_s.append(step.predicted_s)
        record.measured_s.append(seconds)
        record.entered_s.append(step.entered_s)
        record.exited_s.append(exited)
        if not part.last:
            return None
        self.drop(part.request_id)
        record.tokens = part.history + part.chunk
        record.measured_ttft_s = exited - record.entered_s[0]
        self._finished.append(record)
        return record

    def find(self, request_id: str) -> PromptRecord | None:
        """A prompt's record, finished or not; the last one under this id."""
        if (run := self._open.get(request_id)) is not None:
            return run.record
        return next((record for record in reversed(self._finished) if record.request_id == request_id), None)

    def take(self, request_id: str) -> PromptRecord | None:
        """Remove and return a prompt's record, finished or not."""
        run = self._open.get(request_id)
        self.drop(request_id)
        for finished in self._finished:
            if finished.request_id == request_id:
                self._finished.remove(finished)
                return finished
        return run.record if run else None

    def as_list(self) -> list[dict[str, Any]]:
        """Finished prompts as plain data, newest last; nothing is added to them any more, so their lists are shared."""
        return [{name: getattr(record, name) for name in _FIELDS} for record in self._finished]


_FIELDS = tuple(each.name for each in fields(PromptRecord))
