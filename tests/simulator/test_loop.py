import math
import time

import numpy as np
import pytest

from isochunk.core.cost import CostModel
from isochunk.core.errors import PlanError, WorkloadError
from isochunk.core.flowshop import completion_times
from isochunk.core.planner import evaluate, plan
from isochunk.simulator import ClosedLoop, Deployment, Lengths, OpenLoop, Request, make_requests, poisson, simulate
from isochunk.simulator.policies import POLICIES

KIMI = CostModel(0.0261, 6.03e-6, 6.5e-10, 5.39e-7)


def machine(stages=4, **changes):
    return Deployment(models=(KIMI,) * stages, **changes)


def prompt(tokens, **changes):
    return OpenLoop([Request(key="only", tokens=tokens, **changes)])


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("cached", [0, 50000])
def test_one_prompt_takes_exactly_what_the_closed_form_says(stages, cached):
    deployment = machine(stages, in_flight=stages + 60)
    result = simulate(deployment, prompt(131072, cached=cached))
    expected = plan(KIMI, 131072, stages, cached=cached, max_chunk=32768, block=16)
    assert result.steps == len(expected.chunks)
    assert result.ttft[0] == pytest.approx(expected.ttft_s, rel=1e-12)


def test_k_steps_in_flight_follow_the_recursion():
    result = simulate(machine(4, max_tokens=8192), prompt(131072), "fixed")
    histories = np.arange(0, 131072, 8192)
    times = np.repeat(KIMI.seconds(8192.0, histories.astype(float))[:, None], 4, axis=1)
    assert result.ttft[0] == pytest.approx(completion_times(times, in_flight=4)[-1, -1], rel=1e-12)


def test_stages_that_differ_follow_the_recursion():
    models = (KIMI, KIMI.scaled(1.3), KIMI)
    deployment = Deployment(models=models, max_tokens=16384, in_flight=50)
    result = simulate(deployment, prompt(131072), "fixed")
    assert result.ttft[0] == pytest.approx(evaluate(models, [16384] * 8), rel=1e-12)


def test_the_planner_tapers_its_cut_for_a_slow_last_stage():
    models = (KIMI, KIMI, KIMI, KIMI.scaled(1.2))
    result = simulate(Deployment(models=models, in_flight=60), prompt(131072))
    assert result.ttft[0] == pytest.approx(plan(models, 131072, max_chunk=32768, block=16).ttft_s, rel=1e-12)
    even = plan(KIMI.scaled(1.2), 131072, 4, max_chunk=32768, block=16).chunks
    assert result.ttft[0] < 0.97 * evaluate(models, even)


@pytest.mark.parametrize("policy", ["optimal", "fixed"])
def test_prompts_that_come_together_are_seen_together_however_they_come(policy):
    requests = make_requests(6, Lengths(mean=300))
    ours, theirs = (simulate(machine(), load, policy) for load in (OpenLoop(requests), ClosedLoop(requests, 6)))
    assert ours.finished == theirs.finished
    assert ours.steps == theirs.steps < 6


@pytest.mark.parametrize("stages", [2, 4])
def test_stages_do_not_wait_for_prompts_that_differ(stages):
    requests = make_requests(100, Lengths(shape="uniform", least=4000, most=64000), seed=1)
    roomy = machine(stages, max_tokens=1 << 17)
    result = simulate(roomy, ClosedLoop(requests, 16))
    fixed = simulate(roomy, ClosedLoop(requests, 16), "fixed", chunk=8192)
    assert max(result.bubbles) < 0.05
    assert result.ttft.mean() < fixed.ttft.mean()
    assert result.tokens_per_s > fixed.tokens_per_s


def test_send_and_return_latency_are_on_the_way_of_a_lone_step():
    result = simulate(machine(3, send_s=0.5, return_s=0.25), prompt(1000), "fixed")
    assert result.ttft[0] == pytest.approx(3 * KIMI.seconds(1000) + 2 * 0.5 + 0.25)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_computes_every_token_once_and_within_the_budget(policy):
    requests = make_requests(40, Lengths(shape="uniform", least=100, most=60000), prefix_hit=0.5, block=16, seed=3)
    result = simulate(machine(2, max_tokens=8192), ClosedLoop(requests, 4), policy, record=True)
    seen = {request.key: request.cached for request in requests}
    for step in result.recorded[0]:
        assert 0 < sum(chunk for _, chunk, _ in step.parts) <= 8192
        for part, chunk, history in step.parts:
            assert history == seen[part.request.key]
            seen[part.request.key] += chunk
    assert seen == {request.key: request.tokens for request in requests}
    assert len(result.finished) == 40


def test_a_closed_loop_has_never_more_than_its_concurrency_in_the_system():
    result = simulate(machine(2), ClosedLoop(make_requests(30, Lengths(mean=20000)), 3))
    starts = sorted(request.arrived for request in result.finished)
    ends = sorted(request.first_token for request in result.finished)
    assert all(start >= end for start, end in zip(starts[3:], ends, strict=False))


