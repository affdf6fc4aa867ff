"""isochunk's metrics in vLLM's own ``/metrics``: from the status, in Prometheus' form, and never in the way."""

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm")

from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.parser import text_string_to_metric_families

from isochunk.vllm import compat
from isochunk.vllm.live import metrics
from isochunk.vllm.live.metrics import add_metrics
from isochunk.vllm.tally import Tally
from tests.vllm.live.statuses import status

DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"


def told() -> dict[str, Any]:
    tally = Tally()
    tally.step(0.0, 2.0, 1.0, 0.9, [512])
    tally.prompt(1000, 2.0, 1.9, 3.0)
    more = {"in_flight": 2, "target_s": 0.1, "model_age_s": 5.0, "totals": tally.as_dict()}
    return status() | more | {"health": {"ok": True, "reasons": {"the planner": 1}}}


def server(monkeypatch: pytest.MonkeyPatch, ask: Any) -> FastAPI:
    """vLLM's own route on a registry of this test's."""
    from vllm.entrypoints.serve.instrumentator import metrics as theirs

    registry = CollectorRegistry()
    Gauge("vllm_of_its_own", "x", registry=registry).set(7)
    monkeypatch.setattr(theirs, "get_prometheus_registry", lambda: registry)
    monkeypatch.setattr(compat, "metrics_registry", lambda: registry)
    app = FastAPI()
    theirs.attach_router(app)
    assert add_metrics(app, ask)
    return app


def scrape(app: FastAPI, accept: str = "text/plain") -> str:
    async def get() -> str:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            response = await client.get("/metrics", headers={"Accept": accept})
            assert response.status_code == 200
            return response.text

    return asyncio.run(get())


async def answer() -> dict[str, Any]:
    return told()


def test_a_scrape_tells_what_the_status_says(monkeypatch: pytest.MonkeyPatch) -> None:
    text = scrape(server(monkeypatch, answer))
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["vllm_of_its_own",] == 7
    assert samples["isochunk_steps_total",] == told()["counters"]["steps"]
    assert samples["isochunk_model_seconds", "c0"] == told()["model"]["c0"]
    assert samples["isochunk_step_seconds_bucket", "1.0"] == 1
    assert samples["isochunk_step_seconds_bucket", "0.5"] == 0
    assert samples["isochunk_alone_ttft_fixed_seconds_total",] == 3.0
    assert samples["isochunk_fallback_reasons_total", "the planner"] == 1
    assert samples["isochunk_policy", "optimal"] == 1


def test_open_metrics_is_given_to_those_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    text = scrape(server(monkeypatch, answer), "application/openmetrics-text; version=1.0.0")
    assert text.rstrip().endswith("# EOF")
    assert "isochunk_steps_total" in text


def test_an_engine_that_fails_or_is_busy_costs_nobody_vllms_own_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails() -> dict[str, Any]:
        raise RuntimeError("the engine is dead")

    async def hangs() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(metrics, "_PATIENCE_S", 0.01)
    for ask in (fails, hangs):
        text = scrape(server(monkeypatch, ask))
        assert "vllm_of_its_own 7.0" in text
        assert "isochunk_" not in text


def test_a_server_without_metrics_is_left_alone() -> None:
    assert not add_metrics(FastAPI(), answer)


def test_every_metric_is_defined_in_the_docs(monkeypatch: pytest.MonkeyPatch) -> None:
    text = scrape(server(monkeypatch, answer))
    names = {
        name for name in re.findall(r"^# TYPE (isochunk_\w+) ", text, re.MULTILINE) if not name.endswith("_created")
    }
    documented = DOCS.read_text(encoding="utf-8")
    assert len(names) > 25
    assert [name for name in sorted(names) if f"`{name}`" not in documented] == []
