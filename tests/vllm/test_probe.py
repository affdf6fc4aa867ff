from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.outputs import ModelRunnerOutput

from benchmarks.curves import gpu_models
from isochunk import CostModel, plan
from isochunk.core.planner import evaluate
from isochunk.core.profile import Profile, load_profile, save_profile
from isochunk.vllm.probe import Probe, Steps, probe_chunks
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


class Machine:
    """An engine whose steps take what a model says; its clock is the probe's."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        model: CostModel,
        noise: Callable[[], float] = lambda: 1.0,
        stages: int = 2,
    ) -> None:
        self.now, self.model, self.noise, self.stages = 1000.0, model, noise, stages
        self.asked: list[tuple[int, int]] = []
        monkeypatch.setattr("isochunk.vllm.probe.time", SimpleNamespace(monotonic=lambda: self.now))

    def probe(self, longest: int = 16_000, limit: int = 8192, seconds: float = 60.0) -> Probe:
        probe = Probe(
            chunks=probe_chunks(longest, limit, 16),
            max_chunk=limit,
            block=16,
            stages=self.stages,
            max_seconds=seconds,
        )
        self.began = self.now
        self.fit = probe.run(lambda prompts: self.send(probe, prompts))
        return probe

    def send(self, probe: Probe, prompts: dict[str, list[int]]) -> Steps:
        steps: list[tuple[int, int, float]] = []
        exits: list[float] = []
        left = [self.now] * self.stages
        for key, chunks in prompts.items():
            history, first = 0, len(steps)
            while history < sum(chunks) and not probe.over:
                self.now = max(self.now, exits[-self.stages] if len(exits) >= self.stages else self.now)
                out = sum(exit_ <= self.now for exit_ in exits)
                chunk = probe.chunk_at(key, history, steps[first:out])
                assert chunk is not None
                seconds = self.model.seconds(chunk, history) * self.noise()
                for stage in range(self.stages):
                    left[stage] = max(left[stage], left[stage - 1] if stage else self.now) + seconds
                exits.append(left[-1])
                steps.append((chunk, history, seconds))
                history += chunk
        self.now = left[-1]
        return steps


def test_a_straight_line_takes_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, MODEL)
    probe = machine.probe()
    assert machine.fit is not None
    assert probe.steps <= 65
    assert probe.tokens <= 3 * 16_000
    assert not probe.busy
    assert machine.fit.model.curve is None
    assert machine.fit.model.c0 == pytest.approx(MODEL.c0, rel=1e-6)


def test_noise_finds_no_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        machine = Machine(monkeypatch, MODEL, lambda: 1 + 0.04 * abs(rng.standard_normal()))  # noqa: B023
        machine.probe()
        assert machine.fit is not None
        assert machine.fit.model.curve is None


@pytest.mark.parametrize("stages", [2, 8])
@pytest.mark.parametrize("name", list(gpu_models(1)))
def test_a_gpus_curve_is_found(monkeypatch: pytest.MonkeyPatch, name: str, stages: int) -> None:
    true = gpu_models(stages)[name]
    rng = np.random.default_rng(0)
    machine = Machine(monkeypatch, true, lambda: 1 + 0.003 * abs(rng.standard_normal()), stages)
    machine.probe(100_000)
    assert machine.fit is not None
    found = machine.fit.model
    assert found.curve is not None
    for tokens in (1024, 2048, 4096, 8192, 32_768, 100_000):
        chosen = plan(found, tokens, stages, max_chunk=8192, block=16)
        taken = evaluate(true, chosen.chunks, stages)
        assert chosen.ttft_s == pytest.approx(taken, rel=0.05)


@pytest.mark.parametrize("seconds", [0.5, 2.0, 5.0, 20.0])
@pytest.mark.parametrize("stages", [2, 8])
def test_the_bound_holds_however_slow_the_machine(monkeypatch: pytest.MonkeyPatch, seconds: float, stages: int) -> None:
    for true in (MODEL, MODEL.scaled(10), gpu_models(stages)["phi-2@h100/tp1"], CostModel(0.01, 0.0028, 2.4e-6)):
        machine = Machine(monkeypatch, true, stages=stages)
        machine.probe(32_000, seconds=seconds)
        assert machine.now - machine.began <= seconds + 2 * stages * true.seconds(16)


def test_a_size_that_would_not_fit_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, CostModel(0.01, 0.0028, 2.4e-6))  # 8192 tokens take 100 s
    probe = machine.probe(32_000, seconds=60)
    sizes = [chunk for chunk, _, _ in probe.samples]
    assert 512 <= max(sizes) < 8192
    assert machine.fit is not None


def test_a_busy_machine_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    assert Machine(monkeypatch, MODEL, lambda: rng.uniform(1, 10)).probe().busy


def test_one_repeat_that_looks_far_too_short_counts_for_little(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = iter(range(10_000))
    machine = Machine(monkeypatch, MODEL, lambda: 0.2 if next(turns) % 17 == 3 else 1.0)
    machine.probe()
    assert machine.fit is not None
    assert machine.fit.model.c0 == pytest.approx(MODEL.c0, rel=0.1)


def test_no_time_measures_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, MODEL)
    assert machine.probe(seconds=0.0).steps <= 3
    assert machine.fit is None


class Clocked(Engine):
    """An engine on whose two stages a step takes what the model says, by the clock that is isochunk's too."""

    now = 1000.0
    free = (0.0, 0.0)  # when each stage has ended its last step

    def schedule(self) -> Any:
        output = super().schedule()
        requests = self.scheduler.requests
        parts = [(new, requests[key].num_computed_tokens - new) for key, new in output.num_scheduled_tokens.items()]
        seconds = sum(MODEL.seconds(chunk, history) for chunk, history in parts)
        first = max(self.free[0], self.now) + seconds
        output.end = max(self.free[1], first) + seconds
        self.free = (first, output.end)
        return output

    def answer(self, output: Any, sampling: set[str]) -> ModelRunnerOutput:
        self.now = max(self.now, output.end)
        return super().answer(output, sampling)


