import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isochunk.core.cost import Bend, CostModel, features
from isochunk.core.curve import Curve
from isochunk.core.errors import ModelError

from .conftest import DATA, models

FLAT_THEN_JUMP = Curve((1, 256, 512, 520, 1024, 4096), (0.005, 0.005, 0.006, 0.009, 0.010, 0.040))


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    sizes = sorted(draw(st.sets(st.integers(1, 20_000), min_size=2, max_size=40)))
    rises = draw(st.lists(st.floats(0, 0.01), min_size=len(sizes), max_size=len(sizes)))
    return Curve(sizes, (draw(st.floats(1e-4, 0.1)) + np.cumsum(rises)).tolist())


bends = st.one_of(st.none(), st.builds(Bend, st.integers(0, 200_000), st.floats(0.2, 5)))
measured = st.builds(
    lambda curve, model, bend: CostModel.measured(curve, model.c2, model.c3, bend), curves(), models, bends
)


def gpu_curves() -> dict[str, Curve]:
    """The linear layers of a whole model on an H100, from public operator profiles."""
    found = json.loads((DATA / "gpu_linear_layers.json").read_text())["curves"]
    return {
        name: Curve(data["tokens"], (data["layers"] * np.maximum.accumulate(data["seconds"])).tolist())
        for name, data in found.items()
    }


@pytest.mark.parametrize("curve", [FLAT_THEN_JUMP, *gpu_curves().values()])
def test_the_curve_passes_through_what_was_measured(curve: Curve) -> None:
    assert [curve.at(size) for size in curve.tokens] == list(curve.seconds)
    assert curve.array(np.array(curve.tokens)).tolist() == list(curve.seconds)


@given(curves(), st.floats(0, 100_000), st.floats(0, 100_000))
def test_a_curve_never_falls_and_arrays_agree_with_numbers(curve: Curve, one: float, other: float) -> None:
    assert curve.at(min(one, other)) <= curve.at(max(one, other)) + 1e-12
    assert curve.array(np.array([one, other])) == pytest.approx([curve.at(one), curve.at(other)])


@given(measured, st.floats(1, 40_000), st.floats(0, 300_000))
def test_the_inverse_is_the_longest_chunk_in_that_time(model: CostModel, chunk: float, history: float) -> None:
    seconds = model.seconds(chunk, history)
    found = model.chunk(seconds * (1 + 1e-9), history)
    assert found >= chunk * (1 - 1e-6)
    assert math.isinf(found) or model.seconds(found, history) <= seconds * (1 + 1e-6)
    assert model.chunk(model.seconds(0.0, history) * 0.99, history) == pytest.approx(0, abs=1e-3)


@given(measured, st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 300_000)), min_size=1, max_size=5))
def test_a_step_takes_the_curve_of_its_total_tokens(model: CostModel, parts: list[tuple[int, int]]) -> None:
    chunks, histories = zip(*parts, strict=True)
    total = float(sum(chunks))
    attention = sum(model.seconds(c, h) - model.line(float(c)) for c, h in parts)
    assert model.step(chunks, histories) == pytest.approx(model.line(total) + attention, rel=1e-6)
    if len(parts) == 1:
        assert model.step(chunks, histories) == pytest.approx(model.seconds(*parts[0]), rel=1e-6)


@given(measured, st.floats(0.3, 3), st.floats(0.3, 3), st.integers(1, 30_000), st.integers(0, 300_000))
def test_other_coefficients_take_the_same_rows(
    model: CostModel, step: float, token: float, chunk: int, history: int
) -> None:
    other = model.with_costs(model.c0 * step, model.c1 * token, model.c2 * 2, model.c3 / 2)
    row = features([chunk], [history], model)
    assert row == pytest.approx(features([chunk], [history], other), rel=1e-6, abs=1e-3)
    assert other.predict(row[None])[0] == pytest.approx(other.seconds(chunk, history), rel=1e-6)
    assert model.scaled(3).seconds(chunk, history) == pytest.approx(3 * model.seconds(chunk, history))


@given(measured, st.integers(0, 300_000), st.integers(1, 300_000))
def test_work_and_step_cost_are_those_of_the_line(model: CostModel, start: int, length: int) -> None:
    end = start + length
    at = np.linspace(start, end, 4001)
    middle = (at[1:] + at[:-1]) / 2
    beyond = np.maximum(middle - model.bend.tokens, 0) * (model.bend.factor - 1) if model.bend else 0
    weight = model.c1 + model.c2 * (middle + beyond)
    assert model.work(start, end) == pytest.approx(weight.mean() * length, rel=1e-3)
    assert model.ends_of_work(start, np.array([model.work(start, end)]))[0] == pytest.approx(end, rel=1e-6)
    history = (weight * middle).sum() / weight.sum()
    assert model.step_cost(start, end) == pytest.approx(model.c0 + model.c3 * history, rel=1e-3)


@pytest.mark.parametrize("curve", [FLAT_THEN_JUMP, *gpu_curves().values()])
def test_the_line_is_near_the_curve_and_its_step_cost_below_it(curve: Curve) -> None:
    model = CostModel.measured(curve, 0.0)
    sizes = np.linspace(512, 4096, 100)
    assert np.median(np.abs((model.c0 + model.c1 * sizes) / curve.array(sizes) - 1)) < 0.2
    assert 0 < model.c0 <= curve.seconds[0]


def test_a_step_near_a_jump_ends_below_it() -> None:
    model = CostModel.measured(FLAT_THEN_JUMP, 0.0)
    assert model.snap(600) == 512
    assert model.snap(512) == 512
    assert model.snap(900, most=1024) == 1024
    assert CostModel(0.01, 1e-5, 0.0).snap(600, 800) == 600


@pytest.mark.parametrize("curve", [None, FLAT_THEN_JUMP])
@pytest.mark.parametrize("bend", [None, Bend(65_536, 1.5)])
def test_a_model_is_read_as_it_is_told(curve: Curve | None, bend: Bend | None) -> None:
    model = CostModel(0.004, 1e-5, 1e-9, 1e-8, curve=curve, bend=bend)
    told = json.loads(json.dumps(model.as_dict()))
    assert CostModel.of(told) == model == CostModel(**told)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"curve": [[1, 0.01]]}, "from 2 to"),
        ({"curve": [[1, 0.01], [1, 0.02]]}, "ascend"),
        ({"curve": [[0, 0.01], [1, 0.02]]}, "ascend"),
        ({"curve": [[1, 0.02], [2, 0.01]]}, "never fall"),
        ({"curve": [[1, 0.02], [2, math.nan]]}, "never fall"),
        ({"curve": [[1, 0.02], [2, math.inf]]}, "never fall"),
        ({"curve": [[1, "x"], [2, 0.01]]}, "numbers"),
        ({"curve": [[1, True], [2, 1]]}, "numbers"),
        ({"curve": 5}, "list of pairs"),
        ({"curve": [[1], [2]]}, "list of pairs"),
        ({"curve": [[i + 1, 1.0] for i in range(5000)]}, "from 2 to"),
        ({"curve": [[1, 0.001], [2, 0.01]]}, "c0 = 0.01 is more"),
        ({"bend": [1]}, "bend must be a pair"),
        ({"bend": [1, 0]}, "factor = 0"),
        ({"bend": [-1, 2]}, "bend: tokens"),
        ({"bend": "xy"}, "bend: tokens"),
    ],
)
def test_an_unusable_curve_or_bend_never_makes_a_model(change: dict[str, object], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        CostModel(**{"c0": 0.01, "c1": 1e-5, "c2": 1e-9, **change})  # type: ignore[arg-type]
