import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isochunk.core.cost import CostModel
from isochunk.core.errors import PlanError
from isochunk.core.steps import Prefill
from isochunk.core.turns import Turns, rank

LONG = Prefill("long", 5000, 1_000_000, 9.0)


def short(waited_s: float, key: str = "short") -> Prefill:
    return Prefill(key, 0, 1000, waited_s)


def test_without_a_bound_nobody_steps_aside() -> None:
    turns = Turns()
    assert all(turns.aside([LONG, short(1e6)], 1) == frozenset() for _ in range(3))


def test_a_long_prompt_gives_every_other_step_to_one_that_waited_too_long() -> None:
    turns = Turns(2.0)
    yields = [bool(turns.aside([LONG, short(2.5)], 1)) for _ in range(4)]
    assert yields == [True, False, True, False]


def test_nobody_steps_aside_before_the_bound_is_reached() -> None:
    turns = Turns(2.0)
    assert turns.aside([LONG, short(1.9)], 1) == frozenset()
    assert turns.aside([LONG, short(2.1)], 1) == {"long"}


def test_a_long_prompt_does_not_yield_to_a_longer_one() -> None:
    assert Turns(0.0).aside([Prefill("a", 0, 500, 9.0), LONG], 1) == frozenset()


def test_all_longer_prompts_that_have_begun_yield_together() -> None:
    queue = [LONG, Prefill("other", 0, 20_000, 5.0), short(5.0)]
    assert Turns(1.0).aside(queue, 2) == {"long", "other"}


def test_a_long_prompt_that_has_not_begun_is_not_let_in_by_a_short_one_behind_it() -> None:
    turns = Turns(1.0)
    queue = [LONG, Prefill("also long", 0, 2_000_000, 9.0), short(9.0)]
    assert turns.aside(queue, 1) == frozenset()
    assert turns.aside(queue, 2) == {"long", "also long"}


def test_after_a_step_that_nobody_could_take_turns_rest_for_a_while() -> None:
    turns = Turns(1.0)
    assert turns.aside([LONG, short(5.0)], 1)
    turns.refused()
    rests = [turns.aside([LONG, short(5.0)], 1) for _ in range(64)]
    assert not any(rests)
    assert turns.aside([LONG, short(5.0)], 1) == {"long"}


def test_prompts_that_have_not_begun_keep_vllms_order() -> None:
    queue = [Prefill("first", 0, 20_000, 5.0), short(5.0)]
    assert Turns(1.0).aside(queue, 0) == frozenset()


@pytest.mark.parametrize("limit", [-1.0, math.nan])
def test_a_bound_that_is_no_time_is_refused(limit: float) -> None:
    with pytest.raises(PlanError, match="max_queue_delay"):
        Turns(limit)


@given(
    st.lists(st.tuples(st.integers(1, 10_000), st.floats(0, 10)), min_size=1, max_size=20),
    st.integers(0, 20),
    st.integers(1, 4),
)
def test_somebody_always_has_the_step(prompts: list[tuple[int, float]], begun: int, calls: int) -> None:
    queue = [Prefill(str(at), 0, remaining, waited) for at, (remaining, waited) in enumerate(prompts)]
    turns = Turns(1.0)
    for _ in range(calls):
        assert len(turns.aside(queue, min(begun, len(queue)))) < len(queue)


MODEL = CostModel(0.03, 6e-6, 6e-10, 5e-7)


def served(queue: list[Prefill], longest_wait_s: float) -> list[str]:
    return [prompt.key for prompt in sorted(queue, key=lambda prompt: rank(MODEL, prompt, longest_wait_s))]


def test_least_work_is_first_by_what_is_not_cached() -> None:
    queue = [Prefill("long", 0, 30_000, 2.0), Prefill("cached", 29_000, 1000, 1.0), Prefill("short", 0, 2000, 0.0)]
    assert served(queue, 60.0) == ["short", "cached", "long"]


def test_those_that_waited_too_long_go_first_as_they_came() -> None:
    queue = [Prefill("a", 0, 30_000, 70.0), Prefill("b", 0, 10, 3.0), Prefill("c", 0, 90_000, 80.0)]
    assert served(queue, 60.0) == ["c", "a", "b"]


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 100)), max_size=20))
def test_with_no_patience_it_is_first_come_first_served(prompts: list[tuple[int, float]]) -> None:
    queue = [Prefill(str(at), 0, remaining, waited) for at, (remaining, waited) in enumerate(prompts)]
    came = sorted(queue, key=lambda prompt: -prompt.waited_s)
    assert served(queue, 0.0) == [prompt.key for prompt in came]
