"""What a prefill step costs. The formula is written here once; everything else calls it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from isochunk.core.curve import Curve
from isochunk.core.errors import ModelError

__all__ = ["COEFFICIENTS", "Bend", "CostModel", "features"]

Floats = npt.NDArray[np.float64]

_LARGEST = 1e6  # seconds; more is a wrong unit, and would overflow in long prompts
_SNAPPED = 0.75  # part of a size that is the least one taken in its place

COEFFICIENTS = ("c0", "c1", "c2", "c3")


@dataclass(frozen=True, slots=True)
class Bend:
    """From some place in a prompt on attention costs ``factor`` times as much a further token.

    Attributes:
        tokens: the place, in tokens from the start of the prompt.
        factor: above 0; 1 is no bend.

    Raises:
        ModelError: a number is not finite or out of range.
    """

    tokens: float
    factor: float

    def __post_init__(self) -> None:
        for name in ("tokens", "factor"):
            object.__setattr__(self, name, _number(f"bend: {name}", getattr(self, name), 1e9))
        if self.factor == 0:
            raise ModelError("bend: factor = 0 must be above 0")

    @classmethod
    def of(cls, pair: Any) -> Bend:
        """From a pair of tokens and factor.

        Raises:
            ModelError: it is no such pair.
        """
        try:
            tokens, factor = pair
        except (TypeError, ValueError):
            raise ModelError("bend must be a pair: tokens and a factor") from None
        return cls(tokens, factor)

    def pairs(self, start: Any, end: Any) -> Any:
        """Token pairs to count more than once: those of tokens ``start`` to ``end`` with what is beyond the bend.

        Numbers give a number, arrays that broadcast an array.
        """
        larger = max if isinstance(start, (int, float)) and isinstance(end, (int, float)) else np.maximum
        before, behind = larger(start - self.tokens, 0.0), larger(end - self.tokens, 0.0)
        return (self.factor - 1) * (behind * behind - before * before) / 2


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of one step on one pipeline stage, with N new tokens in all and the requests r in the batch:

        t = f(N) + sum_r [ c2*C*(H + C/2) + c3*H ],        f(N) = c0 + c1*N, or the measured curve

    with C new tokens of a request (its chunk) after H tokens already in its KV cache (its history).

    With a curve, c0 and c1 are the straight line nearest to it: what an average step and token cost. `work`,
    `step_cost`, `marginal` and `marginal_chunk` are of that line; `seconds`, `step` and `chunk` of the curve.

    Attributes:
        c0: fixed seconds of a step: launch, scheduler, point-to-point transfer. Above 0.
        c1: seconds a new token in the linear layers. Above 0.
        c2: seconds a (new token, attended token) pair in the attention. At least 0.
        c3: seconds a history token for re-reading it once a step. At least 0.
        curve: f as measured, nowhere below c0; None for the straight line.
        bend: where attention gets dearer in a long prompt; None for nowhere.

    Raises:
        ModelError: a coefficient is not a finite number in its range. A step cost of zero is refused
            because the law would answer it with endless tiny chunks.
    """

    c0: float
    c1: float
    c2: float
    c3: float = 0.0
    curve: Curve | None = field(default=None, kw_only=True)
    bend: Bend | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in COEFFICIENTS:
            object.__setattr__(self, name, _number(name, getattr(self, name), _LARGEST))
        for name in ("c0", "c1"):
            if getattr(self, name) == 0:
                raise ModelError(
                    f"{name} = 0 must be above 0: a real step has a fixed cost and a cost a token; "
                    "measure small chunks too, or calibrate again"
                )
        for name, kind in (("curve", Curve), ("bend", Bend)):
            value: Any = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                object.__setattr__(self, name, kind.of(value))  # as `as_dict` gives it
        if self.curve is not None and self.curve.seconds[0] < self.c0 * (1 - 1e-9):
            raise ModelError(f"c0 = {self.c0} is more than the curve's least step, {self.curve.seconds[0]}")

    @classmethod
    def measured(cls, curve: Curve, c2: float, c3: float = 0.0, bend: Bend | None = None) -> CostModel:
        """A model with this curve; c0 and c1 are the straight line nearest to it."""
        c0, c1 = curve.affine()
        return cls(c0, c1, c2, c3, curve=curve, bend=bend)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> CostModel:
        """The inverse of `as_dict`; other keys are ignored, c3, curve and bend may be missing.

        Raises:
            ModelError: a coefficient is missing or wrong.
        """
        missing = [name for name in COEFFICIENTS[:3] if name not in data]
        if missing:
            raise ModelError(f"coefficient {missing[0]} is missing")
        values = [data.get(name, 0.0) for name in COEFFICIENTS]
        return cls(*values, curve=data.get("curve"), bend=data.get("bend"))

    @overload
    def seconds(self, chunk: float, history: float = 0) -> float: ...
    @overload
    def seconds(self, chunk: Floats, history: Floats | float = 0) -> Floats: ...
    def seconds(self, chunk: float | Floats, history: float | Floats = 0) -> float | Floats:
        """Seconds of a step that holds one chunk after ``history`` tokens (numbers, or arrays that broadcast)."""
        if self.curve is None and self.bend is None:
            return self.c0 + chunk * (self.c1 + self.c2 * (history + chunk / 2)) + self.c3 * history
        return self.line(chunk) + self._attention(chunk, history) + self.c3 * history

    @overload
    def line(self, tokens: float) -> float: ...
    @overload
    def line(self, tokens: Floats) -> Floats: ...
    def line(self, tokens: float | Floats) -> float | Floats:
        """f: seconds of a step of so many new tokens in all, without their attention."""
        if self.curve is None:
            return self.c0 + self.c1 * tokens
        return self.curve.array(tokens) if isinstance(tokens, np.ndarray) else self.curve.at(tokens)

    def _attention(self, chunk: float | Floats, history: float | Floats) -> float | Floats:
        pairs = chunk * (history + chunk / 2)
        if self.bend is not None:
            pairs = pairs + self.bend.pairs(history, history + chunk)
        return self.c2 * pairs

    def step(self, chunks: npt.ArrayLike, histories: npt.ArrayLike) -> float:
        """Seconds of a step with several requests: one chunk and one history of each, shape (requests,)."""
        _, tokens, pairs, read = _sums(chunks, histories, self)
        return self.c0 + self.c1 * tokens + self.c2 * pairs + self.c3 * read

    @overload
    def marginal(self, chunk: float, history: float = 0) -> float: ...
    @overload
    def marginal(self, chunk: Floats, history: Floats | float = 0) -> Floats: ...
    def marginal(self, chunk: float | Floats, history: float | Floats = 0) -> float | Floats:
        """Seconds that a chunk adds to a step which runs anyway, by the straight line."""
        return self.c1 * chunk + self._attention(chunk, history) + self.c3 * history

    def chunk(self, seconds: float, history: float = 0) -> float:
        """The inverse of ``seconds``: most tokens (not rounded) whose step takes ``seconds``; 0 when none fit."""
        if self.curve is None:
            return self.marginal_chunk(seconds - self.c0, history)
        high = self.curve.largest(seconds - self.c3 * history)
        if self.c2 == 0 or high == 0:
            return high
        high = min(high, self._attended(seconds, history, 0.0))
        low = 0.0
        while high - low > 1e-9 * high:  # the longest within, where the curve jumps
            middle = (low + high) / 2
            low, high = (middle, high) if self.seconds(middle, history) <= seconds else (low, middle)
        return low if self.seconds(low, history) <= seconds else 0.0

    def marginal_chunk(self, seconds: float, history: float = 0) -> float:
        """The inverse of ``marginal``: tokens that add ``seconds`` to a step; 0 when none fit."""
        spare = seconds - self.c3 * history
        return self._attended(spare, history, self.c1) if spare > 0 else 0.0

    def _attended(self, seconds: float, history: float, slope: float) -> float:
        """Tokens after ``history`` that take ``seconds``, each ``slope`` beside its attention."""
        if self.bend is None:
            return _root(seconds, slope + self.c2 * history, self.c2)
        flat = 0.0
        if history < self.bend.tokens:
            flat = self.bend.tokens - history
            until = flat * (slope + self.c2 * (history + flat / 2))
            if seconds <= until:
                return _root(seconds, slope + self.c2 * history, self.c2)
            seconds -= until
        at, dear = history + flat, self.c2 * self.bend.factor
        return flat + _root(seconds, slope + self.c2 * at + (dear - self.c2) * (at - self.bend.tokens), dear)

    def work(self, start: float, end: float) -> float:
        """Seconds of computing tokens ``start`` to ``end`` of a prompt; does not depend on the cut."""
        work = (end - start) * (self.c1 + self.c2 * (end + start) / 2)
        return work if self.bend is None else work + self.c2 * self.bend.pairs(start, end)

    def ends_of_work(self, start: float, seconds: Floats) -> Floats:
        """The inverse of ``work``: the tokens up to which so many seconds from ``start`` on bring a prompt."""
        return np.array([start + self._attended(work, start, self.c1) for work in seconds.tolist()])

    def step_cost(self, start: float, end: float) -> float:
        """Effective fixed seconds of a step, ``c0 + c3*hbar``: hbar is the work-weighted mean history."""
        if self.c3 == 0 or end <= start:
            return self.c0 + self.c3 * start
        moment = self.c1 * (end**2 - start**2) / 2 + self.c2 * (end**3 - start**3) / 3
        if self.bend is not None and end > self.bend.tokens:
            low = max(start, self.bend.tokens)
            cubes, squares = (end**3 - low**3) / 3, (end**2 - low**2) / 2
            moment += self.c2 * (self.bend.factor - 1) * (cubes - self.bend.tokens * squares)
        return self.c0 + self.c3 * moment / self.work(start, end)

    def snap(self, tokens: float, most: float | None = None, history: float = 0) -> float:
        """The size of a step near ``tokens`` (three quarters of it up to ``most``) at which a token is cheapest.

        Without a curve ``tokens`` itself. ``most`` is ``tokens`` when left out.
        """
        if self.curve is None or tokens <= 1:
            return tokens
        return self.curve.cheapest(_SNAPPED * tokens, max(tokens, most or tokens), self.c3 * history)

    def scaled(self, factor: float, *, step: float | None = None) -> CostModel:
        """The model of a machine that takes ``factor`` times as long; c0 by ``step`` when given."""
        c0 = self.c0 * (factor if step is None else step)
        return self.with_costs(c0=c0, c1=self.c1 * factor, c2=self.c2 * factor, c3=self.c3 * factor)

    def with_costs(
        self, c0: float | None = None, c1: float | None = None, c2: float | None = None, c3: float | None = None
    ) -> CostModel:
        """This model with other coefficients; the curve keeps its shape about its line, the bend stays."""
        values = [old if new is None else new for old, new in zip(self._costs(), (c0, c1, c2, c3), strict=True)]
        curve = self.curve
        if curve is not None:
            CostModel(*values)  # names what is wrong with them before the curve is moved by them
            factor = values[1] / self.c1
            curve = curve.moved(values[0] - factor * self.c0, factor)
        return CostModel(*values, curve=curve, bend=self.bend)

    def _costs(self) -> tuple[float, float, float, float]:
        return self.c0, self.c1, self.c2, self.c3

    def predict(self, rows: Floats) -> Floats:
        """Seconds of steps given by their `features` for this model, shape (steps, 4); returns shape (steps,)."""
        seconds: Floats = rows @ np.array(self._costs())
        return seconds

    def as_dict(self) -> dict[str, Any]:
        """``{"c0": .., "c1": .., "c2": .., "c3": ..}`` in seconds; a curve as pairs of tokens and seconds, a bend
        as tokens and factor, where there are any."""
        data: dict[str, Any] = dict(zip(COEFFICIENTS, self._costs(), strict=True))
        if self.curve is not None:
            data["curve"] = self.curve.pairs
        if self.bend is not None:
            data["bend"] = [self.bend.tokens, self.bend.factor]
        return data


