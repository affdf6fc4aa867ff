"""Errors thrown inside isochunk while vLLM's scheduler works: in any function of its own, at any call."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import isochunk

__all__ = ["FaultError", "Faults"]

_SOURCE = str(Path(isochunk.__file__).parent)


class FaultError(Exception):
    """What is thrown."""


class Faults:
    """Sees each call of a function of isochunk's, and throws in it on demand.

    Python's tracing is used, so it reaches closures, properties and whatever was imported by name, as it is.

    Attributes:
        calls: how often each function was called since the start.
        thrown: how often one was thrown.
    """

    def __init__(self) -> None:
        self.calls: Counter[CodeType] = Counter()
        self.thrown = 0
        self._target: CodeType | None = None
        self._at: int | None = None

    def throw_in(self, target: CodeType | None, at: int | None = None) -> None:
        """Throw in this function: at one of its calls, or (None) at its first one of each `watched` block."""
        self._target, self._at = target, at

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While it lasts calls are seen; one that was thrown ends the watch, as Python has it."""
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(_SOURCE):
            return
        self.calls[code] += 1
        if code is self._target and self._at in (None, self.calls[code]):
            self.thrown += 1
            raise FaultError(f"{code.co_qualname}, call {self.calls[code]}")
