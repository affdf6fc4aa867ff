"""What a simulation found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from isochunk.simulator.deployment import Deployment
from isochunk.simulator.instance import Instance, Step

__all__ = ["Finished", "Result"]


class Finished(NamedTuple):
    """A request that got its first token: seconds of arrival and of the token."""

    key: str
    tokens: int
    arrived: float
    first_token: float


class Result:
    """Times to first token, throughput and idle stages of one run."""

    def __init__(self, deployment: Deployment, instances: Sequence[Instance], finished: Sequence[Finished]) -> None:
        self._deployment = deployment
        self._instances = instances
        self.finished = list(finished)

    @property
    def ttft(self) -> npt.NDArray[np.float64]:
        """Seconds to first token of each request, in the order in which they finished."""
        return np.array([request.first_token - request.arrived for request in self.finished])

    @property
    def seconds(self) -> float:
        """From the first arrival to the last first token."""
        return max(r.first_token for r in self.finished) - min(r.arrived for r in self.finished)

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens a second, cached ones included, of all instances."""
        return sum(request.tokens for request in self.finished) / self.seconds

    @property
    def bubbles(self) -> list[float]:
        """Idle share of each stage over the time in which its instance had work; mean of the instances."""
        active = sum(instance.active for instance in self._instances)
        busy = np.sum([instance.busy for instance in self._instances], axis=0)
        return [float(1 - seconds / active) for seconds in busy]

    @property
    def steps(self) -> int:
        """Batches that passed through a pipeline."""
        return sum(instance.steps for instance in self._instances)

    @property
    def recorded(self) -> list[list[Step]]:
        """The steps of each instance, when they were recorded."""
        return [instance.recorded for instance in self._instances]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON; seconds and tokens."""
        ttft = self.ttft
        median, p90, p99 = np.percentile(ttft, [50, 90, 99]).tolist()
        return {
            "requests": len(self.finished),
            "ttft_mean_s": float(ttft.mean()),
            "ttft_median_s": median,
            "ttft_p90_s": p90,
            "ttft_p99_s": p99,
            "seconds": self.seconds,
            "tokens": sum(request.tokens for request in self.finished),
            "computed_tokens": sum(instance.computed for instance in self._instances),
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_per_card": self.tokens_per_s / self._deployment.total_cards,
            "steps": self.steps,
            "bubbles": self.bubbles,
        }
