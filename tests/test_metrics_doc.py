"""docs/metrics.md names what a server and the proxy count."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from isochunk.core.steps import StepPlanner
from isochunk.vllm.config import ChunkConfig
from isochunk.vllm.controller import Controller, Counters

DOC = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Counters)])
def test_every_counter_is_explained(name):
    assert f"| `counters.{name}` |" in DOC


def test_every_field_of_the_status_is_explained():
    told = Controller(ChunkConfig(), StepPlanner(stages=2, max_chunk=64), 2).as_dict()
    assert [name for name in told if name != "counters" and f"`{name}`" not in DOC] == []


def test_every_metric_of_the_proxy_is_explained():
    metrics = pytest.importorskip("isochunk.proxy.metrics").Metrics(SimpleNamespace(pools={}))
    lines = metrics.text().decode().splitlines()
    names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(names) > 10
    assert [name for name in names if not name.endswith("_created") and f"| `{name}` |" not in DOC] == []
