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
        intake_s: seconds of a request in the API server, before the engine has it; one after the other.
        intake_token_s: the same for each of its tokens (parsing, hashing).
        cards: accelerators of one instance, for tokens a second a card; None for one a stage.
        max_seqs: requests that run at once in an instance (``max_num_seqs``; vLLM's own is 1024 on large GPUs).
        kv_tokens: tokens that an instance's KV cache holds, as vLLM tells when it starts; None for no limit.
        load_rate: tokens a second at which cached tokens come from elsewhere, one prompt after the other (a KV
            connector that loads beside the steps); None when they are in the KV cache.

    Raises:
        PlanError: names the value that is out of range.
    """

    models: tuple[CostModel, ...]
    max_tokens: int = 32768
    block: int = 16
    in_flight: int | None = None
    send_s: float = 0.0
    return_s: float = 0.0
    intake_s: float = 0.0
    intake_token_s: float = 0.0
    instances: int = 1
    router: str = "least_work"
    cards: int | None = None
    max_seqs: int = 1024
    kv_tokens: int | None = None
    load_rate: float | None = None

    def __post_init__(self) -> None:
        if not self.models:
            raise PlanError("stages = 0 must be at least 1: give the pipeline-parallel size")
        for name in ("max_tokens", "block", "instances", "cards", "max_seqs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlanError(f"{name} = {value} must be at least 1")
        if self.in_flight is not None and self.in_flight < len(self.models):
            raise PlanError(
                f"in-flight steps K = {self.in_flight} must be at least the {len(self.models)} stages: "
                "fewer leave a stage idle for ever"
            )
        for name in ("send_s", "return_s", "intake_s", "intake_token_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise PlanError(f"{name} = {value} must be a finite number of seconds, at least 0")
        if self.kv_tokens is not None and self.kv_tokens < 2 * self.block:
            raise PlanError(f"kv_tokens = {self.kv_tokens} must be at least two blocks of {self.block} tokens")
        if self.load_rate is not None and not (math.isfinite(self.load_rate) and self.load_rate > 0):
            raise PlanError(f"load_rate = {self.load_rate} must be a finite number of tokens a second, above 0")
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
    def kv_blocks(self) -> int | None:
        """Blocks of the KV cache that requests can have: vLLM keeps one for itself."""
        return None if self.kv_tokens is None else self.kv_tokens // self.block - 1

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
