"""What the span of a request says of its plan: attributes of OpenTelemetry, named as the fields of the status."""

from __future__ import annotations

from typing import Any

from isochunk.vllm.prompts import PromptRecord

__all__ = ["LONGEST", "span_attributes"]

LONGEST = 64  # entries of a list: each of the request's outputs takes them along
_LISTS = ("chunks", "histories", "predicted_s", "measured_s")


def span_attributes(record: PromptRecord, stages: int) -> dict[str, Any]:
    """Plan and outcome of a prompt, without what is not known of it; lists are cut after their first `LONGEST`."""
    told = {
        "policy": record.policy,
        "stages": stages,
        "chunk": record.chunk,
        "tokens": record.tokens,
        "cached": record.cached,
        "alone": record.alone,
        "steps": len(record.chunks),
        "predicted_ttft_s": record.predicted_ttft_s,
        "measured_ttft_s": record.measured_ttft_s,
        **{name: getattr(record, name)[:LONGEST] for name in _LISTS},
    }
    return {f"isochunk.{name}": _short(value) for name, value in told.items() if value is not None}


def _short(value: Any) -> Any:
    """Microseconds are enough."""
    if isinstance(value, list):
        return [_short(each) for each in value]
    return round(value, 6) if isinstance(value, float) else value
