import sys
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from isochunk.core.errors import ConfigError
from isochunk.vllm import compat, versions


def test_the_installed_version_is_one_of_those_isochunk_is_made_for() -> None:
    assert versions.unknown(compat.vllm_version()) is None


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("0.22.1", "older"),
        ("0.23.0", None),
        ("0.27.1+cpu", None),
        ("0.33.0rc2", None),
        ("0.34.0", "newer"),
        ("1.0.0", "newer"),
        ("1.0rc1", "newer"),
        ("dev", "no release"),
        ("0.1.dev5+g123", "no release"),
        ("0.0.0.dev1+g123", "no release"),
    ],
)
def test_versions_outside_the_range_are_told(version: str, said: str | None) -> None:
    told = versions.unknown(version)
    assert (told is None) if said is None else (told is not None and said in told and versions.supported() in told)


def test_patching_twice_calls_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine.core import EngineCoreProc

    calls: list[Any] = []
    monkeypatch.setattr(EngineCoreProc, "run_busy_loop", lambda self: "served")
    compat.before_busy_loop(calls.append)
    compat.before_busy_loop(calls.append)
    assert EngineCoreProc.run_busy_loop("engine") == "served"
    assert calls == ["engine"]


@pytest.mark.parametrize(
    ("owner", "name", "patch"),
    [
        (
            "vllm.engine.arg_utils.EngineArgs",
            "create_engine_config",
            partial(compat.around_engine_config, lambda config, _: config),
        ),
        ("vllm.v1.engine.core.EngineCoreProc", "run_busy_loop", compat.before_busy_loop),
        ("vllm.v1.executor.abstract.Executor", "get_class", compat.use_executor),
    ],
)
def test_a_name_that_is_gone_fails_loudly(monkeypatch: pytest.MonkeyPatch, owner: str, name: str, patch: Any) -> None:
    monkeypatch.delattr(f"{owner}.{name}")
    with pytest.raises(ConfigError, match=rf"no {owner.rsplit('.', 1)[1]}.{name}.*upgrade isochunk"):
        patch(lambda *_: None)


def test_methods_are_added_to_the_engine() -> None:
    from vllm.v1.engine.core import EngineCore

    compat.add_engine_methods({"isochunk_test": lambda self: 1})
    assert EngineCore.isochunk_test(None) == 1
    del EngineCore.isochunk_test


def test_keys_are_compared_as_vllm_does() -> None:
    assert compat.token_is_valid({"Authorization": "Bearer right"}, ["other", "right"])
    assert not compat.token_is_valid({"Authorization": "Bearer wrong"}, ["right"])
    assert not compat.token_is_valid({}, ["right"])


@pytest.mark.parametrize(
    ("block", "mamba", "expected"), [(128, False, 16), (16, False, 16), (528, True, 528), (24, False, 24)]
)
def test_chunks_end_on_blocks_only_where_vllm_needs_it(block: int, mamba: bool, expected: int) -> None:
    scheduler = SimpleNamespace(block_size=block, need_mamba_block_aligned_split=mamba)
    assert compat.alignment(scheduler) == expected


def test_readers_nap_where_they_would_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    waited: list[int | None] = []
    naps: list[float] = []
    monkeypatch.setattr(SpinCondition, "wait", lambda self, timeout_ms=None: waited.append(timeout_ms))
    monkeypatch.setattr(time, "sleep", naps.append)
    compat.nap_in_queues(0.25)
    now = time.monotonic()
    SpinCondition.wait(SimpleNamespace(last_read=now, busy_loop_s=1000), 7)
    assert (naps, waited) == ([0.25], [])
    SpinCondition.wait(SimpleNamespace(last_read=now, busy_loop_s=-1), 7)
    assert (naps, waited) == ([0.25], [7])


def test_nixl_agents_get_a_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nixl", reason="NIXL is not installed")
    from vllm.distributed import nixl_utils

    wrapper = nixl_utils._load_nixl_attr("NixlWrapper")
    bindings = sys.modules[wrapper.__module__].nixlBind
    monkeypatch.setattr(bindings, "nixlAgent", lambda name, config: (name, config.pthrDelay))
    monkeypatch.setattr(nixl_utils, "_load_nixl_attr", lambda name: wrapper)
    compat.nap_in_nixl(500e-6)
    nixl_utils._load_nixl_attr("NixlWrapper")
    assert bindings.nixlAgent("a", SimpleNamespace(pthrDelay=0)) == ("a", 500)


def test_workers_keep_their_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms.cpu import CpuPlatform

    monkeypatch.setattr(CpuPlatform, "discover_numa_topology", lambda: [[0, 1]])
    compat.keep_cores()
    assert CpuPlatform().discover_numa_topology() == []


def test_the_cpu_is_device_0(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def none_there() -> int:
        raise RuntimeError("no accelerator")

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_device_index", none_there)
    compat.device_index_of_cpu()
    assert torch.accelerator.current_device_index() == 0


def test_nothing_is_changed_unless_the_plugin_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from isochunk.vllm import shared_cores

    called: list[float] = []
    for name in ("nap_in_queues", "nap_in_nixl"):
        monkeypatch.setattr(compat, name, called.append)
    for name in ("keep_cores", "device_index_of_cpu"):
        monkeypatch.setattr(compat, name, lambda: called.append(0))
    for plugins in (None, "isochunk"):
        monkeypatch.delenv("VLLM_PLUGINS", raising=False) if plugins is None else monkeypatch.setenv(
            "VLLM_PLUGINS", plugins
        )
        shared_cores.register()
    assert called == []
    monkeypatch.setenv("VLLM_PLUGINS", f"isochunk,{shared_cores.PLUGIN}")
    shared_cores.register()
    assert len(called) == 4
