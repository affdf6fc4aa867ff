import pytest
from hypothesis import given
from hypothesis import strategies as st

from isochunk.core.cost import CostModel
from isochunk.core.planner import law_target
from isochunk.core.steps import Arrivals, Load, Prefill, StepPlanner

MODEL = CostModel(0.0261, 6.03e-6, 6.5e-10, 5.39e-7)

loads = st.builds(
    lambda stages, own, ahead, others, before: Load(
        stages=stages, ahead=own * (1 + ahead), own=own, system=own * (1 + ahead + others), before=own * before
    ),
    st.integers(2, 16),
    st.floats(1e-3, 100),
    st.floats(0, 20),
    st.floats(0, 20),
    st.floats(0, 5),
)


@given(loads, st.floats(1e-3, 1), st.floats(0.05, 20))
def test_no_step_costs_less_than_the_laws(load, overhead, factor):
    best = load.work(overhead)
    assert load.cost(best, overhead) <= load.cost(best * factor, overhead) * (1 + 1e-9)


def test_one_prompt_alone_gets_steps_near_the_single_prompt_law():
    for stages in (2, 4, 16):
        work = Load(stages=stages, ahead=6.0, own=6.0, system=6.0).work(0.05)
        single = law_target(MODEL, 6.0, stages, 0.05) - 0.05
        assert 0.7 * single < work < 1.4 * single


def test_a_long_queue_gets_longer_steps_than_a_short_one():
    works = [Load(stages=4, ahead=3.0 * n, own=6.0, system=6.0 * n).work(0.05) for n in (1, 4, 16, 64)]
    assert works == sorted(works)
    assert works[-1] > 2 * works[0]


def test_a_step_behind_a_longer_one_is_as_long_as_it():
    free = Load(stages=4, ahead=6.0, own=6.0, system=24.0)
    behind = Load(stages=4, ahead=6.0, own=6.0, system=24.0, before=2.1)
    assert free.work(0.1) < behind.work(0.1) == pytest.approx(2.0)


def test_where_the_limit_cuts_first_steps_short_the_others_are_shorter_too():
    free = Load(stages=8, ahead=60.0, own=10.0, system=120.0)
    long = Load(stages=8, ahead=60.0, own=10.0, system=120.0, full=[(0.2, 3.0)] * 12, growth=0.1, count=12)
    assert long.work(0.3) < free.work(0.3)


@given(
    st.lists(st.tuples(st.integers(0, 200000), st.integers(1, 200000)), min_size=1, max_size=12),
    st.integers(0, 50),
    st.lists(st.floats(0.01, 5), max_size=8),
    st.integers(1, 16),
    st.sampled_from((512, 4096, 32768)),
)
def test_the_budget_is_at_least_a_token_and_at_most_the_limit_and_asking_changes_nothing(
    prompts, more, in_flight, stages, limit
):
    planner = StepPlanner(stages=stages, max_chunk=limit, block=16)
    queue = [Prefill(str(index), history, remaining) for index, (history, remaining) in enumerate(prompts)]
    found = {planner.tokens(MODEL, queue, more=more, in_flight=in_flight) for _ in range(3)}
    assert len(found) == 1
    assert 1 <= found.pop() <= limit


@given(
    st.lists(st.tuples(st.integers(0, 50000), st.integers(100, 50000)), min_size=1, max_size=8),
    st.floats(0.05, 1.0),
    st.lists(st.floats(0.01, 2), max_size=4),
)
def test_a_bound_in_seconds_is_kept(prompts, most, in_flight):
    planner = StepPlanner(stages=4, max_chunk=32768, block=16)
    queue = [Prefill(str(index), history, remaining) for index, (history, remaining) in enumerate(prompts)]
    left = planner.tokens(MODEL, queue, in_flight=in_flight, max_seconds=most)
    seconds = MODEL.c0
    first = queue[0]
    for prompt in queue:
        chunk = min(prompt.remaining, left)
        left -= chunk
        if chunk:
            seconds += MODEL.marginal(chunk, prompt.history)
    block = MODEL.marginal(16, first.history + first.remaining)
    assert seconds <= max(most, MODEL.c0 + MODEL.marginal(16, first.history)) + len(queue) * block


