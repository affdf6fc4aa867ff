import math
import threading
import time

import numpy as np
import pytest

from isochunk.core.flowshop import completion_times
from isochunk.vllm.virtual.pace import Span
from isochunk.vllm.virtual.pipeline import Pipeline, StageDiedError

FOR_EVER = 1e6


def test_steps_come_out_as_the_flow_shop_says() -> None:
    rng = np.random.default_rng(3)
    seconds = rng.uniform(0.1, 1.0, (20, 5))
    pipeline = Pipeline(5)
    steps = [pipeline.enter(list(row)) for row in seconds]
    expected = completion_times(seconds)[:, -1]
    # The steps enter one after the other, within the time that this loop takes.
    spent = steps[-1].entered - steps[0].entered
    for step, due in zip(steps, expected, strict=True):
        assert due - 1e-9 <= step.due - steps[0].entered <= due + spent


def test_hand_over_and_return_are_added_once_each() -> None:
    step = Pipeline(4, hand_over=0.5, back=0.25).enter([1.0, 2.0, 3.0, 4.0])
    assert step.due - step.entered == pytest.approx(10.0 + 3 * 0.5 + 0.25)


def test_a_stage_that_stops_holds_what_is_inside_and_lets_it_go_later() -> None:
    pipeline = Pipeline(2)
    first, second = pipeline.enter([100.0, 100.0]), pipeline.enter([1.0, 1.0])
    before = first.due
    pipeline.slow(Span(first.entered, math.inf, 0.0), 1)
    assert first.due == second.due == math.inf
    pipeline.resume()
    # Stage 0 went on meanwhile, and stage 1 had not begun.
    assert first.due == pytest.approx(before)


def test_a_slower_stage_stretches_only_what_it_has_yet_to_do() -> None:
    pipeline = Pipeline(1)
    step = pipeline.enter([100.0])
    pipeline.slow(Span(step.entered + 40.0, math.inf, 0.5))
    assert step.due - step.entered == pytest.approx(40.0 + 60.0 / 0.5)


def test_who_waits_is_woken_by_a_change() -> None:
    pipeline = Pipeline(1)
    pipeline.slow(Span(-math.inf, math.inf, 0.0))
    step = pipeline.enter([0.001])
    waiter = threading.Thread(target=pipeline.wait, args=(step, FOR_EVER))
    waiter.start()
    assert not pipeline.is_back(step)
    pipeline.resume()
    waiter.join()
    assert pipeline.is_back(step)


def test_a_step_that_takes_too_long_is_given_up() -> None:
    pipeline = Pipeline(1)
    with pytest.raises(TimeoutError):
        pipeline.wait(pipeline.enter([FOR_EVER]), 0.01)


def test_nobody_waits_for_a_dead_stage() -> None:
    pipeline = Pipeline(1)
    step = pipeline.enter([FOR_EVER])
    failed: list[BaseException] = []

    def wait() -> None:
        with pytest.raises(StageDiedError, match="why not"):
            pipeline.wait(step, FOR_EVER)
        failed.append(StageDiedError())

    waiter = threading.Thread(target=wait)
    waiter.start()
    pipeline.die("why not")
    waiter.join()
    assert failed
    assert pipeline.is_back(step)


def test_steps_that_are_back_are_not_moved_any_more() -> None:
    pipeline = Pipeline(1)
    step = pipeline.enter([0.0])
    pipeline.wait(step, FOR_EVER)
    due = step.due
    pipeline.slow(Span(step.entered - 1, time.monotonic() + 1, 0.0))
    assert step.due == due
