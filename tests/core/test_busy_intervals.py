from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isochunk.core.flowshop import busy_intervals, completion_times, idle_share
from isochunk.core.timing import StageClock


@given(st.lists(st.floats(1e-3, 10), min_size=1, max_size=20), st.integers(1, 8))
def test_steps_that_are_all_ready_follow_the_flow_shop(seconds, stages):
    busy = busy_intervals([5.0] * len(seconds), seconds, stages)
    ends = np.array([[end for _, end in intervals] for intervals in busy]).T
    assert ends == pytest.approx(completion_times(np.repeat(np.array(seconds)[:, None], stages, axis=1)))


@given(
    st.lists(st.tuples(st.floats(0, 3), st.floats(1e-3, 10)), min_size=1, max_size=20),
    st.integers(1, 6),
)
def test_last_stage_ends_when_the_clock_saw_the_step_leave(steps, stages):
    entered = np.cumsum([gap for gap, _ in steps]).tolist()
    measured = [seconds for _, seconds in steps]
    left = [end + entered[0] for _, end in busy_intervals(entered, measured, stages)[-1]]
    clock = StageClock(stages)
    assert [clock.step(s, e) for s, e in zip(entered, left, strict=True)] == pytest.approx(measured)


def test_no_stage_does_two_steps_at_once():
    for intervals in busy_intervals([0, 0, 1, 1, 2], [3, 1, 2, 5, 1], 3):
        assert all(end <= start for (_, end), (start, _) in pairwise(intervals))


def test_one_chunk_on_two_stages_leaves_them_idle_half_of_the_time():
    assert idle_share(busy_intervals([7.0], [2.0], 2)) == pytest.approx(0.5)
    assert idle_share(busy_intervals([7.0], [2.0], 1)) == 0
