"""Keeps a cost model true to the steps that were measured last."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from isochunk.core.cost import CostModel
from isochunk.core.errors import FitError, ModelError
from isochunk.core.fit import MIN_SAMPLES, MIN_WITH_PRIOR, Fit, fit_features, relative_error

__all__ = ["Calibrator", "Sample", "floors_of"]

Floats = npt.NDArray[np.float64]
Sample = tuple[Floats, float]  # features of a step (`isochunk.core.cost.features`) and its seconds

_BETTER = 0.9  # a new model must have at most this much of the old one's error on held-out steps
_WORST = 0.3  # a new model that is further off the held-out steps than this explains nothing
_TOO_SHORT = 0.2  # part of the window's typical measured over predicted seconds
_GOOD_ENOUGH = 0.05  # relative error below which the old model is left alone
_WRONG = 0.15  # relative error above which it is not the traffic that is special but the model that is wrong
_DOUBT = 2  # steps after an alarm from which it is judged
_PLACES = 64  # sizes and histories that are remembered
_ODD = 1.5  # a step so many times longer or shorter than predicted is not worth remembering


class Calibrator:
    """A bounded rolling window of measured prefill steps, and the refit over it.

    The present model is the prior of the next one, so what the window does not determine stays as it is. The
    steps of planned prompts hardly determine the cost of a step, so no refit brings it below the floors.

    Real steps follow the law to a few percent only, and a window of one kind of traffic would bend the model to
    its own few percent and away from all other traffic. So the last step of each size and history that the window
    has lost is remembered, and fitted with it; unless the window finds the model wrong altogether.

    Args:
        model: the model to keep true, or None to learn a first one.
        window: most samples held.
        floors: lower bounds of c0 and c3; None for a part of the model's own (`floors_of`).
        remembered: steps measured before, such as the probe's.
    """

    def __init__(
        self,
        model: CostModel | None,
        window: int = 30,
        floors: tuple[float, float] | None = None,
        remembered: Iterable[Sample] = (),
    ) -> None:
        self._model = model
        self._before: CostModel | None = None  # the model before an alarm
        self._since_alarm = 0
        self.floors = floors if floors is not None else floors_of(model)
        self._samples: deque[Sample] = deque(maxlen=window)
        self._least = min(2 * MIN_SAMPLES, window)
        self._places: OrderedDict[tuple[int, int], Sample] = OrderedDict()
        for sample in remembered:
            self._remember(sample)

    @property
    def model(self) -> CostModel | None:
        """What a step costs now; None while nothing is known."""
        return self._model

    def alarm(self, model: CostModel) -> None:
        """Plan with this model until the next refit tells whether the one before was wrong or the machine disturbed."""
        if self._before is None:
            self._before = self._model
        self._model = model
        self._since_alarm = 0

    @property
    def alarm_doubted(self) -> bool:
        """Whether the steps since an alarm say that it was not the step cost that was wrong.

        A raised step cost explains the steps that raised it whatever is wrong, since they were all about as long.
        """
        if self.model is None or self._before is None or self._since_alarm < _DOUBT:
            return False
        rows, seconds = self._arrays()
        return relative_error(self.model, rows[-self._since_alarm :], seconds[-self._since_alarm :]) > _WRONG

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, row: Floats, seconds: float) -> None:
        """Add a clean prefill step: its features (`isochunk.core.cost.features`) and its seconds."""
        if seconds <= 0:
            return
        if len(self._samples) == self._samples.maxlen:
            self._remember(self._samples[0])
        self._samples.append((row, seconds))
        self._since_alarm += 1

    def _remember(self, sample: Sample) -> None:
        row, seconds = sample
        if self._model is not None and not 1 / _ODD < seconds / float(self._model.predict(row[None])[0]) < _ODD:
            return
        place = (round(math.log2(max(row[1], 1.0))), round(math.log2(1 + row[3] / 1024)))
        self._places[place] = sample
        self._places.move_to_end(place)
        if len(self._places) > _PLACES:
            self._places.popitem(last=False)

    def drift(self) -> float:
        """Median of measured over predicted seconds in the window; 1 when there is nothing to compare."""
        if not self._samples or self.model is None:
            return 1.0
        rows, seconds = self._arrays()
        return float(np.median(seconds / self.model.predict(rows)))

    def refit(self) -> Fit | None:
        """A better model, which becomes `model`, or None when the present one should stay.

        Half of the window fits a candidate and the other half judges it against the present model; so it
        judges the fit over the whole window. What is remembered takes part in the fits.
        """
        doubted = self.alarm_doubted
        if len(self._samples) < (2 * MIN_WITH_PRIOR if doubted else self._least):
            return None
        rows, seconds = self._plausible()
        held = np.arange(len(rows)) % 2 == 1
        error = math.inf if self.model is None or doubted else relative_error(self.model, rows[held], seconds[held])
        if error < _GOOD_ENOUGH or (self.model is None and not rows[:, 3].any()):
            return None
        bound = min(_BETTER * error, _WORST)
        prior, wrong = self.model, error > _WRONG
        if self._before is not None:
            still_wrong = relative_error(self._before, rows[held], seconds[held]) > _WRONG
            if doubted or not still_wrong:
                prior, wrong = self._before, still_wrong
        if prior is not None and wrong:
            prior = _slowed(prior, float(np.median(seconds / prior.predict(rows))))
        kept = [] if wrong else list(self._places.values())
        try:
            for part in (~held, np.full(len(rows), True)):
                fitted = np.array([*rows[part], *(row for row, _ in kept)])
                times = np.array([*seconds[part], *(second for _, second in kept)])
                better = fit_features(fitted, times, prior=prior, floors=self.floors)
                if relative_error(better.model, rows[held], seconds[held]) > bound:
                    return None
        except (FitError, ModelError):
            return None
        if prior is None:
            if better.undetermined:
                return None
            self.floors = floors_of(better.model)
        self._model, self._before = better.model, None
        if wrong:
            for place, (row, _) in self._places.items():
                self._places[place] = (row, float(better.model.predict(row[None])[0]))
        return replace(better, residuals=better.residuals[: len(rows)])  # of what was measured, not remembered

    def _plausible(self) -> tuple[Floats, Floats]:
        """The window without steps that look far too short: their exits were noticed late, and together."""
        rows, seconds = self._arrays()
        if self.model is None:
            return rows, seconds
        share = seconds / self.model.predict(rows)
        keep = share > _TOO_SHORT * np.median(share)
        return rows[keep], seconds[keep]

    def _arrays(self) -> tuple[Floats, Floats]:
        rows, seconds = zip(*self._samples, strict=True)
        return np.array(rows), np.array(seconds)


def _slowed(model: CostModel, drift: float) -> CostModel:
    """The model of a machine that takes ``drift`` times as long; its step cost is never less for it.

    Planned steps hardly determine the step cost, and too little of it makes far more steps than are good.
    """
    step = drift if drift > 1 else drift**0.5
    return model.with_costs(model.c0 * step, model.c1 * drift, model.c2 * drift, model.c3 * step)


def floors_of(model: CostModel | None) -> tuple[float, float]:
    """The least c0 and c3 that refits of this measured model may reach."""
    return (0.0, 0.0) if model is None else (model.c0 / 2, model.c3 / 4)
