import pytest
from hypothesis import given
from hypothesis import strategies as st

from isochunk.core.errors import PlanError
from isochunk.core.planner import plan
from isochunk.vllm.live.explain import explain, words
from tests.vllm.live.statuses import COST, status


@given(st.integers(1, 200_000), st.integers(2, 16), st.floats(0, 0.99))
def test_it_tells_the_plan_and_no_fixed_size_is_quicker(tokens: int, stages: int, part: float) -> None:
    cached = int(part * (tokens - 1)) if tokens > 1 else 0
    told = explain(status(stages=stages, prompts=1), tokens, cached)
    chosen = plan(COST, tokens, stages, cached=cached, max_chunk=8192, block=16)
    assert (told.chunks, told.ttft_s) == (chosen.chunks, chosen.ttft_s)
    for each in told.alternatives:  # the rule's cut may round to blocks a little more luckily
        assert (
            each.ttft_s >= told.ttft_s * (0.99 if each.label.startswith("first") else 1 - 1e-9) or "equal" in each.label
        )
    assert [each.ttft_s for each in told.alternatives] == sorted(each.ttft_s for each in told.alternatives)
    assert sum("vLLM's own" in each.label for each in told.alternatives) == 1


def test_words_hold_the_numbers() -> None:
    told = explain(status(), 32_768)
    text = " ".join(words(told))
    for number in ("32,768 tokens", "4 stages", f"takes {len(told.chunks)}", f"{told.ttft_s:.3g} s", "2 waiting"):
        assert number in text


@pytest.mark.parametrize("tokens", [0, -1, 10**12])
def test_a_length_out_of_range_is_named(tokens: int) -> None:
    with pytest.raises(PlanError, match=f"tokens = {tokens}"):
        explain(status(), tokens)


def test_without_a_model_it_says_so() -> None:
    with pytest.raises(PlanError, match="no cost model"):
        explain(status() | {"model": None}, 100)


def test_a_length_beyond_any_context_is_explained_too() -> None:
    told = explain(status(), 9_999_999)
    assert sum(told.chunks) == 9_999_999
