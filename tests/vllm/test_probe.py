from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isochunk import CostModel
from isochunk.core.profile import load_profile
from isochunk.vllm.probe import Probe, probe_chunks
from isochunk.vllm.testing import Engine, engine_config

from .conftest import MODEL

ON = {"enabled": True}


@given(st.integers(1, 1 << 20), st.integers(1, 65536), st.sampled_from([1, 16, 128]))
def test_probe_prompts_keep_to_the_limits(tokens: int, limit: int, block: int) -> None:
    chunks = probe_chunks(tokens, limit, block)
    assert 1 <= len(chunks) <= 65
    assert sum(chunks) <= tokens
    assert all(1 <= chunk <= limit for chunk in chunks)


@pytest.mark.parametrize(("tokens", "limit"), [(8191, 8192), (32_767, 8192), (131_072, 8192)])
def test_small_and_large_chunks_at_small_and_large_history(tokens: int, limit: int) -> None:
    chunks = probe_chunks(tokens, limit, 16)
    history = np.concatenate(([0], np.cumsum(chunks)[:-1]))
    for low, high in ((0, 0.2), (0.35, 0.75), (0.7, 1)):
        near = np.array(chunks)[(history >= low * sum(chunks)) & (history <= high * sum(chunks))]
        assert near.max() >= 8 * near.min()


def steps(model: CostModel, noise: Callable[[int], float]) -> Callable[[str, int, float], Any]:
    chunks = probe_chunks(16_000, 8192, 16)
    history = np.concatenate(([0], np.cumsum(chunks)[:-1])).tolist()
    calls = []

    def prefill(request_id: str, tokens: int, deadline: float) -> list[tuple[int, int, float]]:
        calls.append(request_id)
        return [
            (c, h, model.seconds(c, h) * noise(len(calls) + at))
            for at, (c, h) in enumerate(zip(chunks, history, strict=True))
        ]

    return prefill


def test_at_most_three_prompts_and_65_steps() -> None:
    probe = Probe(chunks=probe_chunks(16_000, 8192, 16), max_seconds=60)
    fit = probe.run(steps(MODEL, lambda step: 1.0))
    assert fit is not None
    assert probe.steps <= 65
    assert probe.tokens <= 3 * 16_000
    assert not probe.busy
    assert fit.model.c0 == pytest.approx(MODEL.c0, rel=1e-6)


def test_a_busy_machine_is_noticed() -> None:
    rng = np.random.default_rng(0)
    probe = Probe(chunks=probe_chunks(16_000, 8192, 16), max_seconds=60)
    probe.run(steps(MODEL, lambda step: rng.uniform(1, 6)))
    assert probe.busy


def test_one_repeat_that_looks_far_too_short_counts_for_nothing() -> None:
    probe = Probe(chunks=probe_chunks(16_000, 8192, 16), max_seconds=60)
    fit = probe.run(steps(MODEL, lambda step: 0.2 if step % 7 == 0 else 1.0))
    assert fit is not None
    assert fit.model.c0 == pytest.approx(MODEL.c0, rel=0.05)


def test_no_time_sends_one_prompt_only() -> None:
    probe = Probe(chunks=[64, 64], max_seconds=0.0)
    sent: list[str] = []

    def prefill(request_id: str, tokens: int, deadline: float) -> list[tuple[int, int, float]]:
        sent.append(request_id)
        return []

    assert probe.run(prefill) is None
    assert len(sent) == 1


def test_the_engine_is_probed_through_its_scheduler_and_left_clean(
    tmp_path: Path, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine(ON, max_model_len=16_384)
    session = engine.scheduler.isochunk
    session.controller.use_model(None, None)
    free = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    session.start(engine)
    told = session.as_dict()
    assert told["probe"]["steps"] <= 65
    assert told["probe"]["tokens"] <= 3 * 16_384
    assert len({(c, h) for c, h, *_ in told["probe"]["samples"]}) > 15
    assert told["source"] == "probe"
    assert told["prompts"] == []
    assert not engine.scheduler.requests
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free
    assert engine.scheduler.kv_cache_manager.enable_caching
    assert load_profile(Path(told["profile"])).model == session.controller.model


def test_a_stored_profile_takes_no_probe(tmp_path: Path, make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(ON, max_model_len=16_384)
    engine.scheduler.isochunk.controller.use_model(None, None)
    engine.scheduler.isochunk.start(engine)
    again = Engine(engine_config(tmp_path, ON, max_model_len=16_384))
    again.scheduler.isochunk.start(again)
    told = again.scheduler.isochunk.as_dict()
    assert told["source"] == "stored"
    assert told["probe"] is None
    assert again.steps == []
    assert again.scheduler.isochunk.controller.model == engine.scheduler.isochunk.controller.model


@pytest.mark.parametrize("text", ['{"format": "isochunk-profile", "version": 99}', '{"c0": 0, "c1": 1, "c2": 1}'])
def test_a_profile_that_cannot_be_used_is_measured_again(
    tmp_path: Path, text: str, said: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    engine = Engine(engine_config(tmp_path, {**ON, "profile": str(path)}, max_model_len=16_384))
    engine.scheduler.isochunk.start(engine)
    assert engine.scheduler.isochunk.as_dict()["source"] == "probe"
    assert load_profile(path).source == "probe"
    assert (tmp_path / "p.json.refused").read_text() == text
    assert str(path) in said.text


def test_a_probe_cut_short_by_shutdown_is_not_stored(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(ON, max_model_len=16_384)
    session = engine.scheduler.isochunk
    session.controller.use_model(None, None)
    turns = iter(range(1000))
    engine.is_running = lambda: next(turns) < 20  # type: ignore[method-assign]
    session.start(engine)
    assert not Path(session.as_dict()["profile"]).exists()
    assert not engine.scheduler.requests


def test_a_probe_that_fails_leaves_an_engine_that_serves(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(ON, max_model_len=16_384)
    session = engine.scheduler.isochunk
    session.controller.use_model(None, None)
    step = engine.step_fn
    turns = 0

    def failing() -> None:
        nonlocal turns
        turns += 1
        if turns == 5:
            raise RuntimeError("broken on purpose")
        step()

    engine.step_fn = failing  # type: ignore[method-assign]
    session.start(engine)
    engine.step_fn = step  # type: ignore[method-assign]
    assert session.controller.model is None
    assert session.controller.counters.fallbacks == 1
    engine.add("a", [1] * 5000)
    engine.run()
    assert sum(step.get("a", 0) for step in engine.steps) == 5000
