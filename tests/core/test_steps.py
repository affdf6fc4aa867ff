import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isochunk import CostModel, plan
from isochunk.core.errors import PlanError
from isochunk.core.planner import Policy
from isochunk.core.steps import Prefill, StepPlanner


def planner(**options: object) -> StepPlanner:
    return StepPlanner(**{"stages": 2, "max_chunk": 8192, "block": 16, **options})  # type: ignore[arg-type]


def cut(steps: StepPlanner, model: CostModel, tokens: int, key: str = "a") -> list[int]:
    """Chunks of a prompt alone, its last two steps in the pipeline."""
    chunks: list[int] = []
    at = 0
    while at < tokens:
        in_flight = [model.seconds(chunk, at) for chunk in chunks[-2:]]
        chunks.append(min(steps.tokens(model, [Prefill(key, at, tokens - at)], in_flight=in_flight), tokens - at))
        at += chunks[-1]
    return chunks


def test_a_prompt_alone_follows_its_plan(model: CostModel) -> None:
    assert cut(planner(), model, 9000) == list(plan(model, 9000, 2, max_chunk=8192, block=16).chunks)


def test_policies_switch_and_are_checked(model: CostModel) -> None:
    steps = planner()
    steps.use("fixed", 500)
    assert cut(steps, model, 1200) == [500, 500, 200]
    steps.use("first_chunk", 1000)
    first, second, *_ = cut(steps, model, 5000)
    assert first in range(992, 1009)
    assert second < first
    for policy, chunk in (("best", None), ("fixed", 0), ("fixed", 8193)):
        with pytest.raises(PlanError):
            steps.use(policy, chunk)  # type: ignore[arg-type]
    assert steps.policy == "first_chunk"


@pytest.mark.parametrize(("smooth", "expected"), [(0.0, 8192), (1.0, None)])
def test_smoothing_blends_the_plan_with_the_full_size(model: CostModel, smooth: float, expected: int | None) -> None:
    full = planner(smooth=smooth).tokens(model, [Prefill("a", 0, 20_000)])
    assert full == (expected or plan(model, 20_000, 2, max_chunk=8192, block=16).chunks[0])


def test_chunks_keep_to_their_floor(model: CostModel) -> None:
    assert min(cut(planner(min_chunk=700), model, 20_000)[:-1]) >= 700


def test_steps_that_are_never_made_leave_no_trace(model: CostModel) -> None:
    # A prompt waits for KV blocks while decodes keep the pipeline busy: the planner is asked again and again.
    waiting = planner()
    for _ in range(1000):
        waiting.tokens(model, [Prefill("a", 0, 8192)], other_seconds=0.001, in_flight=[0.01])
    fresh = planner()
    first = fresh.tokens(model, [Prefill("a", 0, 8192)], other_seconds=0.001, in_flight=[0.01])
    again = waiting.tokens(model, [Prefill("a", 0, 8192)], other_seconds=0.001, in_flight=[0.01])
    assert again == first


@pytest.mark.parametrize("wrong", [{"stages": 0}, {"max_chunk": 0}, {"block": 0}, {"smooth": 1.5}])
def test_bad_arguments_are_named(wrong: dict[str, object]) -> None:
    with pytest.raises(PlanError, match=next(iter(wrong))):
        planner(**wrong)


@given(
    policy=st.sampled_from(["optimal", "first_chunk", "fixed"]),
    bound=st.floats(0.0, 0.3),
    other=st.floats(0.0, 0.05),
    lengths=st.lists(st.integers(1, 60_000), min_size=1, max_size=6),
)
def test_a_step_takes_no_longer_than_the_bound_and_always_goes_on(
    policy: Policy, bound: float, other: float, lengths: list[int]
) -> None:
    model = CostModel(0.0059, 18e-6, 20e-9, 0.56e-6)
    queue = [Prefill(str(at), 0, length) for at, length in enumerate(lengths)]
    free, total = 0, 0
    for limit in (math.inf, bound):
        steps = planner(stages=4, min_chunk=16)
        steps.use(policy)
        free, total = total, steps.tokens(model, queue, other_seconds=other, max_seconds=limit)
    assert 1 <= total <= free
    seconds, left = model.c0 + other, total
    for prompt in queue:
        size = min(left, prompt.remaining)
        seconds += model.marginal(size, 0)
        left -= size
    last = model.c1 * 16 + model.c2 * 16 * 60_000  # chunks end on the nearest multiple of the block
    assert seconds <= bound + last or total <= 16


def test_a_prompt_under_the_key_of_one_that_is_gone_gets_a_plan_of_its_own(model: CostModel) -> None:
    steps = planner()
    cut(steps, model, 60_000)
    assert cut(steps, model, 9000) == list(plan(model, 9000, 2, max_chunk=8192, block=16).chunks)
    steps.gone("a")
    assert steps.planned("a") is None


def test_one_step_of_a_prompt_beside_decodes_is_varied() -> None:
    steps = StepPlanner(stages=4, max_chunk=32_768, block=16)
    model = CostModel(0.02, 1e-5, 1e-10, 1e-7)

    def chunks(key: str) -> list[int]:
        taken: list[int] = []
        while (at := sum(taken)) < 100_000:
            taken.append(steps.tokens(model, [Prefill(key, at, 100_000 - at)], other_seconds=0.001))
        return taken

    plain = chunks("a")
    steps.vary(1)
    assert (first := chunks("b"))[0] == pytest.approx(plain[0] / 2, abs=16)
    assert first[0] % 16 == 0
    assert first[1] > 1.5 * first[0]
    assert chunks("c") == plain
