"""Shapes that the law's straight line does not have, found in measured steps: a curve of sizes, a bend of attention."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from isochunk.core.cost import Bend
from isochunk.core.curve import Curve

__all__ = ["LEAST_SIZES", "bend_places", "rising_curve", "surprise"]

Floats = npt.NDArray[np.float64]

LEAST_SIZES = 8  # different sizes without history that a curve is made of
_PLACES = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2)  # of the longest history, where attention may get dearer


def rising_curve(sizes: Floats, seconds: Floats) -> Curve:
    """The never falling curve nearest, in relative terms, to seconds measured at these sizes.

    Sizes that were measured several times count once, with the middle of their times.
    """
    tokens = np.unique(sizes)
    middle = np.array([np.sort(seconds[sizes == size])[(int((sizes == size).sum()) - 1) // 2] for size in tokens])
    levels: list[list[float]] = []  # of sizes alike: sum of weights times seconds, sum of weights, how many
    for value in np.maximum(middle, 1e-3 * float(middle.max())).tolist():
        levels.append([1 / value, 1 / value**2, 1.0])
        while len(levels) > 1 and levels[-2][0] / levels[-2][1] > levels[-1][0] / levels[-1][1]:
            last = levels.pop()
            levels[-1] = [one + other for one, other in zip(levels[-1], last, strict=True)]
    rising = [total / weight for total, weight, many in levels for _ in range(int(many))]
    return Curve(tuple(tokens.tolist()), tuple(np.maximum.accumulate(rising).tolist()))


def surprise(sizes: Floats, seconds: Floats) -> float:
    """How badly, at the median, each size is foretold by a curve through the others: what a curve would not explain.

    A size that was measured again is foretold by its other times, any other by the line between its neighbours.
    """
    order = np.argsort(sizes, kind="stable")
    x, y = np.log(sizes[order]), seconds[order]
    if len(np.unique(x)) < LEAST_SIZES:
        return np.inf
    missed = []
    for k in range(1, len(x) - 1):
        others = np.delete(np.arange(len(x)), k)
        again = others[x[others] == x[k]]
        foretold = float(np.median(y[again])) if len(again) else float(np.interp(x[k], x[others], y[others]))
        missed.append(abs(foretold / y[k] - 1))
    return float(np.median(missed))


def bend_places(longest: float) -> list[Bend]:
    """Where a bend is looked for, in a set of samples with histories up to ``longest``; the factor means nothing."""
    return [Bend(share * longest, 2.0) for share in _PLACES]