@pytest.fixture
def make_clocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], Clocked]:
    """An engine that has no model of its cost yet."""

    def make(section: dict[str, Any]) -> Clocked:
        engine = Clocked(engine_config(tmp_path, {"need_timing": False, **section}, max_model_len=16_384))
        clock = SimpleNamespace(monotonic=lambda: engine.now, time=lambda: engine.now)
        for name in ("scheduler", "probe"):
            monkeypatch.setattr(f"isochunk.vllm.{name}.time", clock)
        return engine

    return make


def test_the_engine_is_probed_through_its_scheduler_and_left_clean(
    make_clocked: Callable[[dict[str, Any]], Clocked],
) -> None:
    engine = make_clocked(ON)
    session = engine.scheduler.isochunk
    free = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    session.start(engine)
    told = session.as_dict()
    assert told["probe"]["steps"] == len(engine.steps)
    assert len({(c, h) for c, h, *_ in told["probe"]["samples"]}) > 15
    assert told["source"] == "probe"
    assert told["prompts"] == []
    assert not engine.scheduler.requests
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free
    assert engine.scheduler.kv_cache_manager.enable_caching
    assert session.controller.model.seconds(1024, 8192) == pytest.approx(MODEL.seconds(1024, 8192), rel=0.02)
    assert load_profile(Path(told["profile"])).model == session.controller.model


def test_a_stored_profile_takes_no_probe(tmp_path: Path, make_engine: Callable[..., Engine]) -> None:
    session = make_engine(ON, max_model_len=16_384).scheduler.isochunk
    save_profile(session._path, Profile(model=MODEL, key=session._key))
    again = Engine(engine_config(tmp_path, ON, max_model_len=16_384))
    again.scheduler.isochunk.start(again)
    told = again.scheduler.isochunk.as_dict()
    assert told["source"] == "stored"
    assert told["probe"] is None
    assert again.steps == []
    assert again.scheduler.isochunk.controller.model == MODEL


@pytest.mark.parametrize("text", ['{"format": "isochunk-profile", "version": 99}', '{"c0": 0, "c1": 1, "c2": 1}'])
def test_a_profile_that_cannot_be_used_is_measured_again(
    tmp_path: Path, text: str, said: pytest.LogCaptureFixture, make_clocked: Callable[[dict[str, Any]], Clocked]
) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    engine = make_clocked({**ON, "profile": str(path)})
    engine.scheduler.isochunk.start(engine)
    assert engine.scheduler.isochunk.as_dict()["source"] == "probe"
    assert load_profile(path).source == "probe"
    assert (tmp_path / "p.json.refused").read_text() == text
    assert str(path) in said.text


def test_a_probe_cut_short_by_shutdown_is_not_stored(make_clocked: Callable[[dict[str, Any]], Clocked]) -> None:
    engine = make_clocked(ON)
    session = engine.scheduler.isochunk
    turns = iter(range(1000))
    engine.is_running = lambda: next(turns) < 20  # type: ignore[method-assign]
    session.start(engine)
    assert not Path(session.as_dict()["profile"]).exists()
    assert not engine.scheduler.requests


def test_a_probe_that_fails_leaves_an_engine_that_serves(make_clocked: Callable[[dict[str, Any]], Clocked]) -> None:
    engine = make_clocked(ON)
    session = engine.scheduler.isochunk
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


def test_workers_that_end_no_step_end_the_engine_as_they_would_without_isochunk(
    make_clocked: Callable[[dict[str, Any]], Clocked], said: pytest.LogCaptureFixture
) -> None:
    engine = make_clocked(ON)
    turns = 0

    def stuck() -> None:
        nonlocal turns
        turns += 1
        if turns == 5:
            raise TimeoutError("RPC call to sample_tokens timed out.")
        assert turns < 5, "vLLM waits minutes for each such step"
        Clocked.step_fn(engine)

    engine.step_fn = stuck  # type: ignore[method-assign]
    with pytest.raises(TimeoutError, match="sample_tokens"):
        engine.scheduler.isochunk.start(engine)
    assert "max_probe_seconds" in said.text
