from types import SimpleNamespace
from typing import Any

import pytest

from isochunk.core.errors import ConfigError
from isochunk.vllm import compat


def test_the_installed_version_is_the_one_tried() -> None:
    assert compat.vllm_version().split("+")[0] == compat.TRIED


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
        ("vllm.engine.arg_utils.EngineArgs", "create_engine_config", compat.after_engine_config),
        ("vllm.v1.engine.core.EngineCoreProc", "run_busy_loop", compat.before_busy_loop),
    ],
)
def test_a_name_that_is_gone_fails_loudly(monkeypatch: pytest.MonkeyPatch, owner: str, name: str, patch: Any) -> None:
    monkeypatch.delattr(f"{owner}.{name}")
    with pytest.raises(ConfigError, match=rf"no {owner.rsplit('.', 1)[1]}.{name}.*upgrade isochunk"):
        patch(lambda _: None)


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
