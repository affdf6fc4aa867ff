"""When the way through P is not worth it, and how long answers are: what the proxy learns of D."""

from __future__ import annotations

import math
from collections import deque

from isochunk.core.errors import ConfigError
from isochunk.proxy.nodes import Pool

__all__ = ["Detour", "OutputEstimate", "read_skip"]

_SEEN = 64


def read_skip(text: str) -> int | str | None:
    """``off``, ``auto``, or tokens.

    Raises:
        ConfigError: it is something else.
    """
    if text in ("off", "auto"):
        return None if text == "off" else text
    if text.isdigit():
        return int(text)
    raise ConfigError(f"--skip-prefill {text} must be off, auto or a number of tokens")


class Detour:
    """How many tokens D may compute itself, while others wait for its steps.

    On P a short prompt costs a step of each stage and the hand-over of its KV before any of its tokens is computed; D
    computes that many tokens in the same time, beside the step that it makes anyway:
    ``(stages * c0 + handover) / (stages * c1)``, of the P node where it is most.

    Args:
        skip: None for never, ``auto`` for that number, or a fixed one.
    """

    def __init__(self, skip: int | str | None) -> None:
        self._skip = skip
        self._handovers: deque[float] = deque(maxlen=_SEEN)

    @property
    def wanted(self) -> bool:
        """P may be left out at all."""
        return self._skip is not None

    def handed_over(self, seconds: float) -> None:
        """D had its first token so long after it was asked."""
        self._handovers.append(seconds)

    def threshold(self, prefill: Pool) -> int:
        """Tokens to compute up to which P is left out; 0 while no P node tells its model."""
        if isinstance(self._skip, int):
            return self._skip
        handover = min(self._handovers, default=0.0)  # the least is without D's own queue
        models = [node.model for node in prefill if node.model is not None and node.alive]
        each = [(m.stages * m.cost.c0 + handover) / (m.stages * m.cost.c1) for m in models]
        return math.floor(max(each, default=0.0))


class OutputEstimate:
    """Tokens of an answer, learnt from those that were whole."""

    _START = math.log(256.0)
    _STEP, _FARTHEST = 0.05, 1.0

    def __init__(self) -> None:
        self._mean = self._START

    def tokens(self, wanted: int | None) -> int:
        """What a request that wants so many at most will probably get."""
        likely = round(math.exp(self._mean))
        return likely if wanted is None else min(likely, max(wanted, 0))

    def learn(self, tokens: int) -> None:
        """An answer had so many."""
        if tokens > 0:
            off = math.log(tokens) - self._mean
            self._mean += self._STEP * min(max(off, -self._FARTHEST), self._FARTHEST)
