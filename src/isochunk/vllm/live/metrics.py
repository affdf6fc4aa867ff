"""isochunk's part of vLLM's ``/metrics``, computed from the status at each scrape; docs/metrics.md defines each."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from isochunk.vllm import compat

__all__ = ["Ask", "StatusCollector", "add_metrics"]

Ask = Callable[[], Awaitable[Mapping[str, Any]]]
_PATIENCE_S = 1.0

_COUNTERS = {
    "steps": "Steps that went into the pipeline.",
    "planned": "Prompts that were cut by a plan.",
    "harmful": "Planned prompts that came later than vLLM's own chunks would have brought them.",
    "yields": "Steps that a prompt sat out for others.",
    "refits": "Times that traffic changed the cost model.",
    "alarms": "Times that the guard raised the step cost.",
    "fallbacks": "Errors inside isochunk; such a step is left to vLLM.",
    "rejected": "Refits that predicted no better than the model and were thrown away.",
}
_SUMS = {
    "busy_s": ("stage_busy_seconds", "Seconds that one stage worked."),
    "occupied_s": ("pipeline_occupied_seconds", "Seconds in which at least one step was in the pipeline."),
    "predicted_s": ("step_predicted_seconds", "Predicted seconds of the steps that had a prediction, on one stage."),
    "measured_s": ("step_measured_seconds", "Measured seconds of the same steps."),
    "prompts": ("prompts", "Prompts that have their first token."),
    "tokens": ("prompt_tokens", "Tokens of those prompts."),
    "alone": ("prompts_alone", "Planned prompts that shared no step."),
    "ttft_s": ("alone_ttft_seconds", "Seconds to first token of the prompts alone."),
    "ttft_predicted_s": ("alone_ttft_predicted_seconds", "What was predicted for them."),
    "ttft_fixed_s": ("alone_ttft_fixed_seconds", "What vLLM's own size is predicted to take for them."),
}
_HISTOGRAMS = {
    "steps": ("step_seconds", "Seconds of a step on one stage."),
    "step_ratio": ("step_measured_over_predicted", "Measured over predicted seconds of a step."),
    "chunks": ("chunk_tokens", "New tokens of a prompt in a step."),
    "ttft": ("ttft_seconds", "Seconds from a prompt's first step to its first token."),
    "ttft_ratio": ("ttft_measured_over_predicted", "The same over its prediction, of prompts alone."),
}
_GAUGES = {
    "drift": ("drift", "Measured over predicted seconds of the steps that the last refit looked at."),
    "resting": ("resting_prompts", "Prompts left to vLLM before a plan is tried again."),
    "in_flight": ("steps_in_flight", "Steps in the pipeline now."),
    "target_s": ("target_seconds", "Seconds of a step that the last plan aimed at."),
    "model_age_s": ("model_age_seconds", "Seconds since the cost model was measured or last changed."),
    "stages": ("stages", "Pipeline stages."),
}


class StatusCollector(Collector):
    """Gives Prometheus what the last status says; nothing before there was one."""

    def __init__(self) -> None:
        self.status: Mapping[str, Any] | None = None

    def collect(self) -> Iterable[Metric]:
        """One family a metric; names and meanings in docs/metrics.md."""
        status = self.status
        if status is None:
            return
        for name, text in _COUNTERS.items():
            if name in status["counters"]:
                yield CounterMetricFamily(f"isochunk_{name}", text, value=status["counters"][name])
        reasons = CounterMetricFamily("isochunk_fallback_reasons", "Fallbacks by what failed.", labels=["reason"])
        for reason, count in status["health"]["reasons"].items():
            reasons.add_metric([reason], count)
        yield reasons
        yield GaugeMetricFamily("isochunk_healthy", "0 when something fails each time.", value=status["health"]["ok"])
        totals = status["totals"]
        for name, (metric, text) in _SUMS.items():
            yield CounterMetricFamily(f"isochunk_{metric}", text, value=totals[name])
        for name, (metric, text) in _HISTOGRAMS.items():
            yield _histogram(f"isochunk_{metric}", text, totals[name])
        for name, (metric, text) in _GAUGES.items():
            if status.get(name) is not None:
                yield GaugeMetricFamily(f"isochunk_{metric}", text, value=status[name])
        yield from _model(status)

    def describe(self) -> Iterable[Metric]:
        """Nothing: what there is depends on the status."""
        return []


def _model(status: Mapping[str, Any]) -> Iterable[Metric]:
    model = GaugeMetricFamily("isochunk_model_seconds", "Coefficients of the cost model.", labels=["coefficient"])
    for name, value in (status["model"] or {}).items():
        if isinstance(value, float):
            model.add_metric([name], value)
    yield model
    policy = GaugeMetricFamily("isochunk_policy", "1 for the policy in force.", labels=["policy"])
    policy.add_metric([status["policy"]], 1.0)
    yield policy


def _histogram(name: str, text: str, told: Mapping[str, Any]) -> Metric:
    names = [*map(str, map(float, told["bounds"])), "+Inf"]
    buckets = list(zip(names, accumulate(map(float, told["counts"])), strict=True))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=told["sum"])


def add_metrics(app: Starlette, ask: Ask) -> bool:
    """Have vLLM's ``/metrics`` give isochunk's too, freshly asked of the engine at each scrape.

    While the engine does not answer, the last answer stands, and vLLM's own metrics come as ever. Where several API
    processes share the metrics, each gives the same numbers, since they are the engine's and not its own.

    Args:
        ask: gets the engine's status without its prompts.

    Returns:
        Whether the server has such a route.
    """
    if not compat.has_metrics(app):
        return False
    collector = StatusCollector()
    registry = compat.metrics_registry()
    registry.register(collector)
    pending: set[asyncio.Task[None]] = set()

    async def refresh() -> None:
        with contextlib.suppress(Exception):  # whatever fails in the engine, vLLM's own metrics must come
            collector.status = await ask()

    async def metrics(request: Request) -> Response:
        if not pending:  # an engine in a long step answers after it; one question at a time
            task = asyncio.create_task(refresh())
            pending.add(task)
            task.add_done_callback(pending.discard)
        await asyncio.wait(pending, timeout=_PATIENCE_S)
        encode, kind = choose_encoder(request.headers.get("Accept", ""))
        return Response(encode(registry), headers={"Content-Type": kind})

    app.router.routes.insert(0, Route("/metrics", metrics))
    return True
