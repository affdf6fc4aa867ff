"""The contract with vLLM-Ascend, kept by a small stand-in; `python -m tests.versions --ascend` has the real one.

The stand-in does what isochunk knows of it: it reads the section under the keys of its version, chooses scheduler
classes while vLLM's configuration is made, and on P nodes of 0.23 replaces vLLM's scheduler by one that neither counts
its steps nor preempts.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched import scheduler as vllm_scheduler
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler

from isochunk import plan
from isochunk.core.errors import ConfigError
from isochunk.vllm import compat
from isochunk.vllm.scheduler import NarrowedScheduler
from isochunk.vllm.testing import BLOCK, Engine, engine_config

from .conftest import MODEL

ON = {"enabled": True}
NESTED = {"scheduler_config": {"profiling_chunk_config": ON}}
ON_TOP = {"profiling_chunk_config": ON}


class Orders(VllmScheduler):  # type: ignore[misc]
    """Notes something before each step, and lets vLLM schedule."""

    steps = 0

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.steps += 1
        return super().schedule(*args, **kwargs)


class Replaces(VllmScheduler):  # type: ignore[misc]
    """Hands out blocks by itself."""

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        for request in self.running:
            self.kv_cache_manager.allocate_slots(request, 1)


class WithoutPreemption(VllmScheduler):  # type: ignore[misc]
    """As on a P node of 0.23: steps are not counted, and who finds no room waits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._disable_preemption = True

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        step, running = self.current_step, list(self.running)
        for request in running:
            request.next_decode_eligible_step = 0
        free = self.kv_cache_manager.block_pool.get_num_free_blocks()
        stuck = [request for request in running if free == 0 and request.num_computed_tokens % BLOCK == 0]
        self.running[:] = [request for request in running if request not in stuck]
        output = super().schedule(*args, **kwargs)
        self.running[:0] = stuck
        self.current_step = max(step, self.current_step - 1)
        return output


