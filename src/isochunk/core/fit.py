"""From measured steps to a cost model: robust, non-negative, by relative error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from isochunk.core.cost import COEFFICIENTS, Bend, CostModel
from isochunk.core.errors import FitError
from isochunk.core.shapes import LEAST_SIZES, bend_places, rising_curve, surprise

__all__ = ["Fit", "fit", "fit_features", "relative_error"]

Floats = npt.NDArray[np.float64]

MIN_SAMPLES = 5
MIN_WITH_PRIOR = 3
_ITERATIONS = 12
_NOISE_FLOOR = 0.02  # relative; finer residuals than this are not called outliers
_UNDETERMINED = 1e-3  # a column whose part of its own, not explained by the others, is smaller than this
# How much a prior row counts beside a sample. Planned steps are all about as long and hardly tell the cost of a step
# (c0, c3) from that of its tokens, so those two are held more firmly.
_PRIOR_WEIGHTS = np.array([1.0, 0.15, 0.15, 1.0])
_BOUND_SHARE = 0.5  # part of the step cost measured on small chunks that the fit may not go below
_EXPLAINED = 0.01  # relative error below which the straight line is not doubted
_BETTER = 0.6  # a shape must have at most this much of the line's error
_HELD = 20.0  # how much a measured curve counts beside a sample
_LEAST_LEFT = 0.05  # part of a step that is not attention at least
_SMALL, _SMALL_SHARE = 64, 0.25  # part of the time of a step of so many tokens that counts as step cost at least


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A cost model and how well the samples carry it.

    Attributes:
        model: the fitted coefficients.
        residuals: ``predicted/measured - 1`` of each sample, shape (samples,).
        condition: condition number of the scaled design matrix; above about 1e4 the coefficients trade
            against each other.
        undetermined: names of coefficients that the samples can't tell from the others.
    """

    model: CostModel
    residuals: Floats
    condition: float
    undetermined: tuple[str, ...]

    @property
    def error(self) -> float:
        """Median of the absolute relative residuals."""
        return float(np.median(np.abs(self.residuals)))

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        absolute = np.abs(self.residuals)
        return {
            "coefficients": self.model.as_dict(),
            "samples": len(self.residuals),
            "residual_median": float(np.median(absolute)),
            "residual_p90": float(np.quantile(absolute, 0.9)),
            "residual_max": float(absolute.max()),
            "condition": self.condition,
            "undetermined": list(self.undetermined),
        }


def fit(chunk: npt.ArrayLike, history: npt.ArrayLike, seconds: npt.ArrayLike, *, noise: float | None = None) -> Fit:
    """Fit a cost model to steps that each held one chunk.

    Non-negative least squares on the relative error, with outliers down-weighted (iteratively reweighted,
    Cauchy weights). c0 and c3 are bounded from below by half of what the small chunks cost, because an
    under-estimated step cost makes plans of ruinously small chunks.

    Args:
        chunk: new tokens of each step, shape (samples,).
        history: tokens in the KV cache before them, shape (samples,).
        seconds: measured seconds of each step on one stage, shape (samples,).
        noise: how far, in parts, the same step's seconds are apart at the median; None when that is not known.

    The law's straight line stays unless steps of several sizes without history show a curve: the line misses them by
    far more than the noise, or than a curve through the other sizes misses each. So with a bend of the attention.

    Raises:
        FitError: too few samples, none with a history, or a value that is not finite or out of range.
    """
    c, h, t = (np.asarray(column, dtype=np.float64).reshape(-1) for column in (chunk, history, seconds))
    _check(c, h, t)
    if not (h > 0).any():
        raise FitError(
            "no sample has history > 0: c2 and c3 can't be learnt from first chunks alone; add steps "
            "measured late in a long prompt"
        )
    rows = np.stack([np.ones_like(c), c, c * (h + c / 2), h], axis=1)
    floors = _floors(c, h, t)
    best = straight = fit_features(rows, t, floors=floors)
    if straight.undetermined:
        return straight
    first = h == 0
    curved = len(np.unique(c[first])) >= LEAST_SIZES
    if curved:
        off = _off(straight, first)
        unexplained = 2 * noise if noise is not None else surprise(c[first], t[first]) / _BETTER
        curved = off > max(_EXPLAINED / 2, unexplained)
    if curved:
        best = _shaped(c, h, t, straight.model, floors, curved, None)
    bent = [_shaped(c, h, t, straight.model, floors, curved, place) for place in bend_places(float(h.max()))]
    least = min(bent, key=lambda found: _off(found, ~first))
    now = _off(best, ~first)
    return least if now > _EXPLAINED and _off(least, ~first) < _BETTER * now else best


def _off(found: Fit, samples: npt.NDArray[np.bool_]) -> float:
    """How far off some samples are; the far tail, which noise alone makes, does not count."""
    return float(np.quantile(np.abs(found.residuals[samples]), 0.75))


