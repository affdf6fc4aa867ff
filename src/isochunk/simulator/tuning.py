"""Which settings to serve with: every choice simulated on the user's own workload."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from isochunk.core.cost import COEFFICIENTS, CostModel
from isochunk.core.errors import PlanError
from isochunk.simulator.deployment import Deployment
from isochunk.simulator.loop import simulate
from isochunk.simulator.workload import Workload

__all__ = ["PUBLISHED_SIZES", "Choice", "best_budget", "budgets", "layer_split", "restage", "sweep"]

PUBLISHED_SIZES = (8192, 16384, 24576, 32768)  # the guide's search space for a fixed size
_LARGEST = 131072
_SMALLEST = 512
_CLOSE = 0.002


@dataclass(frozen=True, slots=True)
class Choice:
    """A setting and the mean TTFT in seconds that it is predicted to give."""

    name: str
    value: int
    ttft_s: float

    def against(self, best_s: float) -> float:
        """How much later than the best, as a share."""
        return self.ttft_s / best_s - 1

    def as_dict(self, best_s: float) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"name": self.name, "value": self.value, "ttft_s": self.ttft_s, "above_best": self.against(best_s)}


def sweep(deployment: Deployment, workload: Callable[[], Workload], policy: str, sizes: Sequence[int]) -> list[Choice]:
    """Mean TTFT for each size: the fixed chunk, the published rules' first chunk, or isochunk's token budget."""
    return [
        Choice(policy, size, _mean(deployment.but(max_tokens=size), workload(), policy)) for size in sorted(set(sizes))
    ]


def best_budget(choices: Sequence[Choice]) -> Choice:
    """The smallest budget that is within 0.2% of the best: activations take memory in proportion to it."""
    best = min(choice.ttft_s for choice in choices)
    return next(choice for choice in sorted(choices, key=lambda c: c.value) if choice.against(best) <= _CLOSE)


def budgets(longest: int, block: int) -> list[int]:
    """Powers of two, and the halves between, from 512 up to the longest prompt."""
    top = min(max(longest, _SMALLEST), _LARGEST)
    exponents = range(2 * int(math.log2(_SMALLEST)), 2 * math.ceil(math.log2(top)) + 1)
    return [max(round(2 ** (e / 2) / block), 1) * block for e in exponents]


def restage(deployment: Deployment, stages: int) -> Deployment:
    """The same layers on another number of stages: work divides, the fixed cost of a step does not."""
    if stages < 1:
        raise PlanError(f"stages = {stages} must be at least 1")
    factor = deployment.stages / stages
    models = tuple(model.scaled(factor, step=1.0) for model in deployment.models)
    mean = models[0].with_costs(*(sum(getattr(m, name) for m in models) / len(models) for name in COEFFICIENTS))
    return deployment.but(models=(mean,) * stages, in_flight=None, cards=None)


def layer_split(models: Sequence[CostModel], layers: int, tokens: int) -> list[int]:
    """Layers of each stage that even out the stages' seconds for a prompt of ``tokens`` tokens.

    A stage's cost above the cheapest stage's belongs to the stage (embedding, head), not to its layers: layers
    are taken to cost what they cost on the cheapest stage, and every stage had as many as possible alike.

    Raises:
        PlanError: there are fewer layers than stages.
    """
    stages = len(models)
    if layers < stages:
        raise PlanError(f"--layers {layers} must be at least the {stages} stages")
    seconds = [model.seconds(tokens / 2, tokens / 2) for model in models]
    now = [layers // stages + (1 if stage < layers % stages else 0) for stage in range(stages)]
    layer = min(second / count for second, count in zip(seconds, now, strict=True))
    own = [second - count * layer for second, count in zip(seconds, now, strict=True)]
    split = [1] * stages
    for _ in range(layers - stages):
        lightest = min(range(stages), key=lambda stage: own[stage] + (split[stage] + 1) * layer)
        split[lightest] += 1
    return split


def _mean(deployment: Deployment, workload: Workload, policy: str) -> float:
    return float(simulate(deployment, workload, policy).ttft.mean())
