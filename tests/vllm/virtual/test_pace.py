import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isochunk.vllm.virtual.pace import Pace, Span

spans = st.lists(
    st.tuples(st.floats(0, 100), st.floats(0.1, 50), st.floats(0, 4)).map(lambda t: Span(t[0], t[0] + t[1], t[2])),
    max_size=4,
)


def pace_of(chosen: list[Span]) -> Pace:
    pace = Pace()
    for span in chosen:
        pace.add(span)
    return pace


def test_a_pace_without_spans_takes_the_work_itself() -> None:
    assert Pace().finish(3.0, 2.0) == 5.0


def test_a_stage_that_stands_still_goes_on_afterwards() -> None:
    assert pace_of([Span(1.0, 4.0, 0.0)]).finish(0.0, 2.0) == 5.0
    assert pace_of([Span(1.0, math.inf, 0.0)]).finish(0.0, 2.0) == math.inf


def test_rates_multiply_where_spans_overlap() -> None:
    pace = pace_of([Span(0.0, 10.0, 0.5), Span(0.0, 10.0, 0.5)])
    assert pace.rate(1.0) == 0.25
    assert pace.finish(0.0, 1.0) == 4.0


@given(spans, st.floats(0, 150), st.floats(0.01, 50))
def test_the_work_done_until_the_finish_is_the_work_asked_for(chosen: list[Span], start: float, work: float) -> None:
    pace = pace_of(chosen)
    done = pace.finish(start, work)
    edges = sorted({start, done, *(e for s in chosen for e in (s.start, s.end) if start < e < done)})
    summed = sum((b - a) * pace.rate((a + b) / 2) for a, b in pairwise(edges))
    assert summed == pytest.approx(work, rel=1e-6)


@given(spans, st.floats(0, 150), st.floats(0.01, 50), st.floats(0.01, 50))
def test_more_work_is_done_later(chosen: list[Span], start: float, work: float, more: float) -> None:
    pace = pace_of(chosen)
    assert pace.finish(start, work + more) >= pace.finish(start, work)