@pytest.fixture(params=["0.23.0", "0.27.1"])
def ascend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the platform does; its ``chosen`` class and ``seen`` sections."""
    from vllm.platforms import current_platform

    told: dict[str, Any] = {"chosen": None, "seen": [], "nested": request.param != "0.23.0"}
    platform = type(current_platform)
    first = platform.check_and_update_config

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        first(vllm_config)
        config = vllm_config.additional_config or {}
        section = config.get("profiling_chunk_config")
        if told["nested"]:
            section = config.get("scheduler_config", {}).get("profiling_chunk_config", section)
        told["seen"].append(section)
        if section and section["enabled"]:
            if not 0 < section.get("smooth_factor", 1) <= 1:
                raise ValueError("smooth_factor must be in (0, 1]")
            vllm_config.scheduler_config.scheduler_cls = f"{__name__}.Replaces"
        if told["chosen"]:
            vllm_config.scheduler_config.scheduler_cls = told["chosen"]

    monkeypatch.setattr(platform, "check_and_update_config", classmethod(check_and_update_config))
    monkeypatch.setattr("isochunk.vllm.compat.ascend.metadata.version", lambda name: request.param)
    monkeypatch.setitem(sys.modules, "vllm_ascend", types.ModuleType("vllm_ascend"))
    return told


@pytest.mark.parametrize("config", [NESTED, ON_TOP, {**NESTED, **ON_TOP}])
@pytest.mark.parametrize("keys", [{}, {"smooth_factor": 0.0}, {"need_timing": True}])
def test_isochunk_plans_and_the_platform_sees_no_section(
    tmp_path: Path, ascend: dict[str, Any], config: dict[str, Any], keys: dict[str, Any]
) -> None:
    place = config.get("scheduler_config", config)
    given = {**config, **({"scheduler_config": {}} if "scheduler_config" in config else {})}
    target = given.get("scheduler_config", given)
    target["profiling_chunk_config"] = {**place["profiling_chunk_config"], **keys}
    made = engine_config(tmp_path, additional_config=given)
    assert made.scheduler_config.scheduler_cls == "isochunk.vllm.Scheduler"
    assert ascend["seen"]
    assert not any(ascend["seen"])


@pytest.mark.parametrize("config", [NESTED, ON_TOP])
def test_their_planner_comes_back_on_request(tmp_path: Path, ascend: dict[str, Any], config: dict[str, Any]) -> None:
    section = {**ON, "planner": "ascend"}
    given = (
        {"scheduler_config": {"profiling_chunk_config": section}}
        if config is NESTED
        else {"profiling_chunk_config": section}
    )
    made = engine_config(tmp_path, additional_config=given)
    assert made.scheduler_config.scheduler_cls == f"{__name__}.Replaces"
    assert ascend["seen"][-1] == section


def test_a_class_of_isochunks_and_their_planner_exclude_each_other(tmp_path: Path, ascend: dict[str, Any]) -> None:
    config = {"profiling_chunk_config": {**ON, "planner": "ascend"}}
    with pytest.raises(ConfigError, match="exclude each other"):
        engine_config(tmp_path, additional_config=config, scheduler_cls="isochunk.vllm.Scheduler")


def test_a_class_that_orders_the_queue_composes(tmp_path: Path, ascend: dict[str, Any]) -> None:
    ascend["chosen"] = f"{__name__}.Orders"
    engine = Engine(engine_config(tmp_path, additional_config=NESTED))
    assert isinstance(engine.scheduler, NarrowedScheduler)
    assert isinstance(engine.scheduler, Orders)
    engine.scheduler.isochunk.controller.use_model(MODEL, "test")
    engine.add("a", list(range(900)) * 8)
    engine.run()
    assert [step["a"] for step in engine.steps] == list(plan(MODEL, 7200, 2, max_chunk=2048, block=BLOCK).chunks)
    assert engine.scheduler.steps >= len(engine.steps)


def test_a_class_that_replaces_schedule_is_refused_by_name(tmp_path: Path, ascend: dict[str, Any]) -> None:
    ascend["chosen"] = f"{__name__}.Replaces"
    with pytest.raises(ConfigError, match=r"Replaces, which replaces vLLM's schedule\(\)"):
        engine_config(tmp_path, additional_config=NESTED)


def test_balance_scheduling_that_is_on_in_the_engine_is_refused(make_engine: Any) -> None:
    scheduler = make_engine(None).scheduler
    scheduler._balance_enabled = True
    with pytest.raises(ConfigError, match="balance scheduling"):
        compat.check_scheduler(scheduler)


@pytest.mark.parametrize("mended", [True, False])
def test_without_preemption_prompts_that_don_t_fit_together_follow_each_other(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch, mended: bool
) -> None:
    """And without what isochunk adds they wait for each other for ever, so that the case is one."""
    mixed = type("Mixed", (NarrowedScheduler, WithoutPreemption), {"__module__": "isochunk.vllm.scheduler"})
    monkeypatch.setattr("isochunk.vllm.scheduler.Scheduler", mixed)
    if not mended:
        monkeypatch.setattr(compat, "mend_own_schedule", lambda scheduler: None)
    engine = make_engine(ON, blocks=212, max_model_len=3000, enable_prefix_caching=False)
    for name, length in (("a", 2000), ("b", 1300)):
        engine.add(name, list(range(length)), output_tokens=200)
    if mended:
        engine.run(5000)
        assert not engine.scheduler.requests
        assert engine.scheduler.current_step >= len(engine.steps)
    else:
        with pytest.raises(AssertionError, match="still busy"):
            engine.run(5000)


def test_classes_that_vllm_has_itself_replace_nothing() -> None:
    assert compat.class_that_replaces_schedule(vllm_scheduler.Scheduler) is None
    assert compat.class_that_replaces_schedule(Orders) is None
    assert compat.class_that_replaces_schedule(Replaces) == f"{__name__}.Replaces"
