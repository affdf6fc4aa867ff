"""From an A/B's results to the rows of its table and the parts of its report."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, groupby

from isochunk.bench.arms import Arm
from isochunk.bench.results import Comparison, Sample
from isochunk.bench.summary import Summary, reference_arm, summarise, verdict
from isochunk.report import data

__all__ = ["cells", "columns", "page", "short_chunks"]


def columns(result: Comparison) -> list[str]:
    """Header of the table."""
    return ["tokens", "policy", "TTFT, s", f"over {reference_arm(result.arms).label}", "predicted (engine)", "chunks"]


def cells(row: Summary) -> list[str]:
    """One row of the table on a terminal: the spread is half of what lies between the quartiles."""
    spread = (row.q75_s - row.q25_s) / 2 / row.ttft_s
    return [
        str(row.tokens),
        row.arm.label,
        f"{_three(row.ttft_s)} ±{spread:.0%}",
        "1" if row.ratio is None else str(row.ratio),
        "-" if row.predicted_s is None else f"{_three(row.predicted_s)} {row.prediction_error:+.0%}",
        short_chunks(row.chunks),
    ]


def _wide_cells(row: Summary) -> tuple[str, ...]:
    """One row of the table on the page: the quartiles themselves."""
    tokens, label, _, *rest = cells(row)
    return (tokens, label, f"{_three(row.ttft_s)} ({_three(row.q25_s)} to {_three(row.q75_s)})", *rest)


def _three(seconds: float) -> str:
    """Three digits, zeros at the end included."""
    return f"{seconds:#.3g}".rstrip(".")


def page(result: Comparison) -> data.Page:
    """All that the report shows."""
    status = result.status
    facts = {
        "server": f"{result.url}, isochunk {status['version']}",
        "model": result.model,
        "pipeline stages": str(status["stages"]),
        "max_num_batched_tokens": str(status["max_num_batched_tokens"]),
        "KV block": f"{status['block_size']} tokens",
        "cost model": _coefficients(status.get("model")),
        "learnt from": str(status.get("source")),
        "rounds": f"{result.rounds} in random order, every prompt fresh, seed {result.seed}",
    }
    return data.Page(
        title="isochunk: time to first token, policy against policy on one running server",
        headline=verdict(result),
        facts=tuple(facts.items()),
        columns=tuple(columns(result)),
        rows=tuple(_wide_cells(row) for row in summarise(result)),
        notes=(
            "TTFT is the median at the client, with its quartiles. Ratios are paired by round, with a 95% bootstrap "
            "interval (with 5 rounds or fewer, their range). The prediction is for the chunks used, its error against "
            "the TTFT shown.",
            *result.warnings,
        ),
        timelines=tuple(_timelines(result)),
        points=tuple(_points(result)),
        arms=tuple(_arms(result)),
    )


def _timelines(result: Comparison) -> list[data.Timeline]:
    """The longest prompt that both have: vLLM's own size above, isochunk below."""
    largest = result.status["max_num_batched_tokens"]
    reference = reference_arm(result.arms)
    fixed = Arm("fixed", largest)
    other = fixed if fixed in result.arms else next((arm for arm in result.arms if arm != reference), reference)
    pairs = [(t, _typical(result, t, other), _typical(result, t, reference)) for t in sorted(result.lengths)]
    complete = [(t, [a, b]) for t, a, b in pairs if a is not None and b is not None]
    if not complete:
        return []
    tokens, samples = complete[-1]
    return [
        data.Timeline(
            label=f"vLLM's fixed {largest}" if sample.arm == fixed else sample.arm.label,
            tokens=tokens,
            stages=result.status["stages"],
            chunks=tuple(sample.record["chunks"]),
            entered_s=tuple(sample.record["entered_s"]),
            measured_s=tuple(sample.record["measured_s"]),
            ours=sample.arm.policy == "optimal",
        )
        for sample in samples
    ]


def _typical(result: Comparison, tokens: int, arm: Arm) -> Sample | None:
    """The sample in the middle, by the engine's own time."""
    samples = [s for s in result.clean if s.tokens == tokens and s.arm == arm]
    samples.sort(key=lambda sample: sample.engine_s or sample.ttft_s)
    return samples[len(samples) // 2] if samples else None


def _points(result: Comparison) -> list[data.Points]:
    probe = result.status.get("probe") or {}
    rows = probe.get("samples") or []
    points = [_series("probe, what the model was fitted to", "fit", [row[2:4] for row in rows])]
    for policy, label, kind in (
        ("fixed", "fixed sizes", "other"),
        ("first_chunk", "first-chunk rule", "rule"),
        ("optimal", "isochunk", "ours"),
    ):
        records = [s.record for s in result.clean if s.arm.policy == policy and s.record.get("predicted_s")]
        pairs = chain.from_iterable(zip(r["measured_s"], r["predicted_s"], strict=True) for r in records)
        points.append(_series(label, kind, list(pairs)))
    return [series for series in points if series.measured_s]


def _series(label: str, kind: str, pairs: Sequence[Sequence[float]]) -> data.Points:
    known = [(measured, predicted) for measured, predicted in pairs if measured and predicted]
    return data.Points(
        label=label, kind=kind, measured_s=tuple(m for m, _ in known), predicted_s=tuple(p for _, p in known)
    )


def _arms(result: Comparison) -> list[data.Arm]:
    return [
        data.Arm(
            label=row.arm.label,
            tokens=row.tokens,
            ttft_s=tuple(s.ttft_s for s in result.clean if s.tokens == row.tokens and s.arm == row.arm),
            predicted_s=row.predicted_s,
            ours=row.arm.policy == "optimal",
        )
        for row in summarise(result)
    ]


def _coefficients(model: dict[str, float] | None) -> str:
    if model is None:
        return "none"
    units = {"c0": "s a step", "c1": "s a token", "c2": "s a token pair", "c3": "s a history token"}
    return ", ".join(f"{name} = {value:.3g} {units.get(name, '')}" for name, value in model.items())


def short_chunks(chunks: Sequence[int]) -> str:
    """Sizes of a prompt's steps: ``4x2048`` for equal ones, ``9: 2288-496`` for others."""
    groups = [(size, len(list(same))) for size, same in groupby(chunks)]
    if len(groups) <= 2:
        return "+".join(f"{count}x{size}" if count > 1 else str(size) for size, count in groups)
    return f"{len(chunks)}: {chunks[0]}-{chunks[-1]}"
