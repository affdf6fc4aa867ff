"""The published rule of vLLM-Ascend's chunk profiling, before and after its own calibration.

Written from its documentation as facts: see ``docs/simulator.md``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from isochunk.core.cost import CostModel
from isochunk.simulator.share import ChunkPolicy, Share

if TYPE_CHECKING:
    from isochunk.simulator.scheduler import Queue, Step, Steps

__all__ = ["AscendPolicy"]

_PROBES = 64
_GRAIN = 64
_FIRST_BATCHES = 3


class AscendPolicy(ChunkPolicy):
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

    def share(self, queue: Queue, in_flight: Steps, now: float) -> Share:
        """Chunks solved one request after the other against what is left of T."""
        return _Target(self, self._target)

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

    def chunk(self, seconds: float, history: int) -> int:
        """The chunk that is predicted to take so long."""
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

    def predicted(self, chunk: int, history: int) -> float:
        """Seconds of a chunk, by its own fit."""
        if self._fitted is None:
            a, b, _ = self._profiled
            return float(a * chunk * chunk + (2 * a * history + b) * chunk)
        a, b, c = self._fitted
        return a * chunk * (chunk + history) + b * (chunk + history) + c


class _Target(Share):
    """What is left of T in a step."""

    def __init__(self, policy: AscendPolicy, seconds: float) -> None:
        super().__init__()
        self._policy, self._seconds = policy, seconds

    def chunk(self, key: str, history: int, remaining: int, left: int) -> int:
        if self._seconds <= 0:
            return 0
        chunk = min(self._policy.chunk(self._seconds, history), remaining, left)
        self._seconds -= self._policy.predicted(chunk, history)
        return chunk


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
