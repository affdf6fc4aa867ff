"""What must hold with vLLM-Ascend's own files: run by ``python -m tests.versions --ascend REPOSITORY``.

Its whole `NPUPlatform.check_and_update_config` runs behind that of vLLM's CPU platform, and its schedulers schedule.
What an NPU would do is not there: `torch_npu` is a stand-in.
"""

from __future__ import annotations

import importlib
import os
import random
import sys
import types
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from vllm.config import KVTransferConfig

from isochunk import CostModel, plan
from isochunk.core.errors import ConfigError
from isochunk.vllm.testing import BLOCK, Engine, engine_config

REF = os.environ["ISOCHUNK_ASCEND"]
OLD = "0.23" in REF
MODEL = CostModel(c0=0.0059, c1=18e-6, c2=20e-9, c3=0.56e-6)
ON = {"enabled": True}
NESTED = {"scheduler_config": {"profiling_chunk_config": ON}}
ON_TOP = {"profiling_chunk_config": ON}
OURS = "isochunk.vllm.Scheduler"
LIMIT = 2048


def _without_npu() -> None:
    npu = MagicMock(name="torch_npu")
    npu.__spec__, npu.__path__ = ModuleSpec("torch_npu", None), []
    for name in ("", ".op_plugin", ".op_plugin.atb", ".op_plugin.atb._atb_ops", ".npu"):
        sys.modules[f"torch_npu{name}"] = npu
    torch.npu = npu
    built = types.ModuleType("vllm_ascend._build_info")
    built.__device_type__, built.__soc_version__ = "A2", "ASCEND910B1"  # type: ignore[attr-defined]
    sys.modules[built.__name__] = built
    folder = importlib.import_module("vllm_ascend").__path__[0]
    for name in ("patch", "patch.platform"):  # so that one patch can be had without all others
        package = types.ModuleType(f"vllm_ascend.{name}")
        package.__path__ = [f"{folder}/{name.replace('.', '/')}"]
        sys.modules[package.__name__] = package


_without_npu()
importlib.import_module("vllm_ascend.patch.platform.patch_balance_schedule")
PLATFORM: Any = importlib.import_module("vllm_ascend.platform").NPUPlatform
CONFIG: Any = importlib.import_module("vllm_ascend.ascend_config")


@pytest.fixture(autouse=True)
def on_ascend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM's CPU platform, and behind it all that vLLM-Ascend does to a configuration."""
    from vllm.platforms import current_platform

    cpu = type(current_platform)
    first = cpu.check_and_update_config

    def both(cls: Any, vllm_config: Any) -> None:
        asked = vllm_config.scheduler_config.async_scheduling
        first(vllm_config)
        vllm_config.scheduler_config.async_scheduling = asked  # which CPUs with stages do without
        PLATFORM.check_and_update_config(vllm_config)

    monkeypatch.setattr(PLATFORM, "device_type", "cpu")
    monkeypatch.setattr(cpu, "check_and_update_config", classmethod(both))
    monkeypatch.setenv("ISOCHUNK_CACHE", str(tmp_path / "cache"))
    CONFIG.clear_ascend_config()
    yield
    CONFIG.clear_ascend_config()


def theirs() -> Any:
    """What vLLM-Ascend's scheduler and each of its workers read."""
    config = CONFIG.get_ascend_config()
    return getattr(config, "profiling_chunk_config", None) or config.scheduler_config.profiling_chunk_config


def transfer(role: str) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="ExampleConnector", kv_role=role, kv_connector_extra_config={"shared_storage_path": "/dev/null"}
    )


def make(folder: Path, config: dict[str, Any] | None, *, blocks: int = 20_000, **options: Any) -> Engine:
    made = engine_config(folder, additional_config=config or {}, async_scheduling=False, **options)
    engine = Engine(made, blocks=blocks)
    if hasattr(engine.scheduler, "isochunk"):
        engine.scheduler.isochunk.controller.use_model(MODEL, "test")
    return engine