def steps_until_half_is_done(planner: StepPlanner, left: list[Prefill], stages: int) -> list[dict[str, Prefill]]:
    """What is taken of each prompt, step by step."""
    steps: list[dict[str, Prefill]] = []
    half = len(left) // 2
    while len(left) > half:
        behind = [_seconds(step) for step in steps[-(stages - 1) :]]
        budget = planner.tokens(MODEL, left, in_flight=behind)
        step, after = {}, []
        for prompt in left:
            chunk = min(prompt.remaining, budget)
            budget -= chunk
            if chunk:
                step[prompt.key] = Prefill(prompt.key, prompt.history, chunk)
            if prompt.remaining > chunk:
                after.append(Prefill(prompt.key, prompt.history + chunk, prompt.remaining - chunk))
        steps.append(step)
        left = after
    return steps


def _seconds(step: dict[str, Prefill]) -> float:
    return MODEL.c0 + sum(MODEL.marginal(part.remaining, part.history) for part in step.values())


@pytest.mark.parametrize("stages", [2, 8])
@pytest.mark.parametrize("hit", [0, 20000])
def test_prompts_that_differ_get_steps_of_nearly_equal_time(stages, hit):
    planner = StepPlanner(stages=stages, max_chunk=1 << 18, block=16)
    queue = [Prefill(str(index), hit, 3000 + 7919 * index % 40000) for index in range(16)]
    times = [_seconds(step) for step in steps_until_half_is_done(planner, queue, stages)]
    assert max(times[stages:]) < 1.3 * min(times[stages:])


def test_where_histories_are_dear_no_step_is_left_with_a_tail():
    planner = StepPlanner(stages=8, max_chunk=32768, block=16)
    queue = [Prefill(str(index), 130000, 700 + 60 * index) for index in range(4)]
    for step in steps_until_half_is_done(planner, queue, 8):
        assert all(part.remaining > 300 for part in step.values())


def test_where_the_fixed_cost_outweighs_the_prompts_they_stay_whole():
    model = CostModel(0.18, 22e-6, 1.8e-9, 0.0)
    planner = StepPlanner(stages=2, max_chunk=32768, block=16)
    queue = [Prefill(str(index), 30000, 300 + 40 * index) for index in range(3)]
    assert planner.tokens(model, queue, in_flight=[0.2]) in (300, 640, 1020)


def test_one_stage_gets_vllms_own_budget():
    assert StepPlanner(stages=1, max_chunk=8192).tokens(MODEL, [Prefill("a", 0, 100000)]) == 8192


def test_a_nearly_ended_prompt_is_ended_rather_than_left_with_a_sliver():
    planner = StepPlanner(stages=4, max_chunk=1 << 18, block=16)
    cut = 0
    for first in range(4000, 60000, 500):
        queue = [Prefill("a", 0, first), Prefill("b", 0, 60000)]
        size = planner.tokens(MODEL, queue)
        if size < first:
            cut += 1
            assert MODEL.marginal(first - size, size) > 0.09 * MODEL.work(0, size)
    assert cut > 20


def test_prompts_alike_are_served_in_whole_prompts_or_equal_parts() -> None:
    load = Load(stages=4, ahead=10.0, own=4.0, system=20.0)
    assert load.aligned(5.0, 0.05, 4.0) in (4.0, 8.0)
    assert load.aligned(1.7, 0.05, 4.0) in (2.0, 4.0 / 3)
    assert load.aligned(4.0, 0.05, 4.0) == 4.0


def test_the_more_come_one_for_one_the_longer_the_steps() -> None:
    def step(rounds: int) -> int:
        law = StepPlanner(stages=2, max_chunk=8192)
        for arrival in range(4 * rounds + 1):
            queue = [Prefill(f"r{arrival + at}", 0, 1000) for at in range(4)]
            for _ in range(2):  # to be asked twice changes nothing
                tokens = law.tokens(model, queue, in_flight=[0.01])
        return tokens

    model = CostModel(1e-3, 1e-6, 0.0)
    assert step(0) <= step(1) <= step(3)
    assert step(3) == step(30)


def test_arrivals_that_find_other_numbers_waiting_are_no_loop() -> None:
    arrivals = Arrivals()
    queue = [Prefill(f"r{at}", 0, 1000) for at in range(8)]
    assert [arrivals.rounds(queue[:shown], shown) for shown in (3, 5, 2, 8, 8)] == [0.0] * 5
    assert arrivals.rounds([*queue[1:], Prefill("next", 0, 1000)], 8) == 1 / 8
