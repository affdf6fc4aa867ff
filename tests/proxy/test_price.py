from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isochunk.core.cost import CostModel
from isochunk.core.errors import ModelError
from isochunk.core.planner import plan
from isochunk.proxy.price import NodeModel, read_status

COSTS = st.builds(
    CostModel,
    st.floats(1e-4, 0.1),
    st.floats(1e-6, 1e-3),
    st.floats(0, 1e-7),
    st.floats(0, 1e-6),
)
STATUS = {
    "model": {"c0": 0.01, "c1": 1e-5, "c2": 1e-9, "c3": 0.0},
    "stages": 4,
    "max_num_batched_tokens": 8192,
    "block_size": 16,
    "queue": {"running": 1, "waiting": 0},
}


@settings(max_examples=60, deadline=None)
@given(COSTS, st.integers(2, 8), st.integers(200, 200_000), st.floats(0, 0.9))
def test_the_closed_form_is_close_to_the_plan(cost: CostModel, stages: int, tokens: int, share: float) -> None:
    cached = int(tokens * share)
    model = NodeModel(cost=cost, stages=stages, max_chunk=16384, block=16)
    price = model.price(tokens, cached)
    chosen = plan(cost, tokens, stages, cached=cached, max_chunk=16384, block=16)
    assert price.ttft_s == pytest.approx(chosen.ttft_s, rel=0.25)
    assert cost.work(cached, tokens) + cost.c0 <= price.busy_s <= price.ttft_s


@given(COSTS, st.integers(1, 8), st.integers(2, 1_000_000))
def test_a_prefix_hit_never_costs_more_work(cost: CostModel, stages: int, tokens: int) -> None:
    model = NodeModel(cost=cost, stages=stages)
    whole, half = model.price(tokens), model.price(tokens, tokens // 2)
    assert cost.work(tokens // 2, tokens) <= cost.work(0, tokens)
    assert half.ttft_s <= whole.ttft_s + cost.c0 * stages + cost.c3 * tokens * stages * 2


def test_one_stage_has_no_fill() -> None:
    price = NodeModel(cost=CostModel(0.01, 1e-5, 1e-9)).price(10_000)
    assert price.busy_s == price.ttft_s == pytest.approx(2 * 0.01 + 0.1 + 0.05)


def calls_of(model: NodeModel, tokens: int) -> int:
    """Python calls that pricing a prompt takes: what it costs on any machine."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        model.price(tokens)
    finally:
        sys.setprofile(None)
    return calls


def test_a_million_tokens_cost_no_more_to_price_than_a_thousand() -> None:
    model = NodeModel(cost=CostModel(0.01, 1e-5, 1e-9, 1e-8), stages=8)
    assert calls_of(model, 1_000_000) <= max(2 * calls_of(model, 1000), 300)


def slower(factor: float, **limits: int) -> NodeModel:
    return NodeModel(cost=CostModel(factor * 0.01, factor * 1e-5, factor * 1e-9), **{"stages": 4, **limits})


def test_models_that_wobble_are_averaged_and_one_that_stays_is_followed() -> None:
    model = slower(1.0)
    for _ in range(100):
        model = model.followed_by(slower(1.2)).followed_by(slower(0.8))
    assert model.price(20_000).busy_s == pytest.approx(slower(1.0).price(20_000).busy_s, rel=0.02)
    for _ in range(100):
        model = model.followed_by(slower(1.2))
    assert model.price(20_000).busy_s == pytest.approx(slower(1.2).price(20_000).busy_s, rel=0.02)


@pytest.mark.parametrize("changed", [slower(2.0), slower(0.5), slower(1.0, stages=2), slower(1.0, max_chunk=4096)])
def test_a_node_that_has_changed_is_believed_at_once(changed: NodeModel) -> None:
    assert slower(1.0).followed_by(changed) is changed


def test_a_nodes_status_is_read() -> None:
    model = read_status(STATUS)
    assert model == NodeModel(cost=CostModel(0.01, 1e-5, 1e-9), stages=4, max_chunk=8192, block=16)


def test_a_node_without_a_model_has_none() -> None:
    assert read_status({**STATUS, "model": None}) is None


@pytest.mark.parametrize(
    "status", [{}, [], "x", {**STATUS, "stages": 0}, {**STATUS, "model": {"c0": 0}}, {**STATUS, "model": 1}]
)
def test_a_status_of_another_form_is_an_error(status: object) -> None:
    with pytest.raises(ModelError):
        read_status(status)
