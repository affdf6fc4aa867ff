"""What a simulation found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from isochunk.simulator.deployment import Deployment
from isochunk.simulator.instance import Instance
from isochunk.simulator.scheduler import Prompt, Step

__all__ = ["Finished", "Result"]


class Finished(NamedTuple):
    """A request that was answered: seconds of arrival, of its first token and of its last."""

    key: str
    tokens: int
    arrived: float
    first_token: float
    ended: float
    hit: int
    output: int
    preemptions: int

    @classmethod
    def of(cls, prompt: Prompt, now: float) -> Finished:
        """A prompt that has just got its last token."""
        request = prompt.request
        first, hit = prompt.first_token, prompt.hit or 0
        return cls(request.key, request.tokens, prompt.arrived, first, now, hit, request.output, prompt.preemptions)


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
    def tpot(self) -> npt.NDArray[np.float64]:
        """Seconds a token behind the first, of each request that was answered with several."""
        return np.array([(r.ended - r.first_token) / (r.output - 1) for r in self.finished if r.output > 1])

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens that were in a cache when their prompts' turns first came."""
        return sum(request.hit for request in self.finished)

    @property
    def preemptions(self) -> int:
        """How often a request had to give its KV blocks back and start anew."""
        return sum(request.preemptions for request in self.finished)

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
            "hit_tokens": self.hit_tokens,
            "computed_tokens": sum(instance.computed for instance in self._instances),
            "output_tokens": sum(request.output for request in self.finished),
            "tpot_mean_s": float(self.tpot.mean()) if self.tpot.size else None,
            "preemptions": self.preemptions,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_per_card": self.tokens_per_s / self._deployment.total_cards,
            "steps": self.steps,
            "bubbles": self.bubbles,
        }
