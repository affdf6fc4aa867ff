import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig

from isochunk.core.errors import ConfigError
from isochunk.core.profile import key_name
from isochunk.vllm import Scheduler
from isochunk.vllm.settings import check_engine, profile_key
from isochunk.vllm.testing import engine_config

ON = {"enabled": True}


class Derived(Scheduler):  # type: ignore[misc, unused-ignore]
    """An operator's own, on top of isochunk's."""


def test_the_flag_selects_the_scheduler(tmp_path: Path) -> None:
    assert engine_config(tmp_path, ON).scheduler_config.scheduler_cls == "isochunk.vllm.Scheduler"


@pytest.mark.parametrize(("role", "warned"), [("kv_producer", True), ("kv_consumer", False)])
def test_asynchronous_scheduling_on_a_prefill_node_is_warned_of(
    tmp_path: Path, role: str, warned: bool, said: pytest.LogCaptureFixture
) -> None:
    config = engine_config(tmp_path, ON)
    config.scheduler_config.async_scheduling = True
    config.kv_transfer_config = KVTransferConfig(kv_connector="ExampleConnector", kv_role=role)
    check_engine(config)
    assert ("--no-async-scheduling" in said.text) == warned


@pytest.mark.parametrize("section", [None, {"enabled": False}])
def test_without_the_flag_vllm_is_left_alone(tmp_path: Path, section: dict[str, Any] | None) -> None:
    assert engine_config(tmp_path, section, pipeline_parallel_size=1).scheduler_config.scheduler_cls is None


@pytest.mark.parametrize("named", ["isochunk.vllm.Scheduler", Derived])
def test_naming_the_class_or_one_derived_from_it_enables_it(tmp_path: Path, named: str | type) -> None:
    assert engine_config(tmp_path, scheduler_cls=named).scheduler_config.scheduler_cls == named
    with pytest.raises(ConfigError, match="pipeline-parallel-size 1"):
        engine_config(tmp_path, scheduler_cls=named, pipeline_parallel_size=1)


def test_a_class_that_is_named_by_its_path_is_looked_at_only_when_isochunk_is_enabled(tmp_path: Path) -> None:
    named = f"{__name__}.Derived"
    assert engine_config(tmp_path, ON, scheduler_cls=named).scheduler_config.scheduler_cls == named
    elsewhere = "no_such_package.Scheduler"
    assert engine_config(tmp_path, scheduler_cls=elsewhere).scheduler_config.scheduler_cls == elsewhere


@pytest.mark.parametrize(
    ("section", "options", "message"),
    [
        (ON, {"pipeline_parallel_size": 1}, "--pipeline-parallel-size 1"),
        (ON, {"runner": "pooling", "convert": "embed"}, "this model pools"),
        (ON, {"enable_chunked_prefill": False, "max_num_batched_tokens": 65536}, "chunked prefill is off"),
        (ON, {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}, "exclude each other"),
        ({**ON, "min_chunk": 2048}, {}, "min_chunk = 2048 must be below max_num_batched_tokens = 2048"),
        ({**ON, "polcy": "fixed"}, {}, "did you mean 'policy'"),
    ],
)
def test_deployments_that_cannot_work_are_refused(
    tmp_path: Path, section: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_config(tmp_path, section, **options)


@pytest.mark.parametrize("place", ["scheduler_config", "top"])
def test_balance_scheduling_is_refused(tmp_path: Path, place: str) -> None:
    config: dict[str, Any] = {"scheduler_config": {"profiling_chunk_config": ON}}
    (config if place == "top" else config[place])["enable_balance_scheduling"] = True
    with pytest.raises(ConfigError, match="enable_balance_scheduling"):
        engine_config(tmp_path, additional_config=config)


def _other_graphs(config: Any) -> None:
    config.compilation_config.max_cudagraph_capture_size = 4096


def _other_graph_mode(config: Any) -> None:
    config.compilation_config.cudagraph_mode = "FULL"


def _asynchronous(config: Any) -> None:
    config.scheduler_config.async_scheduling = not config.scheduler_config.async_scheduling


def _speculation(config: Any) -> None:
    config.speculative_config = SimpleNamespace(method="ngram", model=None, num_speculative_tokens=3)


def _layout(config: Any) -> None:
    config.cache_config.kv_cache_layout = "HND"


def _block(config: Any) -> None:
    config.cache_config.block_size = 64


@pytest.mark.parametrize("change", [_other_graphs, _other_graph_mode, _asynchronous, _speculation, _layout, _block])
def test_whatever_changes_a_steps_cost_has_a_profile_of_its_own(tmp_path: Path, change: Callable[[Any], None]) -> None:
    config = engine_config(tmp_path, ON)
    before = profile_key(config)
    assert profile_key(config) == before
    change(config)
    assert key_name(profile_key(config)) != key_name(before)
    assert json.loads(json.dumps(before)) == before
