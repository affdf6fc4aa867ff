"""What was predicted and what came, added up since the start of the server."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

__all__ = ["Distribution", "Tally"]

_STEP_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_TTFT_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0)
_RATIO = (0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 5.0)
_TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)


class Distribution:
    """A histogram with fixed upper bounds, as Prometheus counts."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        """How many were counted."""
        return sum(self.counts)

    def as_dict(self) -> dict[str, Any]:
        """``bounds``, ``counts`` (each of its own bucket, the last above all bounds) and ``sum``."""
        return {"bounds": list(self.bounds), "counts": list(self.counts), "sum": self.sum}


class Tally:
    """Sums and histograms of steps and prompts.

    Attributes:
        busy_s: seconds that one stage worked, in all steps.
        occupied_s: seconds in which at least one step was in the pipeline.
        predicted_s, measured_s: of the steps for which there was a prediction, on one stage.
        prompts: that ended, with or without a plan; ``alone`` of them were planned and shared no step.
        ttft_s, ttft_predicted_s, ttft_fixed_s: of those alone: measured, predicted, and what vLLM's own size would have
            taken by the model of that moment.
    """

    def __init__(self) -> None:
        self.steps = Distribution(_STEP_S)
        self.step_ratio = Distribution(_RATIO)
        self.chunks = Distribution(_TOKENS)
        self.ttft = Distribution(_TTFT_S)
        self.ttft_ratio = Distribution(_RATIO)
        self.busy_s = self.occupied_s = 0.0
        self.predicted_s = self.measured_s = 0.0
        self.prompts = self.tokens = self.alone = 0
        self.ttft_s = self.ttft_predicted_s = self.ttft_fixed_s = 0.0
        self._empty_since = float("-inf")

    def step(self, entered: float, exited: float, seconds: float, predicted: float, chunks: Sequence[int]) -> None:
        """A step left the pipeline: its moments, and its measured and predicted seconds on one stage."""
        self.steps.add(seconds)
        self.busy_s += seconds
        self.occupied_s += max(exited - max(entered, self._empty_since), 0.0)
        self._empty_since = exited
        for chunk in chunks:
            self.chunks.add(chunk)
        if predicted > 0:
            self.predicted_s += predicted
            self.measured_s += seconds
            self.step_ratio.add(seconds / predicted)

    def prompt(self, tokens: int, ttft: float, predicted: float | None, fixed: float | None) -> None:
        """A prompt has its first token; ``predicted`` and ``fixed`` only of one that was planned and ran alone."""
        self.prompts += 1
        self.tokens += tokens
        self.ttft.add(ttft)
        if predicted is not None and fixed is not None:
            self.alone += 1
            self.ttft_s += ttft
            self.ttft_predicted_s += predicted
            self.ttft_fixed_s += fixed
            self.ttft_ratio.add(ttft / predicted)

    def copy(self) -> Tally:
        """The same numbers, which go on no more."""
        return copy.deepcopy(self)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for the status."""
        numbers = {name: value for name, value in vars(self).items() if isinstance(value, (int, float))}
        histograms = {name: value.as_dict() for name, value in vars(self).items() if isinstance(value, Distribution)}
        return {**{name: value for name, value in numbers.items() if not name.startswith("_")}, **histograms}
