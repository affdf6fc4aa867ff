import json
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from isochunk import CostModel, makespan, plan
from isochunk.core.errors import PlanError
from isochunk.core.planner import POLICIES, evaluate, law_target, static_ttft

from .conftest import DATA, models, published

MILLION = 1 << 20
GRID = [
    pytest.param(model.scaled(measured / stages, step=1), stages, tokens, id=f"{name}-P{stages}-{tokens}")
    for name, (model, measured) in published().items()
    for stages in (2, 4, 8, 16)
    for tokens in (2048, 8192, 32768, 131072, 262144, MILLION)
]


def dynamic_programme(model: CostModel, stages: int, tokens: int, points: int) -> float:
    """Least TTFT over all cuts at ``points`` places, for each bound on the longest step."""
    at = np.unique(np.round(np.linspace(0, tokens, points + 1)))
    start, end = at[:, None], at[None, :]
    seconds = np.where(end > start, model.seconds(np.maximum(end - start, 0.0), start + 0 * end), np.inf)
    best = math.inf
    target = law_target(model, model.work(0, tokens), stages, model.step_cost(0, tokens))
    for bound in [seconds[0, -1], *np.linspace(0.7 * target, 1.6 * target, 40)]:
        total = np.full(len(at), np.inf)
        total[0] = 0
        allowed = np.where(seconds <= bound, seconds, np.inf)
        for j in range(1, len(at)):
            total[j] = (total[:j] + allowed[:j, j]).min()
        best = min(best, total[-1] + (stages - 1) * bound)
    return best


@pytest.mark.parametrize(("model", "stages", "tokens"), GRID)
def test_plan_is_within_one_percent_of_a_dynamic_programme_and_never_above_the_best_static(
    model: CostModel, stages: int, tokens: int
) -> None:
    chosen = plan(model, tokens, stages, block=16)
    points = min(max(8 * len(chosen.chunks), 128), 1024)
    assert chosen.ttft_s <= 1.01 * dynamic_programme(model, stages, tokens, points)
    assert chosen.ttft_s <= static_ttft(model, 0, tokens, np.arange(16, tokens + 16, 16), stages).min() * (1 + 1e-9)


@given(
    models,
    st.integers(1, 200_000),
    st.integers(1, 16),
    st.floats(0, 0.999),
    st.integers(1, 20_000),
    st.sampled_from([1, 16, 64, 128]),
    st.sampled_from(POLICIES),
)
def test_chunks_cover_the_prompt_within_the_limit(
    model: CostModel, tokens: int, stages: int, hit: float, limit: int, block: int, policy: str
) -> None:
    cached = int(hit * tokens)
    limit = max(limit, (tokens - cached) // 500 + 1)
    chosen = plan(model, tokens, stages, cached=cached, max_chunk=limit, block=block, policy=policy)  # type: ignore[arg-type]
    assert sum(chosen.chunks) == tokens - cached
    assert all(1 <= chunk <= limit for chunk in chosen.chunks)
    assert chosen.ttft_s == pytest.approx(makespan(chosen.step_seconds, stages))


@given(models, st.integers(1, 100_000), st.integers(2, 16), st.floats(0, 0.99), st.integers(64, 20_000))
@example(CostModel(0.0078125, 1.2e-7, 0.0, 1.2e-7), 12_673, 2, 0.0, 704)
def test_plan_is_never_worse_than_the_best_static_size(
    model: CostModel, tokens: int, stages: int, hit: float, limit: int
) -> None:
    cached = int(hit * tokens)
    limit = max(limit, (tokens - cached) // 500 + 1)
    most = min(limit, tokens - cached)
    sizes = np.unique(np.concatenate((np.arange(16, most, 16), [most])))
    sizes = sizes[np.ceil((tokens - cached) / sizes) <= 2000]
    chosen = plan(model, tokens, stages, cached=cached, max_chunk=limit, block=16)
    assert chosen.ttft_s <= static_ttft(model, cached, tokens, sizes, stages).min() * 1.002


def test_inner_cut_points_lie_on_blocks(model: CostModel) -> None:
    chosen = plan(model, 10_000, 2, cached=96, block=32)
    assert all(point % 32 == 0 for point in 96 + np.cumsum(chosen.chunks)[:-1])


def test_there_is_no_small_last_chunk(model: CostModel) -> None:
    for tokens in range(8000, 9000, 37):
        steps = plan(model, tokens, 2, block=16).step_seconds
        assert min(steps) > 0.8 * max(steps)


def test_static_closed_form_is_the_makespan(model: CostModel) -> None:
    for size in (100, 511, 512, 8192):
        chunks = plan(model, 5000, 4, cached=200, max_chunk=size, policy="fixed").chunks
        assert static_ttft(model, 200, 5000, [size], 4)[0] == pytest.approx(evaluate(model, chunks, 4, cached=200))


def test_first_chunk_rule_keeps_the_time_of_its_first_chunk(model: CostModel) -> None:
    chosen = plan(model, 32_768, 2, max_chunk=4096, policy="first_chunk")
    assert chosen.chunks[0] == 4096
    assert np.allclose(chosen.step_seconds[:-1], model.seconds(4096), rtol=0.01)


def test_closed_form_of_the_law_is_met_for_a_long_prompt() -> None:
    model, _ = published()["qwen3-235b@atlas-a3/pp2tp8/mid"]
    work = model.work(0, 262144)
    assert plan(model, 262144, 2).ttft_s == pytest.approx((math.sqrt(work) + math.sqrt(model.c0)) ** 2, rel=0.002)


def test_published_kimi_sweep_is_reproduced_to_half_a_percent() -> None:
    model, stages = published()["kimi-k2.5-mxfp4@mi355x/pp4tp1"]
    table = json.loads((DATA / "published_ttft.json").read_text())
    sweep = table["fixed_chunk_sweep"]
    for row in sweep["rows"]:
        if "chunk" in row:
            ttft = plan(model, sweep["prompt_tokens"], stages, max_chunk=row["chunk"], policy="fixed").ttft_s
        else:
            ttft = evaluate(model, row["chunks"], stages)
        assert ttft == pytest.approx(row["model_predicted_s"], rel=0.005)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"tokens": 0}, "tokens = 0"),
        ({"cached": 100}, "cached = 100"),
        ({"cached": -1}, "cached = -1"),
        ({"stages": 0}, "stages = 0"),
        ({"block": 0}, "block = 0"),
        ({"max_chunk": 0}, "max_chunk = 0"),
        ({"policy": "fixed"}, "max_chunk"),
        ({"policy": "best"}, "policy = 'best'"),
    ],
)
def test_bad_arguments_are_named(model: CostModel, arguments: dict[str, object], named: str) -> None:
    with pytest.raises(PlanError, match=named):
        plan(model, **{"tokens": 100, "stages": 2, **arguments})  # type: ignore[arg-type]
