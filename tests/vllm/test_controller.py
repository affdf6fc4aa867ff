"""The controller on a clock of its own: what it learns from steps that take the time of a true model."""

import gc

import pytest

from isochunk import CostModel
from isochunk.core.cost import COEFFICIENTS
from isochunk.core.planner import Policy, static_ttft
from isochunk.core.steps import Prefill, StepPlanner
from isochunk.core.timing import StageClock
from isochunk.vllm.config import ChunkConfig
from isochunk.vllm.controller import Controller
from isochunk.vllm.prompts import Part

from .conftest import MODEL

LIMIT = 8192


def controller(model: CostModel | None, **keys: object) -> Controller:
    config = ChunkConfig.model_validate({"enabled": True, **keys})
    made = Controller(config, StepPlanner(stages=2, max_chunk=LIMIT, block=16, min_chunk=16), 2)
    if model is not None:
        made.use_model(model, "stored")
    return made


class Machine:
    """Two stages on which steps take the true model's time; prompts one after the other."""

    def __init__(self, control: Controller, true: CostModel) -> None:
        self.control = control
        self.true = true
        self.now = 100.0
        self.prompts = 0

    def prefill(self, tokens: int, *, paused_at: int | None = None) -> float:
        """TTFT in seconds of one prompt; the engine sleeps for 2 s when the step of that history comes out."""
        self.prompts += 1
        key = f"p{self.prompts}"
        left = [self.now, self.now]
        start = self.now
        at = 0
        waiting: list[tuple[float, int]] = []
        while at < tokens or waiting:
            if at < tokens and len(waiting) < 2:
                chosen = self.control.tokens([Prefill(key, at, tokens - at)], 0, [])
                size = min(chosen or LIMIT, tokens - at)
                self.control.entered([Part(key, size, at, tokens)], [], self.now, at)
                seconds = self.true.seconds(size, at)
                left[0] = max(left[0], self.now) + seconds
                left[1] = max(left) + seconds
                waiting.append((left[1], at))
                at += size
                continue
            ready, step = waiting.pop(0)
            self.now = max(self.now, ready) + (2.0 if step == paused_at else 0.0)
            self.control.exited(self.now, step)
        return self.now - start


def fixed(tokens: int, true: CostModel = MODEL) -> float:
    return float(static_ttft(true, 0, tokens, [LIMIT], 2)[0])


@pytest.mark.parametrize("tokens", [2048, 8192, 32768])
@pytest.mark.parametrize("factor", [1e-9, 0.01])
def test_second_prompt_is_safe_when_the_stored_step_cost_is_far_too_small(tokens: int, factor: float) -> None:
    stored = CostModel(MODEL.c0 * factor, MODEL.c1, MODEL.c2, MODEL.c3 * factor)
    machine = Machine(controller(stored), MODEL)
    machine.prefill(tokens)
    assert machine.prefill(tokens) <= 1.1 * fixed(tokens)
    assert machine.control.counters.alarms + machine.control.counters.refits >= 1


def test_second_prompt_is_safe_without_online_calibration_too() -> None:
    stored = CostModel(MODEL.c0 / 100, MODEL.c1, MODEL.c2, MODEL.c3 / 100)
    machine = Machine(controller(stored, need_timing=False), MODEL)
    machine.prefill(8192)
    assert machine.prefill(8192) <= 1.1 * fixed(8192)
    assert machine.control.counters.refits == 0


@pytest.mark.parametrize("factor", [4.0, 0.25])
@pytest.mark.parametrize("wrong", [*COEFFICIENTS, "all"])
def test_five_prompts_mend_a_wrong_stored_model(wrong: str, factor: float) -> None:
    stored = {name: value * factor if wrong in (name, "all") else value for name, value in MODEL.as_dict().items()}
    machine, fresh = Machine(controller(CostModel(**stored)), MODEL), Machine(controller(MODEL), MODEL)
    for _ in range(5):
        machine.prefill(8192)
        machine.now += 2
    assert machine.prefill(8192) <= 1.1 * fresh.prefill(8192)
    last = machine.control.log.as_list()[-1]
    assert last["predicted_ttft_s"] == pytest.approx(last["measured_ttft_s"], rel=0.1)


def test_predictions_come_true_with_a_true_model() -> None:
    machine = Machine(controller(MODEL), MODEL)
    taken = machine.prefill(16_000)
    record = machine.control.as_dict()["prompts"][-1]
    assert record["predicted_ttft_s"] == pytest.approx(taken, rel=0.01)
    assert record["measured_s"] == pytest.approx(record["predicted_s"], rel=1e-6)
    assert machine.control.counters.refits == machine.control.counters.alarms == 0


@pytest.mark.parametrize("policy", ["fixed", "first_chunk", "optimal"])
def test_every_policy_predicts_its_ttft(policy: Policy) -> None:
    control = controller(MODEL)
    control.use_policy(policy, None if policy == "optimal" else 4096)
    taken = Machine(control, MODEL).prefill(16_000)
    assert control.as_dict()["prompts"][-1]["predicted_ttft_s"] == pytest.approx(taken, rel=0.02)


def test_without_a_model_vllm_decides_and_traffic_teaches_one() -> None:
    machine = Machine(controller(None, max_fit_chunk=60), MODEL)
    assert machine.control.tokens([Prefill("a", 0, 9000)], 0, []) is None
    machine.control.use_policy("fixed", 512)
    machine.prefill(16_000)
    machine.control.use_policy("fixed", 2048)
    machine.now += 10
    machine.prefill(16_000)
    machine.control.use_policy("optimal", None)
    assert machine.control.source == "traffic"


