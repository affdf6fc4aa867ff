"""What happened to the last prompts: their chunks, predicted and measured seconds."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Part", "PromptLog", "PromptRecord", "Step"]

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
class Step:
    """A step in the pipeline; times are monotonic seconds. ``output`` is what the scheduler made it from."""

    output: Any
    parts: list[Part]
    pure: bool
    predicted_s: float
    entered_s: float


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


class PromptLog:
    """Open and lately finished prompts, bounded both."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, PromptRecord] = OrderedDict()
        self._finished: deque[PromptRecord] = deque(maxlen=_FINISHED)

    def open(self, record: PromptRecord) -> None:
        """Start a prompt; the oldest open one is dropped when there are too many (its request was aborted)."""
        self._open[record.request_id] = record
        if len(self._open) > _OPEN:
            self._open.popitem(last=False)

    def share(self, request_id: str) -> None:
        """A prompt sits a step out for others, so it does not run alone."""
        if (record := self._open.get(request_id)) is not None:
            record.alone = False

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def step(self, part: Part, step: Step, exited: float, seconds: float) -> PromptRecord | None:
        """Note a step that left the pipeline; returns the record when it was the prompt's last."""
        record = self._open.get(part.request_id)
        if record is None:
            return None
        record.alone = record.alone and step.pure and len(step.parts) == 1
        record.chunks.append(part.chunk)
        record.histories.append(part.history)
        record.predicted_s.append(step.predicted_s)
        record.measured_s.append(seconds)
        record.entered_s.append(step.entered_s)
        record.exited_s.append(exited)
        if not part.last:
            return None
        del self._open[part.request_id]
        record.tokens = part.history + part.chunk
        record.measured_ttft_s = exited - record.entered_s[0]
        self._finished.append(record)
        return record

    def take(self, request_id: str) -> PromptRecord | None:
        """Remove and return a prompt's record, finished or not."""
        record = self._open.pop(request_id, None)
        for finished in self._finished:
            if finished.request_id == request_id:
                self._finished.remove(finished)
                return finished
        return record

    def as_list(self) -> list[dict[str, Any]]:
        """Finished prompts as plain data, newest last."""
        return [asdict(record) for record in self._finished]
