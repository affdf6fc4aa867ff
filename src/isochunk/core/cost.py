"""What a prefill step costs. The formula is written here once; everything else calls it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from isochunk.core.errors import ModelError

__all__ = ["COEFFICIENTS", "CostModel", "features"]

Floats = npt.NDArray[np.float64]

_LARGEST = 1e6  # seconds; more is a wrong unit, and would overflow in long prompts

COEFFICIENTS = ("c0", "c1", "c2", "c3")


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of one step on one pipeline stage, summed over the requests r of the batch:

        t = c0 + sum_r [ c1*C + c2*C*(H + C/2) + c3*H ]

    with C new tokens of a request (its chunk) after H tokens already in its KV cache (its history).

    Attributes:
        c0: fixed seconds of a step: launch, scheduler, point-to-point transfer. Above 0.
        c1: seconds a new token in the linear layers. Above 0.
        c2: seconds a (new token, attended token) pair in the attention. At least 0.
        c3: seconds a history token for re-reading it once a step. At least 0.

    Raises:
        ModelError: a coefficient is not a finite number in its range. A step cost of zero is refused
            because the law would answer it with endless tiny chunks.
    """

    c0: float
    c1: float
    c2: float
    c3: float = 0.0

    def __post_init__(self) -> None:
        for name in COEFFICIENTS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float, np.floating, np.integer)):
                raise ModelError(f"{name} = {value!r} is not a number")
            try:
                number = float(value)
            except OverflowError:
                number = math.inf
            if not 0 <= number <= _LARGEST:  # false for NaN too
                raise ModelError(f"{name} = {number} must be a finite number of seconds from 0 to {_LARGEST:.0f}")
            object.__setattr__(self, name, number)
        for name in ("c0", "c1"):
            if getattr(self, name) == 0:
                raise ModelError(
                    f"{name} = 0 must be above 0: a real step has a fixed cost and a cost a token; "
                    "measure small chunks too, or calibrate again"
                )

    @overload
    def seconds(self, chunk: float, history: float = 0) -> float: ...
    @overload
    def seconds(self, chunk: Floats, history: Floats | float = 0) -> Floats: ...
    def seconds(self, chunk: float | Floats, history: float | Floats = 0) -> float | Floats:
        """Seconds of a step that holds one chunk after ``history`` tokens (numbers, or arrays that broadcast)."""
        return self.c0 + chunk * (self.c1 + self.c2 * (history + chunk / 2)) + self.c3 * history

    @overload
    def marginal(self, chunk: float, history: float = 0) -> float: ...
    @overload
    def marginal(self, chunk: Floats, history: Floats | float = 0) -> Floats: ...
    def marginal(self, chunk: float | Floats, history: float | Floats = 0) -> float | Floats:
        """Seconds that a chunk adds to a step which runs anyway: ``seconds`` without c0."""
        return self.seconds(chunk, history) - self.c0  # type: ignore[arg-type]

    def chunk(self, seconds: float, history: float = 0) -> float:
        """The inverse of ``seconds``: tokens (not rounded) whose step takes ``seconds``; 0 when none fit."""
        return self.marginal_chunk(seconds - self.c0, history)

    def marginal_chunk(self, seconds: float, history: float = 0) -> float:
        """The inverse of ``marginal``: tokens that add ``seconds`` to a step; 0 when none fit."""
        spare = seconds - self.c3 * history
        if spare <= 0:
            return 0.0
        slope = self.c1 + self.c2 * history
        # The root of c2/2*C^2 + slope*C = spare, in the form that stays exact as c2 -> 0.
        return 2 * spare / (slope + math.sqrt(slope * slope + 2 * self.c2 * spare))

    def work(self, start: float, end: float) -> float:
        """Seconds of computing tokens ``start`` to ``end`` of a prompt; does not depend on the cut."""
        return (end - start) * (self.c1 + self.c2 * (end + start) / 2)

    def step_cost(self, start: float, end: float) -> float:
        """Effective fixed seconds of a step, ``c0 + c3*hbar``: hbar is the work-weighted mean history."""
        if self.c3 == 0 or end <= start:
            return self.c0 + self.c3 * start
        moment = self.c1 * (end**2 - start**2) / 2 + self.c2 * (end**3 - start**3) / 3
        return self.c0 + self.c3 * moment / self.work(start, end)

    def scaled(self, factor: float, *, step: float | None = None) -> CostModel:
        """The model of a machine that takes ``factor`` times as long; c0 by ``step`` when given."""
        c0 = self.c0 * (factor if step is None else step)
        return CostModel(c0, self.c1 * factor, self.c2 * factor, self.c3 * factor)

    def predict(self, rows: Floats) -> Floats:
        """Seconds of steps given by their `features`, shape (steps, 4); returns shape (steps,)."""
        seconds: Floats = rows @ np.array([self.c0, self.c1, self.c2, self.c3])
        return seconds

    def as_dict(self) -> dict[str, Any]:
        """``{"c0": .., "c1": .., "c2": .., "c3": ..}`` in seconds."""
        return asdict(self)


def features(chunks: npt.ArrayLike, histories: npt.ArrayLike) -> Floats:
    """Rows ``[1, sum C, sum C*(H + C/2), sum H]`` of one step: what c0..c3 multiply.

    ``chunks`` and ``histories`` hold one entry a request, shape (requests,). Returns shape (4,).
    """
    c = np.asarray(chunks, dtype=np.float64)
    h = np.asarray(histories, dtype=np.float64)
    return np.array([1.0, c.sum(), (c * (h + c / 2)).sum(), h.sum()])
