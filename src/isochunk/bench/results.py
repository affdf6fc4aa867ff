"""What an A/B measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from isochunk.bench.arms import Arm
from isochunk.bench.client import Status
from isochunk.bench.solo import left_out

__all__ = ["Comparison", "Sample"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One prompt's time to first token under one arm.

    Attributes:
        round: number of the round, from 0.
        tokens: length of the prompt.
        ttft_s: seconds at the client, from sending to the first data chunk.
        record: the server's own account of the prompt (chunks, step times, prediction).
        disturbed: what spoilt the sample; None for a clean one.
    """

    round: int
    tokens: int
    arm: Arm
    ttft_s: float
    record: dict[str, Any]
    disturbed: str | None = None

    @property
    def predicted_s(self) -> float | None:
        """TTFT in the engine that the cost model predicted for the chunks used."""
        return self.record.get("predicted_ttft_s")

    @property
    def engine_s(self) -> float | None:
        """TTFT in the engine, without HTTP and tokenizer."""
        return self.record.get("measured_ttft_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All that an A/B measured.

    Attributes:
        url: the server.
        model: the name of its model.
        seed: of the prompts and of the order.
        status: the server's status at the end, without its list of prompts.
        samples: in the order in which they were measured, the disturbed ones included.
        notes: what the client noticed under way.
        ended: why it ended before all was measured; None when it did not.
    """

    url: str
    model: str
    seed: int
    arms: tuple[Arm, ...]
    lengths: tuple[int, ...]
    rounds: int
    status: Status
    samples: tuple[Sample, ...] = field(repr=False)
    notes: tuple[str, ...] = ()
    ended: str | None = None

    @property
    def clean(self) -> list[Sample]:
        """The samples that nothing spoilt."""
        return [sample for sample in self.samples if sample.disturbed is None]

    @property
    def warnings(self) -> list[str]:
        """Why it ended early, what spoilt samples, and how often isochunk's own guard was in force."""
        warnings = [f"ended early, {len(self.samples)} samples are kept: {self.ended}"] if self.ended else []
        warnings += [*self.notes, *left_out(sample.disturbed for sample in self.samples)]
        if guarded := sum(sample.record["policy"] != sample.arm.policy for sample in self.clean):
            warnings.append(f"{guarded} x isochunk's guard used vLLM's own chunks after a plan did harm (counted in)")
        return warnings
