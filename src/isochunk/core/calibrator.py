"""Keeps a cost model true to the steps that were measured last."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from isochunk.core.cost import CostModel
from isochunk.core.errors import FitError, ModelError
from isochunk.core.fit import MIN_SAMPLES, MIN_WITH_PRIOR, Fit, fit_features, relative_error

__all__ = ["Calibrator", "Sample", "floors_of"]

Floats = npt.NDArray[np.float64]

_TOO_SHORT = 0.2  # part of the window's typical measured over predicted seconds
_GOOD_ENOUGH = 0.05  # relative error below which the old model is left alone
_WORST = 0.3  # a first model that is further off its own steps than this explains nothing
_NOISE = 0.03  # relative; what steps are off the law by themselves
_HELD = (0.7, 0.3, 0.7)  # natural logarithms by which step cost, attention and re-reading are moved lightly
_SURE = 3.0  # how much likelier (in logarithms) other proportions must be than the present ones
_FALL = 0.7  # natural logarithm by which one refit lowers the step cost at most: too little of it is ruinous
_CONFIRMED = 2  # varied prompts that settle the proportions; from then on a change of the speed is taken for one
_TRIES = 6  # varied prompts after which the proportions are taken for settled, since they tell nothing
_STEADY = 8  # prompts at a new speed after which the proportions are looked at once more
_TWICE = float(np.log(2))
_STEP_GRID = np.concatenate((np.arange(-6.0, -1.5, 0.25), np.arange(-1.5, 1.5, 0.1), np.arange(1.5, 7.0, 0.25)))
_ATTENTION_GRID = np.arange(-2.0, 2.01, 0.1)


@dataclass(frozen=True, slots=True)
class Sample:
    """A clean prefill step: its features (`isochunk.core.cost.features`), its seconds, and the prompt it was of."""

    row: Floats
    seconds: float
    prompt: Hashable = None


class Calibrator:
    """A bounded rolling window of measured prefill steps, and the refit over it.

    A factor on all costs changes no cut, so the speed of the machine and the proportions of the costs are learnt apart.
    The speed is that of the last prompt's steps, and followed at once. Proportions are learnt from how the steps of
    one and the same prompt differ among themselves, whatever the speed was at each prompt: so neither a slow day nor
    many short prompts can move them. The steps of a plan are all about as long and tell little of them; after a change
    of the speed, which may also be a step cost that is wrong, `doubted` asks for steps that differ.

    Args:
        model: the model to keep true, or None to learn a first one.
        window: most samples held.
        floors: lower bounds of c0 and c3 in a first fit; None for a part of the model's own (`floors_of`).
    """

    def __init__(self, model: CostModel | None, window: int = 30, floors: tuple[float, float] | None = None) -> None:
        self._model = model
        self.floors = floors if floors is not None else floors_of(model)
        self.doubted = 0
        self._confirmed = 0  # varied prompts that left the proportions as they were, since these last changed
        self._tried = 0  # prompts that were varied without settling anything
        self._steady = 0  # prompts in a row that came as predicted
        self._changed = False  # whether the speed has changed since steps were varied
        self._samples: deque[Sample] = deque(maxlen=window)
        self._least = min(2 * MIN_SAMPLES, window)

    @property
    def model(self) -> CostModel | None:
        """What a step costs now; None while nothing is known."""
        return self._model

    @property
    def proven(self) -> bool:
        """Whether the proportions have been seen to hold, so that longer steps can only mean a slower machine."""
        return self._confirmed >= _CONFIRMED or self._steady >= _CONFIRMED

    def alarm(self, model: CostModel) -> None:
        """Plan with this model from now on: steps of other lengths have just shown that the step cost is higher."""
        self._model = model
        self._confirmed, self._steady, self.doubted = 0, 0, 1

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, row: Floats, seconds: float, prompt: Hashable = None) -> None:
        """Add a clean prefill step of a prompt: its features and its seconds."""
        if seconds > 0:
            self._samples.append(Sample(row, seconds, prompt))

    def drift(self) -> float:
        """Median of measured over predicted seconds in the window; 1 when there is nothing to compare."""
        if not self._samples or self.model is None:
            return 1.0
        rows, seconds = self._arrays()
        return float(np.median(seconds / self.model.predict(rows)))

    def refit(self) -> Fit | None:
        """A better model, which becomes `model`, or None when the present one should stay."""
        if self.model is None:
            return self._first()
        if len(self._samples) < MIN_WITH_PRIOR:
            return None
        rows, seconds = self._arrays()
        groups = _groups(sample.prompt for sample in self._samples)
        shape, settled = _proportions(self.model, rows, seconds, groups)
        last = groups == groups[-1]
        if last.sum() < MIN_WITH_PRIOR:  # prompts of one step or two: a few say nothing of long ones
            if len(rows) < self._least:
                return None
            last = np.arange(len(rows)) >= len(rows) - self._least
        speed = float(np.median(seconds[last] / shape.predict(rows[last])))
        if shape is not self.model:
            self._confirmed, self._steady, self.doubted, self._tried = 0, 0, 1, 0
        elif self.doubted and (settled or self._tried >= _TRIES):
            self._confirmed, self.doubted, self._tried = self._confirmed + 1, 0, 0
        self._tried += self.doubted
        if shape is self.model and abs(speed - 1) <= _GOOD_ENOUGH:
            self._steady += 1
            if self._steady == _STEADY and self._changed:
                self.doubted, self._changed = 1, False
            return None
        self._steady = 0
        if abs(speed - 1) > 2 * _GOOD_ENOUGH:
            self._changed = True
            if self._confirmed < _CONFIRMED:
                self.doubted = 1
        try:
            self._model = shape.with_costs(*(speed * c for c in (shape.c0, shape.c1, shape.c2, shape.c3)))
        except ModelError:  # a speed beyond all numbers: a clock that was set
            return None
        return _as_fit(self._model, rows[last], seconds[last])

    def _first(self) -> Fit | None:
        """The first model: fitted to one half of the window, and judged by the other."""
        if len(self._samples) < self._least:
            return None
        rows, seconds = self._arrays()
        if not rows[:, 3].any():
            return None
        held = np.arange(len(rows)) % 2 == 1
        try:
            for part in (~held, np.full(len(rows), True)):
                found = fit_features(rows[part], seconds[part], floors=self.floors)
                if relative_error(found.model, rows[held], seconds[held]) > _WORST:
                    return None
        except (FitError, ModelError):
            return None
        if found.undetermined:
            return None
        self._model, self.floors = found.model, floors_of(found.model)
        return found

    def _arrays(self) -> tuple[Floats, Floats]:
        return np.array([s.row for s in self._samples]), np.array([s.seconds for s in self._samples])


def _proportions(
    model: CostModel, rows: Floats, seconds: Floats, groups: npt.NDArray[np.int64]
) -> tuple[CostModel, bool]:
    """The model with step cost and attention moved against the linear layers as the steps within prompts say.

    The most likely factors of both: measured over predicted of each step, less what all steps of its prompt have in
    common, is noise of `_NOISE` with far outliers, and factors are held to 1. The model itself where they are not much
    likelier than 1; and then, whether half or twice the step cost is much less likely, so that it is settled.
    """
    parts = rows * np.array([model.c0, model.c1, model.c2, model.c3])
    total = parts.sum(axis=1)
    fixed, reread, attention = parts[:, 0] / total, parts[:, 3] / total, parts[:, 2] / total
    rest = parts[:, 1] / total
    off = np.log(seconds / total)
    short = off < np.log(_TOO_SHORT) + np.median(off)  # its exit was noticed late, together with the next one's
    members = [np.flatnonzero((groups == group) & ~short) for group in np.unique(groups)]
    members = [which for which in members if len(which) > 1]
    if not members:
        return model, False

    def cost(a: Floats, m: Floats, h: Floats) -> Floats:
        step = np.exp(a)[..., None] * (fixed + np.exp(h)[..., None] * reread)
        left = off - np.log(step + np.exp(m)[..., None] * attention + rest)
        held = sum(np.log1p((moved / least) ** 2 / 2) for moved, least in zip((a, m, h), _HELD, strict=True))
        for which in members:
            apart = left[..., which] - np.median(left[..., which], axis=-1, keepdims=True)
            held = held + np.log1p((apart / _NOISE) ** 2 / 2).sum(axis=-1)
        return np.asarray(held)

    now, half, twice = cost(np.array([0.0, -_TWICE, _TWICE]), np.zeros(3), np.zeros(3)).tolist()
    if now < _SURE:  # nothing can be much likelier
        return model, min(half, twice) - now > _SURE
    a, m = np.meshgrid(_STEP_GRID[::2], _ATTENTION_GRID[::4], indexing="ij")
    costs = cost(a, m, np.zeros_like(a))
    best = np.unravel_index(int(np.argmin(costs)), costs.shape)
    found, least = [float(a[best]), float(m[best]), 0.0], float(costs[best])
    for place, grid in ((1, _ATTENTION_GRID), (2, _STEP_GRID), (0, _STEP_GRID), (1, _ATTENTION_GRID), (2, _STEP_GRID)):
        tried = [np.full_like(grid, value) for value in found]
        tried[place] = grid
        costs = cost(tried[0], tried[1], tried[2])
        if (lowest := float(costs.min())) < least:
            found[place], least = float(grid[int(np.argmin(costs))]), lowest
    if now - least < _SURE:
        return model, min(half, twice) - now > _SURE
    more, dearer = np.exp(max(found[0], -_FALL)), np.exp(found[1])
    history = np.exp(max(found[0] + found[2], -_FALL))
    return model.with_costs(model.c0 * more, model.c1, model.c2 * dearer, model.c3 * history), False


def _groups(prompts: object) -> npt.NDArray[np.int64]:
    """A number for each run of steps of the same prompt."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(prompt, len(numbers)) for prompt in prompts])  # type: ignore[attr-defined]


def _as_fit(model: CostModel, rows: Floats, seconds: Floats) -> Fit:
    relative = rows / seconds[:, None]
    norm = np.linalg.norm(relative, axis=0)
    norm[norm == 0] = 1.0
    condition = float(np.linalg.cond(relative / norm))
    return Fit(
        model=model,
        residuals=np.asarray(model.predict(rows) / seconds - 1),
        condition=min(condition, 1e12),
        undetermined=(),
    )


def floors_of(model: CostModel | None) -> tuple[float, float]:
    """The least c0 and c3 that a fit beside this measured model may reach."""
    return (0.0, 0.0) if model is None else (model.c0 / 2, model.c3 / 4)
