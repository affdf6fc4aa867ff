"""What an A/B says: medians, paired ratios with their intervals, one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from isochunk.bench.arms import Arm
from isochunk.bench.results import Comparison, Sample

__all__ = ["Interval", "Summary", "as_dict", "paired_ratio", "reference_arm", "summarise", "verdict"]

_RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class Interval:
    """A ratio with its 95% bootstrap interval; ``low`` and ``high`` are None with fewer than 3 pairs."""

    ratio: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.ratio:.2f}"
        return f"{self.ratio:.2f} ({self.low:.2f}-{self.high:.2f})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One arm at one length.

    Attributes:
        ttft_s: median; ``q25_s`` and ``q75_s`` are the quartiles.
        ratio: this arm's TTFT over the reference's, paired by round; None for the reference itself or
            when no round has both.
        predicted_s: median predicted TTFT; None when the server has no model.
        chunks: of the sample nearest to the median.
    """

    tokens: int
    arm: Arm
    samples: int
    ttft_s: float
    q25_s: float
    q75_s: float
    ratio: Interval | None
    predicted_s: float | None
    engine_s: float | None
    chunks: tuple[int, ...]

    @property
    def prediction_error(self) -> float | None:
        """Predicted over measured TTFT (at the client), minus 1."""
        return None if self.predicted_s is None else self.predicted_s / self.ttft_s - 1


def reference_arm(arms: Sequence[Arm]) -> Arm:
    """The arm that ratios are taken over: isochunk's own when it is there, else the first."""
    return next((arm for arm in arms if arm.policy == "optimal"), arms[0])


def summarise(comparison: Comparison) -> list[Summary]:
    """One summary a length and arm, in their order; those without a clean sample are left out."""
    reference = reference_arm(comparison.arms)
    rows = []
    for tokens in comparison.lengths:
        cells = {arm: [s for s in comparison.clean if s.tokens == tokens and s.arm == arm] for arm in comparison.arms}
        for arm, samples in cells.items():
            if samples:
                ratio = None if arm == reference else paired_ratio(samples, cells[reference])
                rows.append(_summary(tokens, arm, samples, ratio))
    return rows


def paired_ratio(samples: Sequence[Sample], reference: Sequence[Sample]) -> Interval | None:
    """Median over the rounds of ``samples`` over ``reference``, with a percentile bootstrap over the rounds."""
    base = {sample.round: sample.ttft_s for sample in reference}
    ratios = np.array([s.ttft_s / base[s.round] for s in samples if s.round in base])
    if not len(ratios):
        return None
    if len(ratios) < 3:
        return Interval(float(np.median(ratios)), None, None)
    draws = np.random.default_rng(0).choice(ratios, size=(_RESAMPLES, len(ratios)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    return Interval(float(np.median(ratios)), float(low), float(high))


def verdict(comparison: Comparison) -> str:
    """One sentence that can be quoted: the longest length that was measured, against every other policy."""
    found = summarise(comparison)
    longest = max((row.tokens for row in found if row.ratio), default=max(comparison.lengths))
    rows = [row for row in found if row.tokens == longest]
    reference = reference_arm(comparison.arms)
    largest = comparison.status["max_num_batched_tokens"]
    fixed = [row for row in rows if row.arm.policy == "fixed" and row.ratio]
    parts = [_phrase(row, "vLLM's own fixed size") for row in fixed if row.arm.chunk == largest]
    parts += [_phrase(row, "the first-chunk rule") for row in rows if row.arm.policy == "first_chunk" and row.ratio]
    best = min(fixed, key=lambda row: row.ttft_s, default=None)
    if best is not None and best.arm.chunk != largest:
        parts.append(
            _phrase(
                best, f"the best of {len(fixed)} fixed sizes ({best.arm.chunk})" if len(fixed) > 1 else best.arm.label
            )
        )
    if not parts:
        return "No two policies have clean samples of one length, so there is nothing to compare."
    rounds = min(row.samples for row in rows)
    return (
        f"At {longest} tokens, {reference.label}'s first token came {', '.join(parts[:-1])}"
        f"{' and ' if len(parts) > 1 else ''}{parts[-1]}; "
        f"{f'medians of {rounds} paired rounds' if rounds > 1 else 'one round only'}."
    )


def as_dict(comparison: Comparison) -> dict[str, Any]:
    """Plain data for JSON: the summaries, the verdict and every sample with the server's account of it."""
    return {
        "url": comparison.url,
        "model": comparison.model,
        "seed": comparison.seed,
        "rounds": comparison.rounds,
        "lengths": list(comparison.lengths),
        "reference": asdict(reference_arm(comparison.arms)),
        "verdict": verdict(comparison),
        "warnings": comparison.warnings,
        "summary": [
            asdict(row) | {"label": row.arm.label, "prediction_error": row.prediction_error}
            for row in summarise(comparison)
        ],
        "status": comparison.status,
        "samples": [asdict(sample) for sample in comparison.samples],
    }


def _summary(tokens: int, arm: Arm, samples: list[Sample], ratio: Interval | None) -> Summary:
    times = [sample.ttft_s for sample in samples]
    middle = median(times)
    typical = min(samples, key=lambda sample: abs(sample.ttft_s - middle))
    low, high = np.quantile(times, [0.25, 0.75])
    return Summary(
        tokens=tokens,
        arm=arm,
        samples=len(samples),
        ttft_s=middle,
        q25_s=float(low),
        q75_s=float(high),
        ratio=ratio,
        predicted_s=_median(sample.predicted_s for sample in samples),
        engine_s=_median(sample.engine_s for sample in samples),
        chunks=tuple(typical.record["chunks"]),
    )


def _median(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _phrase(row: Summary, other: str) -> str:
    ratio = row.ratio
    assert ratio is not None
    if ratio.low is not None and ratio.high is not None and ratio.low <= 1 <= ratio.high:
        return f"within the noise as soon as with {other}"
    if ratio.ratio >= 1:
        return f"{ratio.ratio:.2f} times sooner than with {other}"
    return f"{1 / ratio.ratio:.2f} times later than with {other}"
