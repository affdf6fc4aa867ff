"""What a prompt will cost a P node: the law in closed form, in microseconds of arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from isochunk.core.cost import COEFFICIENTS, CostModel
from isochunk.core.errors import ModelError

__all__ = ["NodeModel", "Price", "read_status"]

_FOLLOWED = 1 / 32  # of a difference each time that a node is asked; every five seconds, so within some minutes
_CHANGED = 1.5  # a prompt that takes so many times longer or shorter than before: the node is another one now


@dataclass(frozen=True, slots=True)
class Price:
    """Predicted seconds of one prompt.

    Attributes:
        busy_s: how long it occupies each stage; what those behind it wait for.
        ttft_s: from its first step's entry to its last one's exit, alone on the node.
    """

    busy_s: float
    ttft_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeModel:
    """A P node's cost model and the limits of its steps."""

    cost: CostModel
    stages: int = 1
    max_chunk: int = 8192
    block: int = 16

    def __post_init__(self) -> None:
        if min(self.stages, self.max_chunk, self.block) < 1:
            raise ModelError(
                f"stages = {self.stages}, max_num_batched_tokens = {self.max_chunk} and block_size = {self.block} "
                "must be at least 1"
            )

    def price(self, tokens: int, cached: int = 0) -> Price:
        """Price of ``tokens`` of which ``cached`` are in the prefix cache.

        n steps take their work, n step costs and the re-reading of what was before each, and fill the P-1
        other stages with one step; n is the law's ``sqrt((P-1)*W/c0e)`` within what the chunk limits allow.
        Close to `isochunk.core.planner.plan`, which costs a thousand times as much.
        """
        new = max(tokens - cached, 1)
        start = tokens - new
        work = self.cost.work(start, tokens)
        step_cost = self.cost.step_cost(start, tokens)
        ideal = math.sqrt((self.stages - 1) * work / step_cost)
        steps = max(min(round(ideal), math.ceil(new / self.block)), math.ceil(new / self.max_chunk), 1)
        histories = steps * start + new * (steps - 1) / 2
        busy = work + steps * self.cost.c0 + self.cost.c3 * histories
        if self.cost.curve is not None:  # steps end where a token is cheap
            size = self.cost.snap(new / steps, min(new, self.max_chunk))
            busy += self.cost.line(size) * new / size - steps * self.cost.c0 - self.cost.c1 * new
        return Price(busy, busy * (1 + (self.stages - 1) / steps))

    def followed_by(self, newer: NodeModel) -> NodeModel:
        """The model to route by when the node now says ``newer``: a small part of the way there.

        Each node refits its model to its last steps, so of two nodes alike one is predicted a tenth slower than the
        other for half a minute, then the other; that would decide many a choice between them. A node that has become
        another one is believed at once.
        """
        limits = (self.stages, self.max_chunk, self.block) == (newer.stages, newer.max_chunk, newer.block)
        ratio = newer.price(self.max_chunk).busy_s / self.price(self.max_chunk).busy_s
        if not limits or not 1 / _CHANGED < ratio < _CHANGED:
            return newer
        pairs = [(getattr(self.cost, name), getattr(newer.cost, name)) for name in COEFFICIENTS]
        return replace(self, cost=newer.cost.with_costs(*(old + _FOLLOWED * (new - old) for old, new in pairs)))


def read_status(status: Any) -> NodeModel | None:
    """The model in an answer of ``/isochunk/status``; None while the node has none.

    Raises:
        ModelError: the answer is not of that form.
    """
    try:
        model = status["model"]
        if model is None:
            return None
        return NodeModel(
            cost=CostModel.of(model),
            stages=_count(status, "stages", 10_000),
            max_chunk=_count(status, "max_num_batched_tokens", 10**9),
            block=_count(status, "block_size", 10**6),
        )
    except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise ModelError(f"/isochunk/status can't be used: {error!r}") from error


def _count(status: Any, name: str, most: int) -> int:
    value = status[name]
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ModelError(f"/isochunk/status can't be used: {name} = {value!r} must be from 1 to {most}")
    return value