def test_three_tiny_requests_after_start_change_nothing() -> None:
    machine = Machine(controller(MODEL), MODEL.scaled(10))
    for _ in range(3):
        machine.prefill(20)
    assert machine.control.model == MODEL


@pytest.mark.parametrize("every", [1, 4])
def test_a_paused_process_changes_nothing(every: int) -> None:
    machine = Machine(controller(MODEL), MODEL)
    machine.prefill(16_000)
    for prompt in range(8):
        steps = machine.control.as_dict()["prompts"][-1]["histories"]
        machine.prefill(16_000, paused_at=steps[1 + prompt % 4] if prompt % every == 0 else None)
    assert machine.control.model == MODEL


def test_a_cold_first_step_changes_nothing() -> None:
    machine = Machine(controller(MODEL), MODEL)
    machine.prefill(16_000, paused_at=0)
    machine.prefill(16_000)
    assert machine.control.model == MODEL
    assert machine.control.counters.alarms == 0


def test_drift_is_noticed_and_followed_within_20_long_prompts() -> None:
    machine = Machine(controller(MODEL), MODEL)
    for _ in range(5):
        machine.prefill(16_000)
    machine.true = MODEL.scaled(1.3)
    for _ in range(20):
        machine.prefill(16_000)
    last = machine.control.as_dict()["prompts"][-1]
    assert machine.control.source == "traffic"
    assert last["predicted_ttft_s"] == pytest.approx(last["measured_ttft_s"], rel=0.05)


def test_nothing_grows_over_100000_samples() -> None:
    control = controller(MODEL)
    objects = []
    for prompt in range(1000):
        for step in range(100):
            now = prompt * 10.0 + step * 0.05
            control.entered([Part(f"p{prompt}", 50, 50 * step, 5000)], [], now, step)
            control.exited(now + 2 * MODEL.seconds(50, 50 * step), step)
        if prompt in (200, 999):
            gc.collect()
            objects.append(len(gc.get_objects()))
    assert control.counters.steps == 100_000
    assert objects[1] < 1.01 * objects[0]


def test_steps_of_mostly_decodes_pollute_no_fit() -> None:
    control = controller(MODEL)
    for step in range(100):
        control.entered([Part("a", 50, 50 * step, 5000)], [(1, 4000)] * 200, float(step), step)
        control.exited(step + 0.9, step)
    assert control.model == MODEL
    assert not control.as_dict()["prompts"][-1]["alone"]


def test_steps_with_some_decodes_teach() -> None:
    wrong = CostModel(20 * MODEL.c0, MODEL.c1, MODEL.c2, MODEL.c3)
    control, now = controller(wrong), 0.0
    for prompt in range(25):
        at = 0
        while at < 16_384:
            beside = [(1, 1000)] * 8
            chosen = control.tokens([Prefill(f"p{prompt}", at, 16_384 - at)], 0, beside)
            size = min(chosen or LIMIT, 16_384 - at)
            output = object()
            control.entered([Part(f"p{prompt}", size, at, 16_384)], beside, now, output)
            now += 2 * MODEL.step([size, *[1] * 8], [at, *[1000] * 8])
            control.exited(now, output)
            at += size
        now += 2.0
    assert control.counters.refits > 0
    assert control.model is not None
    assert control.model.c0 / control.model.c1 < 5 * MODEL.c0 / MODEL.c1


def test_aborted_prompts_are_forgotten() -> None:
    control = controller(MODEL)
    for request in range(2000):
        control.entered([Part(str(request), 16, 0, 5000)], [], float(request), request)
        control.exited(request + 0.5, request)
    assert control.as_dict()["prompts"] == []


def test_a_step_whose_result_never_came_spoils_no_later_one() -> None:
    control = controller(MODEL)
    for step in ("lost", "a", "b"):
        control.entered([Part(step, 100, 0, 100)], [], 1.0, step)
    control.exited(2.0, "unknown")
    control.exited(2.0, "a")
    control.exited(3.0, "b")
    assert [prompt["request_id"] for prompt in control.as_dict()["prompts"]] == ["a", "b"]


def test_a_rest_is_for_planning_only() -> None:
    control = controller(MODEL)
    control._guard.resting = 3
    machine = Machine(control, MODEL)
    control.use_policy("first_chunk", 4096)
    machine.prefill(10_000)
    assert control.as_dict()["prompts"][-1]["chunks"][0] == 4096
    control.use_policy("optimal", None)
    machine.prefill(10_000)
    assert control.as_dict()["prompts"][-1]["chunks"] == [LIMIT, 10_000 - LIMIT]
    assert control.resting == 2


def test_refits_of_a_stored_model_keep_to_the_floors_of_the_measured_one() -> None:
    control = controller(None)
    control.use_model(MODEL, "stored", (0.004, 0.0))
    assert control.floors == (0.004, 0.0)


def test_step_times_match_the_clock() -> None:
    clock = StageClock(2)
    assert clock.step(0.0, 2.0) == 1.0
    assert clock.step(0.0, 3.0) == 1.0


def test_steps_that_go_in_at_once_come_out_within_the_bound() -> None:
    control = controller(MODEL)
    now = 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("isochunk.vllm.controller.time.monotonic", lambda: now)
        clock, bound = StageClock(2), 0.2
        for step in range(8):  # as many at once as no engine lets in
            seconds = control.within(bound)
            chunk = max(int(MODEL.chunk(seconds)), 1)
            control.entered([Part(str(step), chunk, 0, 100_000)], [], now, step)
            clock.foretell(now, MODEL.seconds(chunk))
            if seconds > MODEL.seconds(1):
                assert clock._left[-1] <= now + bound + 1e-9
        assert control.within(bound) == 0.0
        assert seconds < bound / 8
