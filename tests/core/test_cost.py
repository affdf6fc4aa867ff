import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isochunk import CostModel
from isochunk.core.cost import features
from isochunk.core.errors import ModelError

from .conftest import models


@given(models, st.floats(1, 1e6), st.floats(0, 1e6))
def test_inverse_undoes_forward(model: CostModel, chunk: float, history: float) -> None:
    assert model.chunk(model.seconds(chunk, history), history) == pytest.approx(chunk, rel=1e-6, abs=1e-3)


@given(models, st.floats(0, 1e6))
def test_chunk_is_zero_when_not_even_the_step_fits(model: CostModel, history: float) -> None:
    assert model.chunk(model.c0 + model.c3 * history, history) == pytest.approx(0, abs=1e-6)
    assert model.chunk(0, history) == 0


@given(models, st.floats(1e-3, 1e3), st.floats(0, 1e5))
def test_chunk_shrinks_as_history_grows(model: CostModel, seconds: float, history: float) -> None:
    assert model.chunk(seconds, history + 1000) <= model.chunk(seconds, history) * (1 + 1e-12)


def test_formula_is_the_documented_one() -> None:
    model = CostModel(1.0, 0.1, 0.01, 0.001)
    assert model.seconds(10, 100) == pytest.approx(1 + 0.1 * 10 + 0.01 * 10 * (100 + 5) + 0.001 * 100)


def test_arrays_and_numbers_agree(model: CostModel) -> None:
    chunks, histories = np.array([16.0, 512.0]), np.array([0.0, 4096.0])
    together = model.seconds(chunks, histories)
    assert together.tolist() == [model.seconds(c, h) for c, h in zip(chunks, histories, strict=True)]


@given(models, st.integers(1, 50), st.integers(0, 100_000), st.integers(50, 100_000))
def test_work_does_not_depend_on_the_cut(model: CostModel, parts: int, start: int, length: int) -> None:
    points = np.linspace(start, start + length, parts + 1)
    pieces = sum(model.work(a, b) for a, b in pairwise(points.tolist()))
    assert pieces == pytest.approx(model.work(start, start + length), rel=1e-9)


def test_step_cost_weighs_history_by_work(model: CostModel) -> None:
    grid = np.linspace(0, 8192, 100_001)
    weight = model.c1 + model.c2 * grid
    mean = float((grid * weight).sum() / weight.sum())
    assert model.step_cost(0, 8192) == pytest.approx(model.c0 + model.c3 * mean, rel=1e-4)


def test_features_are_what_the_coefficients_multiply(model: CostModel) -> None:
    chunks, histories = [100, 7], [0, 5000]
    expected = model.c0 + sum(model.marginal(c, h) for c, h in zip(chunks, histories, strict=True))
    vector = [model.c0, model.c1, model.c2, model.c3]
    assert float(features(chunks, histories) @ vector) == pytest.approx(expected)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1e-9, 1e300, "1", None, True])
@pytest.mark.parametrize("name", ["c0", "c1", "c2", "c3"])
def test_unusable_coefficients_never_make_a_model(name: str, value: object) -> None:
    good = {"c0": 0.01, "c1": 1e-5, "c2": 1e-9, "c3": 0.0}
    with pytest.raises(ModelError, match=name):
        CostModel(**{**good, name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["c0", "c1"])
def test_a_step_or_a_token_that_costs_nothing_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match=f"{name} = 0"):
        CostModel(**{"c0": 0.01, "c1": 1e-5, "c2": 1e-9, "c3": 0.0, name: 0})
