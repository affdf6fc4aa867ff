"""What a load measured: percentiles, throughput, and what was wrong with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from isochunk.bench.load import Outcome

__all__ = ["line", "summarise", "warnings"]

_PERCENTILES = (50, 90, 99)


def summarise(outcomes: Sequence[Outcome], cards: int) -> dict[str, Any]:
    """Plain data: seconds and tokens a second.

    ``ttft_s``, ``gap_s`` (between tokens) and ``total_s`` hold mean, percentiles and the largest, or None
    where nothing was measured. Throughput counts from the first sending to the last token.
    """
    answered = [(outcome, outcome.answer) for outcome in outcomes if outcome.answer is not None]
    span = max((outcome.sent_s + answer.seconds for outcome, answer in answered), default=0.0)
    span -= min((outcome.sent_s for outcome, _ in answered), default=0.0)
    totals = {
        "requests": len(answered),
        "input_tokens": sum(outcome.request.tokens for outcome, _ in answered),
        "output_tokens": sum(answer.output_tokens for _, answer in answered),
    }
    rates = {f"{name}_per_s": count / span if span else 0.0 for name, count in totals.items()}
    return {
        **totals,
        "failed": len(outcomes) - len(answered),
        "seconds": span,
        "cached_tokens": sum(answer.cached_tokens or 0 for _, answer in answered),
        **rates,
        "cards": cards,
        "input_tokens_per_s_per_card": rates["input_tokens_per_s"] / cards,
        "output_tokens_per_s_per_card": rates["output_tokens_per_s"] / cards,
        "ttft_s": _spread([answer.ttft_s for _, answer in answered]),
        "gap_s": _spread([gap for _, answer in answered for gap in answer.gaps_s]),
        "total_s": _spread([answer.seconds for _, answer in answered]),
    }


def warnings(outcomes: Sequence[Outcome]) -> list[str]:
    """What makes the numbers mean something else than they seem to."""
    found = []
    failed = [outcome.error for outcome in outcomes if outcome.error]
    if failed:
        found.append(f"{len(failed)} of {len(outcomes)} requests failed, the first with: {failed[0]}")
    answered = [(outcome.request, outcome.answer) for outcome in outcomes if outcome.answer is not None]
    hits = sum((answer.cached_tokens or 0) > request.shared for request, answer in answered)
    if hits:
        found.append(f"{hits} prompts were in the server's prefix cache already; take another seed")
    cut = sum(answer.prompt_tokens not in (None, request.tokens) for request, answer in answered)
    if cut:
        found.append(f"the server counted other lengths than were sent for {cut} prompts; does something cut them?")
    return found


def line(index: int, outcome: Outcome) -> dict[str, Any]:
    """One request as plain data, for a file of JSON lines."""
    answer = outcome.answer
    return {
        "index": index,
        "tokens": outcome.request.tokens,
        "shared_tokens": outcome.request.shared,
        "sent_s": outcome.sent_s,
        "ttft_s": answer and answer.ttft_s,
        "gaps_s": answer and list(answer.gaps_s),
        "cached_tokens": answer and answer.cached_tokens,
        "output_tokens": answer and answer.output_tokens,
        "request_id": answer and answer.request_id,
        "error": outcome.error,
    }


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    points = np.percentile(values, _PERCENTILES)
    named = {f"p{p}": float(value) for p, value in zip(_PERCENTILES, points, strict=True)}
    return {"mean": float(np.mean(values)), **named, "max": float(max(values))}
