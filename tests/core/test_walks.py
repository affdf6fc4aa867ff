"""Plans for costs with floors and jumps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.curves import gpu_models, least_ttft
from isochunk import CostModel, plan
from isochunk.core.curve import Curve
from isochunk.core.errors import PlanError
from isochunk.core.planner import MAX_STEPS, evaluate, static_ttft

from .test_curve import measured

GPU = [
    pytest.param(name, stages, tokens, id=f"{name}-P{stages}-{tokens}")
    for name in gpu_models(1)
    for stages in (2, 4, 16)
    for tokens in (2048, 5000, 8192, 30_000)
]


@pytest.mark.parametrize(("name", "stages", "tokens"), GPU)
def test_plan_is_within_one_percent_of_a_dynamic_programme_and_never_above_the_best_fixed_size(
    name: str, stages: int, tokens: int
) -> None:
    model = gpu_models(stages)[name]
    chosen = plan(model, tokens, stages, max_chunk=8192, block=16)
    sizes = np.append(np.arange(64, min(tokens, 8192), 64), min(tokens, 8192))
    assert chosen.ttft_s <= static_ttft(model, 0, tokens, sizes, stages).min() * (1 + 1e-9)
    assert chosen.ttft_s <= 1.01 * least_ttft(model, stages, tokens, 8192, 16 if tokens < 8192 else 64)


@pytest.mark.parametrize("tokens", [200_000, 1 << 20])
def test_long_prompts_too_never_come_after_the_best_fixed_size(tokens: int) -> None:
    for model in gpu_models(8).values():
        fixed = static_ttft(model, 0, tokens, np.arange(64, 8193, 64), 8).min()
        assert plan(model, tokens, 8, max_chunk=8192, block=16).ttft_s <= fixed * (1 + 1e-9)


@given(
    measured,
    st.integers(1, 200_000),
    st.integers(1, 16),
    st.floats(0, 0.999),
    st.integers(1, 20_000),
    st.sampled_from([1, 16, 64, 100, 128]),
)
def test_chunks_cover_the_prompt_within_the_limit_and_beat_fixed_sizes(
    model: CostModel, tokens: int, stages: int, hit: float, limit: int, block: int
) -> None:
    cached = int(hit * tokens)
    limit = max(limit, (tokens - cached) // 500 + 1)
    chosen = plan(model, tokens, stages, cached=cached, max_chunk=limit, block=block)
    assert sum(chosen.chunks) == tokens - cached
    assert all(1 <= chunk <= limit for chunk in chosen.chunks)
    assert chosen.ttft_s == pytest.approx(evaluate(model, chosen.chunks, stages, cached=cached))
    apart = 64 if 64 % block == 0 else block
    most = min(limit, tokens - cached)
    sizes = np.append(np.arange(apart, most, apart), most)
    assert chosen.ttft_s <= static_ttft(model, cached, tokens, sizes, stages).min() * (1 + 1e-9)


@given(measured, st.integers(1, 100_000), st.integers(2, 16), st.sampled_from([16, 64, 128]))
def test_inner_cut_points_of_plans_by_a_curve_lie_on_blocks(
    model: CostModel, tokens: int, stages: int, block: int
) -> None:
    limit = max(8192, tokens // 500 // block * block)
    chosen = plan(model, tokens + 3 * block, stages, cached=3 * block, max_chunk=limit, block=block)
    assert not (np.cumsum(chosen.chunks)[:-1] % block).any()


def test_steps_end_below_a_jump() -> None:
    # As on an H100: 512 tokens take 0.6 of what 513 take.
    curve = Curve((1, 256, 512, 513, 1024, 1025, 4096), (0.003, 0.003, 0.0046, 0.0075, 0.008, 0.0115, 0.04))
    for stages in (2, 4):
        chunks = plan(CostModel.measured(curve, 1e-12), 4096, stages, max_chunk=4096, block=16).chunks
        assert set(chunks) <= {512, 1024}


@pytest.mark.parametrize("c0", [1e-12, 1e-14])
@pytest.mark.parametrize("tokens", [1 << 20, 100_000_000])
@pytest.mark.parametrize(("stages", "block"), [(2, 1), (16, 16), (1024, 1)])
def test_a_tiny_step_cost_or_a_huge_prompt_makes_no_huge_plan(c0: float, tokens: int, stages: int, block: int) -> None:
    for curve in (None, Curve((1, 1000), (c0, 0.01))):
        chosen = plan(CostModel(c0, 1e-5, 1e-9, 1e-8, curve=curve), tokens, stages, block=block)
        assert len(chosen.chunks) <= MAX_STEPS


@pytest.mark.parametrize("policy", ["optimal", "first_chunk", "fixed"])
def test_more_steps_than_can_be_planned_are_refused(policy: str) -> None:
    with pytest.raises(PlanError, match="steps"):
        plan(CostModel(0.01, 1e-5, 1e-9), 100_000_000, 4, max_chunk=16, policy=policy)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["optimal", "first_chunk", "fixed"])
@pytest.mark.parametrize("models", [1, 3])
def test_a_curve_on_which_a_token_costs_nothing_is_planned(policy: str, models: int) -> None:
    flat = CostModel.measured(Curve((1, 2), (0.06, 0.06)), 0.0)
    chosen = plan((flat,) * models, 5000, max_chunk=64, block=16, policy=policy)  # type: ignore[arg-type]
    assert sum(chosen.chunks) == 5000
    assert max(chosen.chunks) <= 64


@given(st.lists(measured, min_size=2, max_size=5), st.integers(1, 100_000), st.integers(64, 20_000))
def test_stages_that_differ_and_have_curves_are_planned(models: list[CostModel], tokens: int, limit: int) -> None:
    limit = max(limit, tokens // 500 + 1)
    chosen = plan(models, tokens, max_chunk=limit, block=16)
    assert sum(chosen.chunks) == tokens
    assert max(chosen.chunks) <= limit
    assert chosen.ttft_s == pytest.approx(evaluate(models, chosen.chunks))


@pytest.mark.parametrize("name", list(gpu_models(1)))
def test_a_plan_over_a_curve_aims_at_what_its_steps_take(name: str) -> None:
    chosen = plan(gpu_models(4)[name], 65_536, 4, max_chunk=8192, block=16)
    assert min(chosen.step_seconds) <= chosen.target_s <= max(chosen.step_seconds)