def _shaped(
    c: Floats, h: Floats, t: Floats, near: CostModel, floors: tuple[float, float], curved: bool, bend: Bend | None
) -> Fit:
    """Fit with a curve through the steps without history, or with a bend at a place, or both.

    Those steps are explained by their curve whatever attention takes of them: it is fitted to how much more the same
    chunks take with a history, and the curve holds what it leaves.
    """
    first = h == 0
    pairs = c * (h + c / 2)
    beyond = np.zeros_like(c) if bend is None else bend.pairs(h, h + c)
    line, lower = [np.ones_like(c), c], [floors[0], 0.0]
    more, dearer_more = pairs, beyond
    if curved:
        whole = rising_curve(c[first], t[first])
        sizes = np.array(whole.tokens)
        line, lower = [whole.array(c)], [0.0]
        more = pairs - np.interp(c, sizes, sizes**2 / 2)
        if bend is not None:
            dearer_more = beyond - np.interp(c, sizes, bend.pairs(np.zeros_like(sizes), sizes))
    relative = np.stack([*line, more, h, dearer_more], axis=1) / t[:, None]
    scale = np.linalg.norm(relative, axis=0)
    scale[scale == 0] = 1.0
    extra, target = np.zeros((0, relative.shape[1])), np.zeros(0)
    if curved:  # the curve was measured: what is off is attention and history
        extra, target = np.array([[_HELD / scale[0], 0.0, 0.0, 0.0]]), np.array([_HELD])
    solved = _robust_nnls(relative / scale, t, np.array([*lower, 0.0, floors[1], 0.0]) * scale, extra, target) / scale
    c2, c3, dearer = solved[-3:].tolist()
    bent = Bend(bend.tokens, 1 + dearer / c2) if bend is not None and c2 > 0 and dearer > 0 else None
    if curved:
        left = t[first] - c2 * pairs[first] - dearer * beyond[first]
        curve = rising_curve(c[first], np.maximum(left, _LEAST_LEFT * t[first]))
        model = CostModel.measured(curve, c2, c3, bent)
    else:
        model = CostModel(
            max(float(solved[0]), 1e-3 * float(t.min())), max(float(solved[1]), near.c1 / 1000), c2, c3, bend=bent
        )
    return Fit(
        model=model,
        residuals=np.asarray(model.seconds(c, h) / t - 1),
        condition=float(np.linalg.cond(relative / scale)),
        undetermined=(),
    )


def fit_features(
    rows: Floats, seconds: Floats, *, prior: CostModel | None = None, floors: tuple[float, float] = (0.0, 0.0)
) -> Fit:
    """Fit c0..c3 to steps given by their features (`isochunk.core.cost.features`).

    Args:
        rows: shape (samples, 4).
        seconds: shape (samples,).
        prior: a model that fills in what the samples don't determine.
        floors: lower bounds of c0 and c3.

    Raises:
        FitError: the samples give no usable model.
    """
    least = MIN_SAMPLES if prior is None else MIN_WITH_PRIOR
    if len(rows) < least:
        raise FitError(f"{len(rows)} samples are too few: give at least {least} different steps")
    relative = rows / seconds[:, None]
    scale = np.linalg.norm(relative, axis=0)
    scale[scale == 0] = 1.0
    design = relative / scale
    lower = np.array([max(floors[0], 0.0), 0.0, 0.0, max(floors[1], 0.0)])
    extra_rows, extra_target = _prior_rows(prior, rows, seconds, scale)
    solution = _robust_nnls(design, seconds, lower * scale, extra_rows, extra_target)
    coefficients = solution / scale
    smallest = 1e-3 * float(seconds.min())
    if coefficients[0] <= 0:
        coefficients[0] = smallest  # over-estimating the step cost is cheap, zero is ruinous
    if coefficients[1] <= 0:
        coefficients[1] = smallest / float(rows[:, 1].max())
    model = CostModel(*coefficients.tolist()) if prior is None else prior.with_costs(*coefficients.tolist())
    return Fit(
        model=model,
        residuals=relative @ coefficients - 1,
        condition=float(np.linalg.cond(design)),
        undetermined=_undetermined(design),
    )


def relative_error(model: CostModel, rows: Floats, seconds: Floats) -> float:
    """Median absolute relative error of a model on steps given by their features."""
    return float(np.median(np.abs(model.predict(rows) / seconds - 1)))


def _check(chunk: Floats, history: Floats, seconds: Floats) -> None:
    if not len(chunk) == len(history) == len(seconds):
        raise FitError(
            f"columns of different lengths: {len(chunk)} chunks, {len(history)} histories, {len(seconds)} seconds"
        )
    if len(chunk) < MIN_SAMPLES:
        raise FitError(f"{len(chunk)} samples are too few: give at least {MIN_SAMPLES} different steps")
    for name, column, lowest, strict in (
        ("chunk", chunk, 1, False),
        ("history", history, 0, False),
        ("seconds", seconds, 0, True),
    ):
        bad = ~np.isfinite(column) | (column <= lowest if strict else column < lowest)
        if bad.any():
            at = int(np.argmax(bad))
            sign = "above" if strict else "at least"
            raise FitError(f"sample {at + 1}: {name} = {column[at]} must be finite and {sign} {lowest}")


