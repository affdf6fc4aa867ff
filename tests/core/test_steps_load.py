import pytest
from hypothesis import given
from hypothesis import strategies as st

from isochunk.core.cost import CostModel
from isochunk.core.load import Load, Stream
from isochunk.core.steps import Prefill, StepPlanner

MODEL = CostModel(0.0261, 6.03e-6, 6.5e-10, 5.39e-7)

loads = st.builds(
    lambda stages, own, ahead, others, rounds, before: Load(
        stages=stages,
        abar=own * (1 + ahead),
        own=own,
        system=own * (1 + ahead + others),
        rounds=rounds,
        before=own * before,
    ),
    st.integers(2, 16),
    st.floats(1e-3, 100),
    st.floats(0, 20),
    st.floats(0, 20),
    st.floats(0, 50),
    st.floats(0, 5),
)


@given(loads, st.floats(1e-3, 1), st.floats(0.05, 20))
def test_no_step_costs_less_than_the_laws(load, overhead, factor):
    best = load.work(overhead)
    assert load.cost(best, overhead) <= load.cost(best * factor, overhead) * (1 + 1e-9)


def test_one_prompt_and_no_stream_give_the_single_prompt_law():
    load = Load(stages=5, abar=6.0, own=6.0, system=6.0, rounds=0)
    assert load.work(0.1) == pytest.approx((0.1 * 6.0 / 4) ** 0.5)


def test_a_lasting_stream_makes_steps_longer_than_a_burst():
    burst = Load(stages=4, abar=30.0, own=6.0, system=60.0, rounds=0)
    stream = Load(stages=4, abar=30.0, own=6.0, system=60.0, rounds=5)
    assert stream.work(0.05) > 1.5 * burst.work(0.05)


def test_a_step_that_waits_behind_a_longer_one_is_not_cut_short():
    free = Load(stages=4, abar=6.0, own=6.0, system=24.0, rounds=1)
    behind = Load(stages=4, abar=6.0, own=6.0, system=24.0, rounds=1, before=6.1)
    assert free.work(0.1) < 6.0 == behind.work(0.1)


def test_prompts_that_come_while_others_are_served_are_a_stream():
    stream = Stream()
    assert stream.rounds(10.0) == 0.75
    stream.take(5.0, 5.0, 1)
    assert stream.rounds(5.0) == 0.75  # a burst stays one while it drains
    assert stream.rounds(10.0) == 4.75
    stream.take(5.0, 5.0, 1)
    assert stream.rounds(10.0) == 6.0
    stream.restart()
    assert stream.rounds(10.0) == 0.75


def served(stream: Stream, waiting: list[int]) -> float:
    """One prompt a step, with one step in flight; so many wait at each. What is expected when 10 s more came."""
    stream.rounds(1.0)
    for at, count in enumerate(waiting):
        stream.ask(str(at), 0, count, 1)
        stream.take(1.0, 1.0, 1)
    return stream.rounds(10.0)


def test_prompts_that_replace_others_go_on_and_those_that_come_by_themselves_do_not():
    assert served(Stream(), [4] * 20) == 6.0
    assert served(Stream(), [4, 3] * 10) > 4.0  # a client takes a moment to send its next prompt
    by_themselves = [1, 2, 4, 3, 5, 4, 3, 2, 1, 2, 1, 2, 3, 2, 1, 3, 6, 5, 4, 3, 2, 1]
    assert served(Stream(), by_themselves) < 1.5
    assert served(Stream(), by_themselves + [4] * 40) > 5.0


def test_prompts_that_have_left_a_closed_loop_are_missed_until_the_pipeline_is_empty():
    stream = Stream()
    served(stream, [4] * 20)
    assert stream.missing == 0.0
    stream.ask("", 1, 2, 1)
    assert stream.missing == 2.0
    stream.restart()
    assert stream.missing == 0.0


def test_a_step_between_those_of_a_longer_prompt_is_not_undone_and_its_prompts_have_left():
    stream = Stream()
    stream.rounds(1.0)
    for _ in range(20):  # a long prompt of which every other step takes nothing, and short ones that replace each other
        stream.ask("long", 0, 3, 1)
        stream.take(1.0, 1.0, 1, asked=False)
    assert stream.in_flight(3) == 3.0
    assert stream.rounds(1.0) > 5.0
    stream.ask("long", 0, 2, 1)
    assert stream.missing == pytest.approx(1.0)


def test_a_step_that_was_never_made_is_forgotten():
    once, twice = Stream(), Stream()
    for stream in (once, twice):
        stream.rounds(1.0)
        stream.ask("a", 0, 3, 0)
        stream.take(1.0, 1.0, 1)
    twice.ask("a", 0, 3, 0)
    twice.take(1.0, 1.0, 1)
    assert once.in_flight(2) == twice.in_flight(2) == 1.0
    assert served(once, [3, 5, 2] * 8) == served(twice, [3, 5, 2] * 8)


def test_a_stream_too_thin_to_fill_the_stages_keeps_steps_short():
    thin = Load(stages=16, abar=6.0, own=6.0, system=12.0, rounds=5)
    thick = Load(stages=16, abar=6.0, own=6.0, system=120.0, rounds=5)
    assert thin.work(0.05) < thick.work(0.05)


@given(
    st.lists(st.tuples(st.integers(0, 200000), st.integers(1, 200000)), min_size=1, max_size=12),
    st.integers(0, 50),
    st.lists(st.floats(0.01, 5), max_size=8),
    st.integers(1, 16),
)
def test_the_budget_is_always_at_least_a_token_and_at_most_the_limit(prompts, more, in_flight, stages):
    planner = StepPlanner(stages=stages, max_chunk=32768, block=16)
    queue = [Prefill(str(index), history, remaining) for index, (history, remaining) in enumerate(prompts)]
    for _ in range(3):
        assert 1 <= planner.tokens(MODEL, queue, more=more, in_flight=in_flight) <= 32768


def test_small_remainders_at_a_high_prefix_hit_are_not_split():
    planner = StepPlanner(stages=2, max_chunk=32768, block=16)
    queue = [Prefill(str(index), 130000, 320) for index in range(8)]
    assert planner.tokens(MODEL, queue, in_flight=[0.2]) % 320 == 0


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
def test_prompts_that_differ_get_steps_of_equal_time(stages, hit):
    planner = StepPlanner(stages=stages, max_chunk=1 << 18, block=16)
    queue = [Prefill(str(index), hit, 3000 + 7919 * index % 40000) for index in range(16)]
    times = [_seconds(step) for step in steps_until_half_is_done(planner, queue, stages)]
    assert max(times[stages:]) < 1.15 * min(times[stages:])


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