def features(chunks: npt.ArrayLike, histories: npt.ArrayLike, model: CostModel | None = None) -> Floats:
    """Rows ``[1, sum C, sum C*(H + C/2), sum H]`` of one step: what c0..c3 multiply.

    For a model with a curve the second is as many tokens as take the curve's time on its line, and for one with a
    bend the third counts what lies beyond it as often as it costs; so all models of one curve and bend, whatever
    their coefficients, take the same rows. ``chunks`` and ``histories`` hold one entry a request, shape
    (requests,). Returns shape (4,).
    """
    return np.array(_sums(chunks, histories, model))


def _sums(
    chunks: npt.ArrayLike, histories: npt.ArrayLike, model: CostModel | None
) -> tuple[float, float, float, float]:
    """`features` in plain numbers: a step has few requests, for which arrays are slow."""
    tokens = pairs = read = 0.0
    bend = None if model is None else model.bend
    for chunk, history in zip(_numbers(chunks), _numbers(histories), strict=True):
        tokens += chunk
        pairs += chunk * (history + chunk / 2)
        read += history
        if bend is not None:
            pairs += bend.pairs(history, history + chunk)
    if model is not None and model.curve is not None:
        tokens = (model.curve.at(tokens) - model.c0) / model.c1
    return 1.0, tokens, pairs, read


def _numbers(values: npt.ArrayLike) -> Sequence[float]:
    """As they are where they are a list: to make an array of few takes longer than to add them up."""
    return values if isinstance(values, (list, tuple)) else np.asarray(values, dtype=np.float64).tolist()


def _root(seconds: float, slope: float, curvature: float) -> float:
    """x of ``curvature/2*x^2 + slope*x = seconds``, in the form that stays exact as the curvature goes to 0."""
    divisor = slope + math.sqrt(slope * slope + 2 * curvature * max(seconds, 0.0))
    return 2 * seconds / divisor if divisor else math.inf


def _number(name: str, value: Any, largest: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.floating, np.integer)):
        raise ModelError(f"{name} = {value!r} is not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not 0 <= number <= largest:  # false for NaN too
        raise ModelError(f"{name} = {number} must be a finite number from 0 to {largest:.0f}")
    return number
