"""The machine that is simulated."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from isochunk.core.cost import CostModel
from isochunk.core.errors import PlanError

__all__ = ["ROUTERS", "Deployment"]

ROUTERS = ("least_work", "round_robin")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One or several equal prefill instances behind a router.

    Attributes:
        models: cost of a step on each pipeline stage of an instance, in order.
        max_tokens: token budget of a step (``max_num_batched_tokens``).
        block: KV block size; chunks end on its multiples.
        in_flight: K, steps in the pipeline at once; None for one a stage, which is vLLM's own.
        send_s: seconds from a stage to the next, added to a step's way and not to a stage's work.
        return_s: seconds from the last stage until the scheduler has the result.
        instances: equal instances, each with its own queue (data parallel).
        router: ``least_work`` sends a request to the instance with the fewest seconds of queued work,
            ``round_robin`` to each in turn.
        cards: accelerators of one instance, for tokens a second a card; None for one a stage.
        cache_blocks: blocks that an instance's prefix cache holds (traces only); None for no limit.

    Raises:
        PlanError: names the value that is out of range.
    """

    models: tuple[CostModel, ...]
    max_tokens: int = 32768
    block: int = 16
    in_flight: int | None = None
    send_s: float = 0.0
    return_s: float = 0.0
    instances: int = 1
    router: str = "least_work"
    cards: int | None = None
    cache_blocks: int | None = None

    def __post_init__(self) -> None:
        if not self.models:
            raise PlanError("stages = 0 must be at least 1: give the pipeline-parallel size")
        for name in ("max_tokens", "block", "instances", "cards", "cache_blocks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlanError(f"{name} = {value} must be at least 1")
        if self.in_flight is not None and self.in_flight < len(self.models):
            raise PlanError(
                f"in-flight steps K = {self.in_flight} must be at least the {len(self.models)} stages: "
                "fewer leave a stage idle for ever"
            )
        for name in ("send_s", "return_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise PlanError(f"{name} = {value} must be a finite number of seconds, at least 0")
        if self.router not in ROUTERS:
            raise PlanError(f"router = {self.router!r} must be one of {', '.join(ROUTERS)}")

    @property
    def stages(self) -> int:
        """Pipeline stages P."""
        return len(self.models)

    @property
    def slots(self) -> int:
        """K, steps in the pipeline at once."""
        return self.in_flight or self.stages

    @property
    def total_cards(self) -> int:
        """Accelerators of all instances."""
        return self.instances * (self.cards or self.stages)

    @property
    def slowest(self) -> CostModel:
        """The stage that sets the pace of a long prompt."""
        return max(self.models, key=lambda m: m.seconds(self.max_tokens, self.max_tokens))

    def but(self, **changes: Any) -> Deployment:
        """The same machine with some attributes changed."""
        return replace(self, **changes)