@pytest.mark.parametrize(
    "config",
    [
        NESTED,
        ON_TOP,
        {**NESTED, **ON_TOP},
        {"scheduler_config": {"profiling_chunk_config": {**ON, "smooth_factor": 0.0}}},
        {"profiling_chunk_config": {**ON, "need_timing": True, "min_chunk": 1024, "max_fit_chunk": 30}},
    ],
)
@pytest.mark.parametrize("role", [None, "kv_producer", "kv_consumer"])
def test_isochunk_plans_and_ascends_own_chunks_see_nothing(
    tmp_path: Path, config: dict[str, Any], role: str | None
) -> None:
    options = {"kv_transfer_config": transfer(role)} if role else {}
    made = engine_config(tmp_path, additional_config=config, async_scheduling=False, **options)
    assert made.scheduler_config.scheduler_cls == OURS
    assert not theirs().enabled
    assert not theirs().need_timing


@pytest.mark.parametrize("config", [NESTED, ON_TOP])
@pytest.mark.parametrize("role", [None, "kv_producer"])
def test_a_prompt_alone_follows_isochunks_plan(tmp_path: Path, config: dict[str, Any], role: str | None) -> None:
    engine = make(tmp_path, config, **({"kv_transfer_config": transfer(role)} if role else {}))
    engine.add("a", random.Random(0).choices(range(1000), k=7200))
    engine.run()
    assert [step["a"] for step in engine.steps] == list(plan(MODEL, 7200, 2, max_chunk=LIMIT, block=BLOCK).chunks)
    assert engine.scheduler.isochunk.health.failed == 0


@pytest.mark.parametrize("place", ["top", "nested"])
def test_their_planner_comes_back_on_request(tmp_path: Path, place: str) -> None:
    section = {**ON, "planner": "ascend", "need_timing": True}
    config = {"profiling_chunk_config": section}
    given = config if place == "top" else {"scheduler_config": config}
    made = engine_config(tmp_path, additional_config=given, async_scheduling=False)
    assert made.scheduler_config.scheduler_cls.endswith("ProfilingChunkScheduler")
    assert theirs().enabled
    assert theirs().need_timing


@pytest.mark.parametrize("config", [NESTED, ON_TOP])
def test_balance_scheduling_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="enable_balance_scheduling and isochunk exclude"):
        engine_config(tmp_path, additional_config={**config, "enable_balance_scheduling": True})
    monkeypatch.setenv("VLLM_ASCEND_BALANCE_SCHEDULING", "1")
    with pytest.raises(ConfigError, match="VLLM_ASCEND_BALANCE_SCHEDULING=1 and isochunk exclude"):
        engine_config(tmp_path, additional_config=config)


REFUSED = [
    ({"SLO_limits_for_dynamic_batch": 50}, None, "SchedulerDynamicBatch", True),
    ({"recompute_scheduler_enable": True}, "kv_consumer", "RecomputeScheduler", None),
    (
        {"scheduler_config": {"dyntra_lb_config": {"enabled": True}}},
        "kv_consumer",
        "DyntraLBScheduler",
        False,
    ),
]


@pytest.mark.parametrize(("config", "role", "name", "old"), REFUSED)
def test_a_scheduler_that_replaces_schedule_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], role: str | None, name: str, old: bool | None
) -> None:
    if old is not None and old != OLD:
        pytest.skip("not in this version")
    options: dict[str, Any] = {"kv_transfer_config": transfer(role)} if role else {}
    if "Dyntra" in name:
        options["data_parallel_size"] = 2
    with pytest.raises(ConfigError, match=rf"{name}, which replaces vLLM's schedule\(\)"):
        engine_config(tmp_path, additional_config={**config, **ON_TOP}, async_scheduling=False, **options)


