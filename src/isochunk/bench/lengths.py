"""How long the prompts of a load are."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from statistics import NormalDist
from typing import Protocol

from isochunk.core.errors import ConfigError

__all__ = ["Fixed", "Lengths", "Normal", "Uniform", "parse_lengths"]

_FORMS = "N, uniform:LOW:HIGH or normal:MEAN:DEVIATION:LOW:HIGH, in tokens"
_NEAR_0 = 1e-12


class Lengths(Protocol):
    """A distribution of prompt lengths."""

    @property
    def longest(self) -> int:
        """The most tokens it can draw."""

    def draw(self, random: Random) -> int:
        """Tokens of the next prompt, at least 1."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """All prompts alike."""

    tokens: int

    @property
    def longest(self) -> int:
        """The length."""
        return self.tokens

    def draw(self, random: Random) -> int:
        """The length."""
        return self.tokens


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every whole number from ``low`` to ``high``, both included, as likely as any other."""

    low: int
    high: int

    @property
    def longest(self) -> int:
        """The upper end."""
        return self.high

    def draw(self, random: Random) -> int:
        """A number of tokens."""
        return random.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Normal:
    """A normal distribution, its tails cut off at ``low`` and ``high``."""

    mean: float
    deviation: float
    low: int
    high: int

    @property
    def longest(self) -> int:
        """The upper end."""
        return self.high

    def draw(self, random: Random) -> int:
        """A number of tokens: the inverse of the distribution at a uniform point between the cuts."""
        normal = NormalDist(self.mean, self.deviation)
        point = random.uniform(normal.cdf(self.low - 0.5), normal.cdf(self.high + 0.5))
        tokens = round(normal.inv_cdf(min(max(point, _NEAR_0), 1 - _NEAR_0)))
        return min(max(tokens, self.low), self.high)


def parse_lengths(text: str) -> Lengths:
    """``4096``, ``uniform:1024:8192`` or ``normal:4096:1000:256:8192``.

    Raises:
        ConfigError: another form, or numbers that make no distribution.
    """
    kind, *parts = text.split(":") if ":" in text else ["fixed", text]
    try:
        numbers = [int(part) for part in parts]
    except ValueError:
        raise ConfigError(f"input lengths {text!r} must be {_FORMS}") from None
    low, high = (numbers[-2], numbers[-1]) if len(numbers) > 1 else (numbers[-1:] * 2 or (0, 0))
    if not 1 <= low <= high:
        raise ConfigError(f"input lengths {text!r} must lie between 1 and more tokens, the lower end first")
    match kind, len(numbers):
        case "fixed", 1:
            return Fixed(low)
        case "uniform", 2:
            return Uniform(low, high)
        case "normal", 4:
            mean, deviation = numbers[:2]
            if deviation < 1 or not low <= mean <= high:
                raise ConfigError(
                    f"input lengths {text!r}: the mean must lie from {low} to {high}, the deviation above 0"
                )
            return Normal(mean, deviation, low, high)
    raise ConfigError(f"input lengths {text!r} must be {_FORMS}")
