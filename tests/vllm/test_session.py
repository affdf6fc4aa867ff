"""The stored profile that a server finds, and what it says of what it measures."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from isochunk.vllm.testing import Engine

from .conftest import MODEL

Make = Callable[..., Engine]
STAGES = 2


@pytest.mark.parametrize("text", ['{"architectures": ["Qwen3ForCausalLM"]}', "notes", '{"format": "isochunk-prof'])
def test_a_file_of_the_users_that_is_no_profile_is_left_alone(
    make_engine: Make, tmp_path: Path, said: pytest.LogCaptureFixture, text: str
) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    engine = make_engine({"enabled": True, "profile": str(path)})
    assert "without storing" in said.text
    assert engine.scheduler.isochunk.as_dict()["profile"] is None
    assert path.read_text() == text
    assert not path.with_name("mine.json.refused").exists()


def test_a_broken_file_of_isochunks_own_is_kept_under_another_name(
    make_engine: Make, said: pytest.LogCaptureFixture
) -> None:
    path = Path(make_engine({"enabled": True}).scheduler.isochunk.as_dict()["profile"])
    path.parent.mkdir(parents=True)
    path.write_text('{"format": "isochunk-prof')
    engine = make_engine({"enabled": True})
    assert "corrupt or truncated" in said.text
    assert path.with_name(f"{path.name}.refused").exists()
    assert engine.scheduler.isochunk.as_dict()["profile"] == str(path)


def test_without_a_home_folder_the_server_starts(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("ISOCHUNK_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert make_engine({"enabled": True}).scheduler.isochunk.as_dict()["profile"] is None


@pytest.mark.parametrize(
    ("slower", "more", "counter", "words"),
    [
        (2.0, 0.0, "refits", "times what was predicted"),
        (1.0, 100 * MODEL.c0, "alarms", "steps take far longer than predicted"),
    ],
)
def test_drift_and_alarms_are_said(
    make_engine: Make,
    said: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    slower: float,
    more: float,
    counter: str,
    words: str,
) -> None:
    engine = make_engine({"enabled": True, "need_timing": True})
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now, time=lambda: clock.now)
    monkeypatch.setattr("isochunk.vllm.scheduler.time", clock)
    for number in range(6):
        engine.add(str(number), np.random.default_rng(number).integers(0, 1000, 16_000).tolist())
        while engine.has_work():
            before = len(engine.steps)
            engine.step_fn()
            for step, history in zip(engine.steps[before:], engine.histories[before:], strict=True):
                seconds = sum(MODEL.seconds(step[key], history[key]) for key in step)
                clock.now += STAGES * (slower * seconds + more)
    assert getattr(engine.scheduler.isochunk.controller.counters, counter) > 0
    assert words in said.text