COMPOSES = [
    ({"batch_job_sched_config": {"enabled": True}}, False, "BatchJobAwareScheduler"),
    ({"batch_job_sched_config": {"enabled": True}}, True, "BatchJobAwareAsyncScheduler"),
    ({"short_request_first_config": {"enabled": True}}, True, "ShortRequestFirstAsyncScheduler"),
    ({"short_request_first_config": {"enabled": True}}, False, "Scheduler"),
]


@pytest.mark.skipif(OLD, reason="not in this version")
@pytest.mark.parametrize(("own", "asynchronous", "name"), COMPOSES)
def test_a_scheduler_that_orders_the_queue_composes(
    tmp_path: Path, own: dict[str, Any], asynchronous: bool, name: str
) -> None:
    config = {"scheduler_config": {"profiling_chunk_config": ON, **own}}
    engine = Engine(engine_config(tmp_path, additional_config=config, async_scheduling=asynchronous))
    assert type(engine.scheduler).__name__ == name
    engine.scheduler.isochunk.controller.use_model(MODEL, "test")
    engine.add("job-a", random.Random(9).choices(range(1000), k=7200))
    engine.run()
    assert [step["job-a"] for step in engine.steps] == list(plan(MODEL, 7200, 2, max_chunk=LIMIT, block=BLOCK).chunks)
    for at, length in enumerate((5000, 300, 7200, 40)):
        engine.add(f"job-{at}", random.Random(at).choices(range(1000), k=length), output_tokens=3)
    engine.run()
    assert not engine.scheduler.requests
    assert engine.scheduler.isochunk.health.failed == 0


def random_schedules(engine: Engine, schedules: int, outputs: tuple[int, ...]) -> list[int]:
    """Random traffic on a small KV cache; the schedules that did not end."""
    hung = []
    for schedule in range(schedules):
        rng = random.Random(schedule)
        for number in range(rng.randint(2, 8)):
            tokens = rng.choices(range(1000), k=rng.randint(1, 2500))
            engine.add(f"{schedule}-{number}", tokens, output_tokens=rng.choice(outputs))
            for _ in range(rng.randint(0, 6)):
                engine.step_fn()
        try:
            engine.run(3000)
        except AssertionError:
            hung.append(schedule)
            engine.scheduler.finish_requests(list(engine.scheduler.requests), _aborted())
            engine.run(3000)
    return hung


def _aborted() -> Any:
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ABORTED


@pytest.mark.skipif(not OLD, reason="not in this version")
def test_on_a_p_node_without_preemption_two_that_need_the_whole_cache_take_turns(tmp_path: Path) -> None:
    options = {"blocks": 212, "max_model_len": 3000, "enable_prefix_caching": False}
    engine = make(tmp_path, ON_TOP, kv_transfer_config=transfer("kv_producer"), **options)
    for name, length in (("a", 2000), ("b", 1300)):
        engine.add(name, random.Random(0).choices(range(1000), k=length), output_tokens=200)
    engine.run(5000)
    assert not engine.scheduler.requests


@pytest.mark.timeout(600)
@pytest.mark.parametrize("outputs", [(1,), (1, 2, 40)])
@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", None])
@pytest.mark.parametrize("delay", [None, 0.0])
def test_no_schedule_hangs_that_would_not_without_isochunk(
    tmp_path: Path, outputs: tuple[int, ...], role: str | None, delay: float | None
) -> None:
    options: dict[str, Any] = {"blocks": 500, "max_model_len": 4096, "enable_prefix_caching": False}
    if role:
        options["kv_transfer_config"] = transfer(role)
    engine = make(tmp_path, {"profiling_chunk_config": {**ON, "max_queue_delay": delay}}, **options)
    before = engine.scheduler.current_step
    assert random_schedules(engine, 200, outputs) == []
    assert engine.scheduler.isochunk.health.failed == 0
    assert engine.scheduler.current_step > before + 50
    assert engine.scheduler.isochunk.controller.counters.planned > 0
