"""The published rule of vLLM-Ascend's chunk profiling, before and after its own calibration.

Written from its documentation as facts: see ``docs/simulator.md``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from isochunk.core.cost import CostModel

if TYPE_CHECKING:
    from isochunk.simulator.instance import Part, Prompts, Step, Steps

__all__ = ["AscendPolicy"]

_PROBES = 64
_GRAIN = 64
_FIRST_BATCHES = 3


class AscendPolicy:
    """Every chunk takes the time T of a first chunk of ``base`` tokens, by its own fit of the cost.

    At start-up f(l) = a*l^2 + b*l + c is fitted to passes without history and T = f(base) - f(0). With
    ``online_rows`` = (first, last), timed batches teach it: T becomes the time of the first batches
    without history, and from ``first`` rows on a fit of [sum C(C+H), sum (C+H), requests] replaces f,
    until it is frozen at ``last`` rows.
    """

    def __init__(
        self,
        model: CostModel,
        *,
        base: int,
        budget: int,
        smooth: float,
        min_chunk: int,
        block: int,
        online_rows: Sequence[int] | None,
    ) -> None:
        self._base, self._budget, self._smooth, self._min_chunk = base, budget, smooth, min_chunk
        self._grain = max(block, _GRAIN)
        self._online = online_rows
        self._rows: list[list[float]] = []
        self._seconds: list[float] = []
        self._first_batches = 0
        self._fitted: tuple[float, float, float] | None = None
        sizes = np.unique(np.linspace(max(base // _PROBES, 1), base, _PROBES).astype(int)).astype(float)
        basis = np.stack([sizes**2, sizes, np.ones_like(sizes)], axis=1)
        a, b, c = np.linalg.lstsq(basis, model.seconds(sizes), rcond=None)[0].tolist()
        self._profiled = (a, b, c)
        self._target = a * base * base + b * base

    def cut(self, prompts: Prompts, in_flight: Steps, now: float) -> list[Part]:
        """Chunks solved one request after the other against what is left of T."""
        parts: list[Part] = []
        seconds, budget = self._target, self._budget
        for prompt in prompts:
            chunk = min(self._chunk(seconds, prompt.history), prompt.remaining, budget)
            parts.append((prompt, chunk))
            budget -= chunk
            seconds -= self._predicted(chunk, prompt.history)
            if budget <= 0 or seconds <= 0:
                break
        return parts

    def observe(self, step: Step) -> None:
        """Learn from a timed batch."""
        if self._online is None or len(self._rows) >= self._online[1]:
            return
        chunks = np.array([chunk for _, chunk, _ in step.parts], dtype=float)
        histories = np.array([history for _, _, history in step.parts], dtype=float)
        if not histories.any() and self._first_batches < _FIRST_BATCHES:
            self._first_batches += 1
            self._target = step.seconds
        self._rows.append([(chunks * (chunks + histories)).sum(), (chunks + histories).sum(), float(len(chunks))])
        self._seconds.append(step.seconds)
        if len(self._rows) >= self._online[0]:
            a, b, c = np.linalg.lstsq(np.array(self._rows), np.array(self._seconds), rcond=None)[0].tolist()
            self._fitted = (a, b, c)

    def _chunk(self, seconds: float, history: int) -> int:
        if self._fitted is None:
            a, b, _ = self._profiled
            size = _positive_root(a, 2 * a * history + b, -seconds)
        else:
            a, b, c = self._fitted
            size = _positive_root(a, a * history + b, b * history + c - seconds)
        if size is None:
            return self._budget
        chunk = max(int(self._base + self._smooth * (size - self._base)), self._min_chunk)
        return math.ceil(chunk / self._grain) * self._grain

    def _predicted(self, chunk: int, history: int) -> float:
        if self._fitted is None:
            a, b, _ = self._profiled
            return float(a * chunk * chunk + (2 * a * history + b) * chunk)
        a, b, c = self._fitted
        return a * chunk * (chunk + history) + b * (chunk + history) + c


def _positive_root(a: float, b: float, c: float) -> float | None:
    """The least x > 0 with a*x^2 + b*x + c = 0, or None."""
    if abs(a) < 1e-30:
        roots = [-c / b] if b else []
    elif b * b - 4 * a * c < 0:
        roots = []
    else:
        root = math.sqrt(b * b - 4 * a * c)
        roots = [(-b - root) / (2 * a), (-b + root) / (2 * a)]
    return min((x for x in roots if x > 0), default=None)