def test_closed_loop_throughput_obeys_littles_law():
    requests = make_requests(400, Lengths(mean=16384), block=16)
    result = simulate(machine(2), ClosedLoop(requests, 4), "fixed", chunk=8192)
    assert 400 / result.seconds == pytest.approx(4 / result.ttft.mean(), rel=0.02)


def test_two_instances_share_the_work_and_shorten_the_wait():
    workload = [make_requests(60, Lengths(mean=32768), block=16, seed=1) for _ in range(2)]
    one = simulate(machine(2), poisson(workload[0], 0.9, seed=1), "fixed", chunk=8192)
    two = simulate(machine(2, instances=2), poisson(workload[1], 0.9, seed=1), "fixed", chunk=8192)
    assert two.ttft.mean() < one.ttft.mean()
    assert all(
        steps
        for steps in (
            len(i) for i in simulate(machine(2, instances=2), poisson(workload[0], 0.9), record=True).recorded
        )
    )


def test_bubbles_are_the_idle_share_of_the_busy_time():
    result = simulate(machine(4, max_tokens=8192), prompt(8192), "fixed")
    assert result.bubbles == pytest.approx([0.75] * 4)


def test_under_load_isochunk_beats_its_own_fixed_budget():
    requests = make_requests(64, Lengths(mean=131072), block=16)
    fixed, law = (simulate(machine(8), ClosedLoop(requests, 4), policy).ttft.mean() for policy in ("fixed", "optimal"))
    assert law < 0.8 * fixed


def test_a_thousand_mixed_requests_on_eight_stages_take_under_half_a_second_a_hundred():
    requests = make_requests(1000, Lengths(shape="uniform", least=1000, most=65536), block=16)
    begin = time.process_time()
    simulate(machine(8), poisson(requests, 0.3))
    assert time.process_time() - begin < 5.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"models": ()}, "stages = 0"),
        ({"in_flight": 3}, "K = 3 must be at least the 4 stages"),
        ({"send_s": -1.0}, "send_s"),
        ({"return_s": math.nan}, "return_s"),
        ({"max_tokens": 0}, "max_tokens = 0"),
        ({"router": "magic"}, "router"),
    ],
)
def test_an_impossible_machine_is_refused_by_name(changes, message):
    with pytest.raises(PlanError, match=message):
        Deployment(**({"models": (KIMI,) * 4} | changes))


def test_empty_and_impossible_workloads_are_refused():
    with pytest.raises(WorkloadError, match="empty"):
        OpenLoop([])
    with pytest.raises(WorkloadError, match="concurrency = 0"):
        ClosedLoop(make_requests(1, Lengths(mean=5)), 0)
    with pytest.raises(WorkloadError, match="arrival"):
        Request(key="a", tokens=5, arrival=-1.0)
    with pytest.raises(WorkloadError, match="rate = 0"):
        poisson(make_requests(1, Lengths(mean=5)), 0.0)
    with pytest.raises(PlanError, match="policy = 'best'"):
        simulate(machine(2), prompt(10), "best")


def test_truncated_normal_lengths_stay_inside():
    lengths = Lengths(shape="normal", mean=32768, std=32768, least=4096, most=65536)
    tokens = [request.tokens for request in make_requests(500, lengths)]
    assert 4096 <= min(tokens) < 8000
    assert 60000 < max(tokens) <= 65536


def test_a_bound_on_the_queue_delay_lets_short_prompts_pass_a_long_one():
    requests = [Request(key="long", tokens=1_000_000, arrival=0.0), Request(key="short", tokens=4000, arrival=5.0)]
    times = {}
    for bound in (None, 2.0):
        result = simulate(machine(), OpenLoop(requests), max_queue_delay=bound)
        times[bound] = {done.key: done.first_token - done.arrived for done in result.finished}
    assert times[None]["short"] > 100
    # When the bound is reached, the steps in the pipeline and one more of the long prompt still go first.
    steps = [KIMI.seconds(32768, history) for history in (98304, 131072, 163840, 196608)]
    assert times[2.0]["short"] < 2.0 + sum(steps) + 3 * steps[-1]
    assert times[2.0]["long"] < 1.05 * times[None]["long"]


def test_least_work_first_brings_mixed_prompts_earlier_and_lets_nobody_wait_for_ever():
    lengths = Lengths(shape="uniform", least=1000, most=32768)
    requests = make_requests(400, lengths, seed=1)
    rate = 0.8 / float(np.mean([KIMI.seconds(request.tokens) for request in requests]))
    found = {}
    for bound in (None, 0.0, 8.0):
        result = simulate(machine(), poisson(requests, rate, seed=2), least_work_first=bound)
        found[bound] = result.ttft
    assert found[0.0].mean() == pytest.approx(found[None].mean(), rel=0.02)
    assert found[8.0].mean() < found[None].mean()
    longest_step = KIMI.seconds(32768, 0)
    assert found[8.0].max() < 8.0 + 8 * longest_step


@pytest.mark.parametrize("option", ["max_queue_delay", "least_work_first"])
def test_published_rules_serve_in_order(option):
    with pytest.raises(PlanError, match=option):
        simulate(machine(), prompt(1000), "ascend", **{option: 1.0})
