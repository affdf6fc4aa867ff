import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isochunk.core.errors import PlanError
from isochunk.core.timing import StageClock


def pipeline(seconds: list[float], stages: int, in_flight: int, gaps: list[float]) -> list[tuple[float, float]]:
    """(entry, exit) of each step in a pipeline with at most ``in_flight`` steps, entries after given gaps."""
    left = [0.0] * stages
    exits: list[float] = []
    now = 0.0
    seen = []
    for index, (own, gap) in enumerate(zip(seconds, gaps, strict=True)):
        now += gap
        if index >= in_flight:
            now = max(now, exits[index - in_flight])
        ready = now
        for stage in range(stages):
            ready = max(ready, left[stage]) + own
            left[stage] = ready
        exits.append(ready)
        seen.append((now, ready))
    return seen


@given(
    st.lists(st.tuples(st.floats(1e-3, 10), st.floats(0, 20)), min_size=1, max_size=40),
    st.integers(1, 8),
    st.integers(0, 1),
)
def test_step_times_are_recovered_whatever_their_order(
    steps: list[tuple[float, float]], stages: int, extra: int
) -> None:
    seconds = [own for own, _ in steps]
    clock = StageClock(stages)
    seen = pipeline(seconds, stages, stages + extra, [gap for _, gap in steps])
    assert np.allclose([clock.step(*times) for times in seen], seconds, rtol=1e-6, atol=1e-9)


def test_an_exit_before_its_entry_counts_as_no_time() -> None:
    clock = StageClock(2)
    assert clock.step(10.0, 9.0) == 0


def test_no_stage_is_refused() -> None:
    with pytest.raises(PlanError, match="stages = 0"):
        StageClock(0)


@given(st.integers(1, 8), st.lists(st.tuples(st.floats(0, 0.1), st.floats(0.01, 1)), max_size=8), st.floats(0.1, 20))
def test_a_step_of_the_most_seconds_comes_out_in_time(stages, before, patience):
    clock, now = StageClock(stages), 0.0
    for pause, seconds in before:
        now += pause
        clock.foretell(now, seconds)
    most = clock.most(now, now + patience)
    ahead, longer = clock.copy(), clock.copy()
    ahead.foretell(now, most)
    if most > 0:
        assert ahead._left[-1] == pytest.approx(now + patience)
    longer.foretell(now, most + 0.01)
    assert longer._left[-1] > now + patience
    assert clock.most(now, now + patience) == most
