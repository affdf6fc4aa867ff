import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isochunk import makespan
from isochunk.core.errors import PlanError
from isochunk.core.flowshop import completion_times

times = st.lists(st.floats(0, 100), min_size=1, max_size=30)


@given(times, st.integers(1, 8))
def test_closed_form_is_the_recursion_for_identical_stages(seconds: list[float], stages: int) -> None:
    table = np.repeat(np.array(seconds)[:, None], stages, axis=1)
    assert makespan(seconds, stages) == pytest.approx(makespan(table))


@given(times, st.integers(2, 6))
def test_a_step_more_in_flight_never_delays(seconds: list[float], stages: int) -> None:
    table = np.repeat(np.array(seconds)[:, None], stages, axis=1)
    bounded = completion_times(table, in_flight=stages)[-1, -1]
    assert completion_times(table, in_flight=stages + 1)[-1, -1] <= bounded + 1e-9
    assert completion_times(table)[-1, -1] <= bounded + 1e-9


def test_equal_steps_fill_the_pipeline_with_as_many_in_flight_as_stages() -> None:
    table = np.ones((10, 4))
    assert completion_times(table, in_flight=4)[-1, -1] == makespan(table) == 13


def test_slowest_stage_sets_the_period() -> None:
    assert makespan([[1.0, 3.0], [1.0, 3.0], [1.0, 3.0]]) == 1 + 3 * 3


def test_no_steps_take_no_time() -> None:
    assert makespan([], 4) == 0


@pytest.mark.parametrize(
    ("seconds", "stages", "message"),
    [([1.0], None, "stages"), ([1.0], 0, "stages"), ([[1.0, 2.0]], 3, "fit 3"), ([-1.0], 2, "at least 0")],
)
def test_bad_arguments_are_named(seconds: list[float], stages: int | None, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        makespan(seconds, stages)