def _floors(chunk: Floats, history: Floats, seconds: Floats) -> tuple[float, float]:
    """Lower bounds of c0 and c3 from small chunks."""
    found = _intercepts(chunk, history, seconds)
    longest = float(history.max())
    # The least of each, so that a cold or disturbed step counts for nothing.
    early = min((pair for pair in found if pair[1] <= 0.1 * longest), default=None)
    late = min((pair for pair in found if pair[1] >= 0.5 * longest), default=None)
    # A step of a few tokens is mostly step cost; where it is not, a quarter of it is a few tokens' work.
    smallest = float(chunk.min())
    first = seconds[(chunk == smallest) & (history <= 0.1 * longest)]
    least = _SMALL_SHARE * float(first.min()) * min(_SMALL / smallest, 1) if len(first) else 0.0
    if early is None:
        return least, 0.0
    c0 = max(early[0], 0.0)
    c3 = max((late[0] - c0) / (late[1] - early[1]), 0.0) if late is not None else 0.0
    return max(_BOUND_SHARE * c0, least), _BOUND_SHARE * c3


def _intercepts(chunk: Floats, history: Floats, seconds: Floats) -> list[tuple[float, float]]:
    """(seconds at chunk 0, history) at or below the true ``c0 + c3*H``, one for each smallest chunk measured.

    A step's time is convex in the chunk and grows with history, so the line through a smallest chunk and
    a larger one measured at the same history, or later, meets chunk 0 at or below the truth.
    """
    smallest = chunk.min()
    larger = (chunk >= 1.5 * smallest) & (chunk <= 16 * smallest)
    found = []
    for i in np.flatnonzero(chunk == smallest):
        later = np.flatnonzero(larger & (history >= history[i]))
        if len(later):
            j = later[np.argmin(history[later])]
            slope = (seconds[j] - seconds[i]) / (chunk[j] - smallest)
            found.append((float(seconds[i] - slope * smallest), float(history[i])))
    return found


def _prior_rows(prior: CostModel | None, rows: Floats, seconds: Floats, scale: Floats) -> tuple[Floats, Floats]:
    """One weak row a coefficient that pulls it to the prior where the samples don't say otherwise."""
    if prior is None:
        return np.zeros((0, 4)), np.zeros(0)
    values = np.array([prior.c0, prior.c1, prior.c2, prior.c3])
    # How far a coefficient may move for one unit of penalty: its own size, or what would add a tenth to
    # a typical step, so that a prior that is far too small can be left.
    typical = float(np.median(seconds))
    reach = np.maximum(values, 0.1 * typical / np.maximum(rows.mean(axis=0), 1e-12))
    weight = _PRIOR_WEIGHTS / reach
    return np.diag(weight / scale), weight * values


def _robust_nnls(design: Floats, seconds: Floats, lower: Floats, extra: Floats, extra_target: Floats) -> Floats:
    """Solve ``design @ x = 1`` for x >= lower with outliers down-weighted; ``extra`` rows keep weight 1.

    Reweighting ends where it starts out from when an outlier has leverage, and in relative terms a step that
    looks far too short has it; so it is started with equal weights and with weights that favour long steps.
    """
    starts = (np.ones(len(design)), seconds / seconds.max())
    found = [_reweighted(design, weights, lower, extra, extra_target) for weights in starts]
    return min(found, key=lambda x: float(np.log1p((_distance(design @ x) / (2 * _NOISE_FLOOR)) ** 2).sum()))


def _reweighted(design: Floats, weights: Floats, lower: Floats, extra: Floats, extra_target: Floats) -> Floats:
    from scipy.optimize import nnls

    solution = lower
    matrix = np.concatenate((design, extra))
    for iteration in range(_ITERATIONS):
        root = np.concatenate((np.sqrt(weights), np.ones(len(extra))))[:, None]
        target = np.concatenate((np.ones(len(design)), extra_target)) - matrix @ lower
        solution = lower + nnls(matrix * root, target * root[:, 0])[0]
        predicted = design @ solution
        residual = _distance(predicted)
        if iteration < _ITERATIONS // 2:  # least absolute deviation first: a start that outliers can't move
            weights = 1 / np.maximum(residual, _NOISE_FLOOR)
            weights /= weights.max()
        else:
            width = max(2 * float(np.median(residual)), _NOISE_FLOOR)
            weights = 1 / (1 + (residual / width) ** 2)
        weights = weights / np.maximum(predicted, 1.0) ** 2
    return solution


def _distance(predicted: Floats) -> Floats:
    """How far steps are off, of the larger of measured (1) and predicted seconds."""
    off: Floats = np.abs(predicted - 1) / np.maximum(predicted, 1.0)
    return off


def _undetermined(design: Floats) -> tuple[str, ...]:
    names = []
    for k, name in enumerate(COEFFICIENTS):
        others = np.delete(design, k, axis=1)
        column = design[:, k]
        part = column - others @ np.linalg.lstsq(others, column, rcond=None)[0]
        if float(np.linalg.norm(part)) <= _UNDETERMINED * float(np.linalg.norm(column)):
            names.append(name)
    return tuple(names)
