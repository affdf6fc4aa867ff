"""Keeps a cost model true to the steps that were measured last."""

from __future__ import annotations

import math
from collections import deque

import numpy as np
import numpy.typing as npt

from isochunk.core.cost import CostModel
from isochunk.core.errors import FitError, ModelError
from isochunk.core.fit import MIN_SAMPLES, Fit, fit_features, relative_error

__all__ = ["Calibrator"]

Floats = npt.NDArray[np.float64]

_BETTER = 0.9  # a new model must have at most this much of the old one's error on held-out steps
_WORST = 0.3  # a new model that is further off the held-out steps than this explains nothing
_LEAST_STEP = 0.5  # part of the reference model's c0
_GOOD_ENOUGH = 0.03  # relative error below which the old model is left alone


class Calibrator:
    """A bounded rolling window of measured prefill steps, and the refit over it.

    The present model is the prior of the next one, so what the window does not determine stays as it is. The
    steps of planned prompts hardly determine c0, so no refit brings it below half of the reference model's.

    Args:
        model: the model to keep true, or None to learn a first one.
        window: most samples held.
    """

    def __init__(self, model: CostModel | None, window: int = 30) -> None:
        self.use(model)
        self._rows: deque[Floats] = deque(maxlen=window)
        self._seconds: deque[float] = deque(maxlen=window)

    def use(self, model: CostModel | None) -> None:
        """Start from this model, measured on small chunks too: the reference of later refits."""
        self.model = model
        self._least_step = 0.0 if model is None else _LEAST_STEP * model.c0

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: Floats, seconds: float) -> None:
        """Add a clean prefill step: its features (`isochunk.core.cost.features`) and its seconds."""
        if seconds > 0:
            self._rows.append(row)
            self._seconds.append(seconds)

    def drift(self) -> float:
        """Median of measured over predicted seconds in the window; 1 when there is nothing to compare."""
        if not self._rows or self.model is None:
            return 1.0
        rows, seconds = self._arrays()
        return float(np.median(seconds / (rows @ np.array(list(self.model.as_dict().values())))))

    def refit(self) -> Fit | None:
        """A better model, which becomes `model`, or None when the present one should stay.

        Half of the window fits a candidate and the other half judges it against the present model.
        """
        if len(self._rows) < 2 * MIN_SAMPLES:
            return None
        rows, seconds = self._arrays()
        held = np.arange(len(rows)) % 2 == 1
        error = math.inf if self.model is None else relative_error(self.model, rows[held], seconds[held])
        if error < _GOOD_ENOUGH or (self.model is None and not rows[:, 3].any()):
            return None
        prior = None if self.model is None else self.model.scaled(self.drift())
        floors = (self._least_step, 0.0)
        try:
            candidate = fit_features(rows[~held], seconds[~held], prior=prior, floors=floors)
            if relative_error(candidate.model, rows[held], seconds[held]) > min(_BETTER * error, _WORST):
                return None
            better = fit_features(rows, seconds, prior=prior, floors=floors)
        except (FitError, ModelError):
            return None
        if prior is None and better.undetermined:
            return None
        self.model = better.model
        return better

    def _arrays(self) -> tuple[Floats, Floats]:
        return np.array(self._rows), np.array(self._seconds)
