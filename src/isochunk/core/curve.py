"""What a step costs against its new tokens, as measured: floors, tiles, graphs."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from isochunk.core.errors import ModelError

__all__ = ["Curve"]

Floats = npt.NDArray[np.float64]

_MOST_KNOTS = 4096
_LARGEST = 1e9  # tokens or seconds; more is a wrong unit
_AFFINE_POINTS = 64


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of a step without attention against its new tokens: a monotone line through measured sizes.

    A jump is two sizes beside each other. Below the first size the curve is flat, beyond the last it goes on with
    the mean slope of its last half.

    Attributes:
        tokens: sizes of steps, ascending, each at least 1.
        seconds: what they take, never less than the one before.

    Raises:
        ModelError: a number is not finite or out of range, or the order is wrong.
    """

    tokens: tuple[float, ...]
    seconds: tuple[float, ...]
    slope: float = field(init=False, repr=False, compare=False)
    _tokens: Floats = field(init=False, repr=False, compare=False)
    _seconds: Floats = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            tokens, seconds = (np.array(values, dtype=np.float64) for values in (self.tokens, self.seconds))
        except (TypeError, ValueError, OverflowError):
            raise ModelError("curve: sizes and seconds must be numbers") from None
        if tokens.ndim != 1 or tokens.shape != seconds.shape or not 2 <= len(tokens) <= _MOST_KNOTS:
            raise ModelError(f"curve must have from 2 to {_MOST_KNOTS} pairs of tokens and seconds")
        if not ((tokens >= 1) & (tokens <= _LARGEST)).all() or (np.diff(tokens) <= 0).any():
            raise ModelError("curve: sizes must ascend, from 1 token on")
        if not ((seconds > 0) & (seconds <= _LARGEST)).all() or (np.diff(seconds) < 0).any():
            raise ModelError("curve: seconds must be above 0 and never fall with the size")
        last = float(tokens[-1])
        half = float(np.interp(last / 2, tokens, seconds))
        slope = (float(seconds[-1]) - half) / (last - max(last / 2, float(tokens[0])))
        for name, value in (
            ("tokens", tuple(tokens.tolist())),
            ("seconds", tuple(seconds.tolist())),
            ("_tokens", tokens),
            ("_seconds", seconds),
            ("slope", slope),
        ):
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, pairs: Iterable[Any]) -> Curve:
        """From pairs of tokens and seconds.

        Raises:
            ModelError: they are no such pairs.
        """
        try:
            tokens, seconds = zip(*pairs, strict=True)
        except (TypeError, ValueError):
            raise ModelError("curve must be a list of pairs of tokens and seconds") from None
        numbers = (int, float, np.floating, np.integer)
        if any(isinstance(value, bool) or not isinstance(value, numbers) for value in (*tokens, *seconds)):
            raise ModelError("curve: sizes and seconds must be numbers")
        return cls(tokens, seconds)

    @property
    def pairs(self) -> list[list[float]]:
        """The inverse of `of`."""
        return [[tokens, seconds] for tokens, seconds in zip(self.tokens, self.seconds, strict=True)]

    def at(self, tokens: float) -> float:
        """Seconds of a step of so many new tokens."""
        right = bisect_left(self.tokens, tokens)
        if right == 0:
            return self.seconds[0]
        if right == len(self.tokens):
            return self.seconds[-1] + self.slope * (tokens - self.tokens[-1])
        x, y = self.tokens, self.seconds
        share = (tokens - x[right - 1]) / (x[right] - x[right - 1])
        return y[right - 1] + share * (y[right] - y[right - 1])

    def array(self, tokens: Floats) -> Floats:
        """`at` of each element."""
        inside = np.interp(tokens, self._tokens, self._seconds)
        return np.asarray(inside + self.slope * np.maximum(tokens - self._tokens[-1], 0.0))

    def moved(self, shift: float, factor: float) -> Curve:
        """The curve of ``shift + factor*seconds``."""
        return Curve(self.tokens, tuple((shift + factor * self._seconds).tolist()))

    def affine(self) -> tuple[float, float]:
        """The line ``c0 + c1*tokens`` nearest to the curve in relative terms, with c0 at most its least step."""
        x = np.linspace(self.tokens[0], self.tokens[-1], _AFFINE_POINTS)
        y = self.array(x)
        rows = np.stack([1 / y, x / y], axis=1)
        c0, c1 = np.linalg.lstsq(rows, np.ones(len(x)), rcond=None)[0].tolist()
        least = self.seconds[0]
        if not 0.05 * least <= c0 <= least:
            c0 = min(max(c0, 0.05 * least), least)
            c1 = float((rows[:, 1] * (1 - rows[:, 0] * c0)).sum() / (rows[:, 1] ** 2).sum())
        return c0, max(c1, 1e-3 * least / self.tokens[-1])

    def cheapest(self, least: float, most: float, extra: float = 0.0) -> float:
        """The size from ``least`` to ``most`` tokens with the fewest seconds a token, ``extra`` a step added.

        On a straight piece the seconds a token only fall or only rise, so it is a measured size or an end.
        """
        low, high = bisect_left(self.tokens, least), bisect_right(self.tokens, most)
        sizes = (*self.tokens[low:high], most)
        return min(sizes, key=lambda size: ((self.at(size) + extra) / size, -size))

    def largest(self, seconds: float) -> float:
        """Tokens (not rounded) of the longest step of at most ``seconds``; 0 when there is none."""
        if seconds < self.seconds[0]:
            return 0.0
        right = bisect_right(self.seconds, seconds)
        if right == len(self.seconds):
            return self.tokens[-1] + (seconds - self.seconds[-1]) / self.slope if self.slope else math.inf
        x, y = self.tokens, self.seconds
        share = (seconds - y[right - 1]) / (y[right] - y[right - 1])
        return x[right - 1] + share * (x[right] - x[right - 1])
