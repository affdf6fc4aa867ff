"""The start-up probe: what a prefill step costs, measured through the engine's front door."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from isochunk.core.errors import FitError, ModelError
from isochunk.core.fit import Fit, fit

__all__ = ["PREFIX", "Probe", "probe_chunks"]

logger = logging.getLogger("vllm.isochunk.probe")

PREFIX = "isochunk-probe-"
_REPEATS = 3
_MOST_STEPS = 65
_MOST_LARGE = 11  # large chunks that carry the history on, few enough that the prompt is sent twice
# One prompt visits small and large chunks at small, middle and large history. Exponents of the ratio
# between the smallest chunk and the others; the rest of the prompt is one more chunk.
_GROUPS = ((0, 0, 1, 1, 2, 2, 2.5, 3), (0, 0, 1, 1, 2, 2, 2.5), (0, 0, 1, 1, 2))
_SMALLEST = 64
_SHORTEST = 120  # a prompt is at least so many times its smallest chunk, to leave room for larger ones
_BUSY = 1.5  # typical over fastest seconds of the same step, above which something else was running


def probe_chunks(tokens: int, max_chunk: int, block: int) -> list[int]:
    """Chunk sizes of one composite probe prompt of up to ``tokens`` tokens, at most ``max_chunk`` each."""
    small = min(max(min(_SMALLEST, tokens // _SHORTEST) // block, 1) * block, max_chunk)

    def groups(ratio: float) -> list[list[int]]:
        return [[_size(small, ratio**power, max_chunk, block) for power in group] for group in _GROUPS]

    low, high = 1.0, max(max_chunk / small, 1.0) ** (1 / max(_GROUPS[0]))
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(map(sum, groups(middle))) > 0.94 * tokens else (middle, high)
    first, second, third = groups(low)
    rest = tokens - sum(first) - sum(second) - sum(third)
    large = [max_chunk] * min(max(rest - max_chunk, 0) // max_chunk, _MOST_LARGE)
    half = len(large) // 2
    chunks: list[int] = []
    for size in [*first, *large[:half], *second, *large[half:], *third, min(max(rest, 1), max_chunk)]:
        chunks.append(min(size, tokens - sum(chunks)))
        if sum(chunks) == tokens:
            break
    return chunks


def _typical(seconds: list[float]) -> float:
    """The middle of three repeats, the less of two.

    Noise makes a step longer, but where an exit is noticed late it makes the step after look shorter: the
    least of three would keep just those.
    """
    return sorted(seconds)[(len(seconds) - 1) // 2]


def _size(small: int, factor: float, max_chunk: int, block: int) -> int:
    return min(max(int(small * factor) // block * block, small), max_chunk)


@dataclass(slots=True, kw_only=True)
class Probe:
    """Runs the composite prompt up to three times and fits the typical seconds of each step.

    Attributes:
        chunks: sizes of the composite prompt's steps.
        max_seconds: no prompt is started, or gone on with, when this time would be exceeded.
    """

    chunks: list[int]
    max_seconds: float
    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0
    busy: bool = False
    samples: list[tuple[int, int, float]] = field(default_factory=list)

    def chunk_at(self, history: int) -> int | None:
        """The chunk that the composite prompt takes after ``history`` tokens."""
        at = 0
        for size in self.chunks:
            if at == history:
                return size
            at += size
        return None

    def run(self, prefill: Callable[[str, int, float], list[tuple[int, int, float]]]) -> Fit | None:
        """Measure and fit; None when the steps measured give no model.

        ``prefill(request_id, tokens, deadline)`` sends one prompt through the engine and returns
        (chunk, history, seconds) of each of its steps; after ``deadline`` (monotonic seconds) it stops early.
        """
        start = time.monotonic()
        times: dict[tuple[int, int], list[float]] = {}
        longest = 0.0
        for repeat in range(min(_REPEATS, _MOST_STEPS // len(self.chunks))):
            began = time.monotonic()
            if repeat and began - start + longest > self.max_seconds:
                break
            steps = prefill(f"{PREFIX}{repeat}", sum(self.chunks), start + self.max_seconds)
            for chunk, history, seconds in steps:
                times.setdefault((chunk, history), []).append(seconds)
            longest = max(longest, time.monotonic() - began)
            self.steps += len(steps)
            self.tokens += sum(chunk for chunk, _, _ in steps)
        self.seconds = time.monotonic() - start
        self.samples = [(c, h, _typical(seconds)) for (c, h), seconds in times.items()]
        spread = [float(np.median(seconds)) / min(seconds) for seconds in times.values()]
        self.busy = bool(spread) and float(np.median(spread)) > _BUSY
        return self._fit()

    def _fit(self) -> Fit | None:
        try:
            chunk, history, seconds = zip(*self.samples, strict=True) if self.samples else ((), (), ())
            result = fit(chunk, history, seconds)
            if result.undetermined:
                raise FitError(f"its steps don't determine {', '.join(result.undetermined)}")
            return result
        except (FitError, ModelError) as error:
            logger.warning("isochunk: the probe gave no cost model (%s); vLLM's own chunks are used", error)
            return None

    def as_dict(self) -> dict[str, Any]:
        """Plain data for the status endpoint."""
        return {
            "seconds": self.seconds,
            "steps": self.steps,
            "tokens": self.tokens,
            "busy": self.busy,
            "samples": [list(sample) for sample in self.samples],
        }
