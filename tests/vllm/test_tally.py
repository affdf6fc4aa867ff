import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isochunk.vllm.narrator import Narrator
from isochunk.vllm.prompts import PromptRecord
from isochunk.vllm.tally import Distribution, Tally


@given(st.lists(st.floats(0, 100)))
def test_every_value_is_in_the_bucket_of_the_least_bound_above_it(values: list[float]) -> None:
    told = Distribution((1.0, 2.0, 5.0))
    for value in values:
        told.add(value)
    assert told.counts == [
        sum(value <= 1 for value in values),
        sum(1 < value <= 2 for value in values),
        sum(2 < value <= 5 for value in values),
        sum(value > 5 for value in values),
    ]
    assert told.sum == pytest.approx(sum(values))
    assert told.count == len(values)


def test_time_in_the_pipeline_is_counted_once_however_many_steps_are_in_it() -> None:
    told = Tally()
    told.step(0.0, 2.0, 1.0, 1.0, [512])
    told.step(0.1, 3.0, 1.0, 0.8, [256, 16])
    told.step(10.0, 12.0, 1.0, 0.0, [])
    assert told.occupied_s == pytest.approx(3.0 + 2.0)
    assert told.busy_s == pytest.approx(3.0)
    assert (told.predicted_s, told.measured_s) == pytest.approx((1.8, 2.0))
    assert told.step_ratio.count == 2
    assert told.chunks.count == 3


def test_only_prompts_alone_with_a_prediction_tell_what_was_gained() -> None:
    told = Tally()
    told.prompt(1000, 2.0, 1.9, 3.0)
    told.prompt(1000, 5.0, 1.9, None)
    assert (told.prompts, told.alone, told.ttft_fixed_s) == (2, 1, 3.0)
    before = told.copy()
    told.prompt(1, 1.0, None, None)
    assert (before.prompts, told.prompts) == (2, 3)


def record(request_id: str) -> PromptRecord:
    return PromptRecord(
        request_id=request_id,
        policy="optimal",
        chunk=None,
        cached=16,
        predicted_ttft_s=1.9,
        tokens=1000,
        measured_ttft_s=2.0,
        chunks=[600, 384],
    )


def test_the_log_has_a_line_a_prompt_and_a_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("isochunk-test-narrator")
    caplog.set_level(logging.DEBUG, logger=logger.name)
    narrator, tally = Narrator(logger), Tally()
    for second in range(0, 130, 10):
        tally.step(float(second), second + 2.0, 1.5, 1.4, [600])
        tally.prompt(1000, 2.0, 1.9, 3.0)
        narrator.tell(float(second), [record(f"r{second}")], tally)
    lines = {level: [r.getMessage() for r in caplog.records if r.levelname == level] for level in ("DEBUG", "INFO")}
    assert len(lines["DEBUG"]) == 13
    assert "r120, 1000 tokens (16 cached), optimal: chunks [600, 384]" in lines["DEBUG"][-1]
    assert len(lines["INFO"]) == 2
    assert "6 prompts of 1000 tokens in 60 s" in lines["INFO"][1]
    assert "6 ran alone: first token after 2 s on average (1.9 predicted)" in lines["INFO"][1]
    assert "with vLLM's own chunks 3 s, 1.50 times as long" in lines["INFO"][1]
