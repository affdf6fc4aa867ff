"""What one node does beside prefill: its KV cache, answers, KV loads, its API server."""

import pytest

from isochunk.core.cost import CostModel
from isochunk.core.errors import PlanError, WorkloadError
from isochunk.simulator import ClosedLoop, Deployment, Lengths, OpenLoop, Request, make_requests, simulate
from isochunk.simulator.policies import POLICIES

MODEL = CostModel(0.01, 1e-5, 1e-10, 1e-7)


def machine(stages=2, **changes):
    return Deployment(models=(MODEL,) * stages, **changes)


def open_loop(*requests):
    return OpenLoop([Request(key=str(at), **fields) for at, fields in enumerate(requests)])


def test_an_answer_takes_a_step_through_all_stages_for_each_token():
    result = simulate(machine(), open_loop({"tokens": 1000, "output": 11}), "fixed")
    steps = [2 * MODEL.seconds(1, 1000 + n) for n in range(10)]
    assert result.tpot[0] == pytest.approx(sum(steps) / 10)
    assert result.finished[0].ended - result.finished[0].first_token == pytest.approx(sum(steps))


def test_a_prompt_of_others_makes_answers_wait_for_longer_steps():
    prompts = [{"tokens": 100, "output": 50}, {"tokens": 60000, "arrival": 0.1}]
    alone = simulate(machine(), open_loop(prompts[0]), "fixed", chunk=8192).tpot[0]
    assert simulate(machine(), open_loop(*prompts), "fixed", chunk=8192).tpot[0] > 1.5 * alone


def test_prompts_wait_for_room_in_the_kv_cache():
    prompts = [{"tokens": 16_000}] * 2
    together = simulate(machine(kv_tokens=40_000), open_loop(*prompts), "fixed")
    in_turn = simulate(machine(kv_tokens=20_000), open_loop(*prompts), "fixed")
    assert together.steps == 1
    assert in_turn.ttft == pytest.approx([2 * MODEL.seconds(16_000), 4 * MODEL.seconds(16_000)])
    assert in_turn.preemptions == 0


def test_answers_that_outgrow_the_kv_cache_preempt_the_last_that_began():
    result = simulate(machine(kv_tokens=2048), open_loop(*[{"tokens": 900, "output": 200}] * 2), "fixed")
    assert [request.preemptions for request in sorted(result.finished)] == [0, 1]
    assert result.as_dict()["preemptions"] == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_is_answered_however_little_room_there_is(policy):
    requests = make_requests(60, Lengths(shape="uniform", least=1, most=3000), output=70, seed=2)
    result = simulate(machine(kv_tokens=4096, max_tokens=2048), ClosedLoop(requests, 20), policy)
    assert sorted(done.key for done in result.finished) == sorted(request.key for request in requests)
    assert result.as_dict()["output_tokens"] == 60 * 70


def test_a_request_that_no_kv_cache_of_this_size_can_hold_is_refused():
    with pytest.raises(PlanError, match="kv_tokens = 2048 can't hold request 0: 2000 tokens and 40 of its answer"):
        simulate(machine(kv_tokens=2048), open_loop({"tokens": 2000, "output": 40}))
    assert simulate(machine(kv_tokens=2048), open_loop({"tokens": 2000, "output": 33})).steps == 33


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_tokens": 31}, "kv_tokens = 31"),
        ({"max_seqs": 0}, "max_seqs = 0"),
        ({"load_rate": 0.0}, "load_rate = 0.0"),
        ({"intake_s": float("inf")}, "intake_s = inf"),
    ],
)
def test_an_impossible_node_is_refused_by_name(changes, message):
    with pytest.raises(PlanError, match=message):
        machine(**changes)
    with pytest.raises(WorkloadError, match="output = 0"):
        Request(key="a", tokens=5, output=0)


@pytest.mark.parametrize("policy", ["optimal", "fixed"])
def test_kv_from_elsewhere_is_there_when_it_has_come(policy):
    loaded = machine(load_rate=10_000.0)
    prompt = {"tokens": 30_000, "cached": 20_000}
    at_once = simulate(machine(), open_loop(prompt), policy).ttft[0]
    assert simulate(loaded, open_loop(prompt), policy).ttft[0] == pytest.approx(2.0 + at_once)


@pytest.mark.parametrize("policy", POLICIES)
def test_while_one_prompt_is_loaded_those_behind_it_are_computed(policy):
    prompts = [{"tokens": 30_000, "cached": 29_000}, {"tokens": 1000}]
    result = simulate(machine(load_rate=10_000.0), open_loop(*prompts), policy)
    times = {done.key: done.first_token for done in result.finished}
    assert times["1"] < 1.0
    assert 2.9 < times["0"] < 3.2
    assert result.hit_tokens == 29_000


def test_loads_come_one_after_the_other():
    prompts = [{"tokens": 10_001, "cached": 10_000}] * 3
    result = simulate(machine(load_rate=10_000.0), open_loop(*prompts), "fixed")
    assert sorted(int(done.first_token) for done in result.finished) == [1, 2, 3]


def test_a_load_waits_for_room_and_the_last_token_is_computed_in_any_case():
    prompts = [{"tokens": 20_000}, {"tokens": 20_001, "cached": 20_000}]
    result = simulate(machine(kv_tokens=30_000, load_rate=1e6), open_loop(*prompts), "fixed")
    ended = {done.key: done.ended for done in result.finished}
    assert ended["1"] > ended["0"] + 0.02
    assert result.as_dict()["computed_tokens"] == 20_001


def test_no_more_requests_run_than_are_allowed():
    requests = make_requests(30, Lengths(mean=100), output=5)
    result = simulate(machine(max_seqs=4), OpenLoop(requests), "fixed", record=True)
    assert max(len(step.parts) for step in result.recorded[0]) <= 4
    assert len(result.finished) == 30


def test_the_api_server_takes_one_request_after_the_other():
    slow = machine(intake_s=0.5, intake_token_s=1e-3)
    result = simulate(slow, open_loop(*[{"tokens": 500}] * 2), "fixed")
    assert sorted(done.first_token for done in result.finished) == pytest.approx(
        [at + 2 * MODEL.seconds(500) for at in (1.0, 2.0)]
    )


def test_the_router_sends_a_prompt_to_the_instance_that_holds_its_beginning():
    blocks = tuple(range(40))
    first, second = ({"tokens": 20_000, "arrival": at, "blocks": blocks} for at in (0.0, 100.0))
    other = {"tokens": 20_000, "arrival": 0.0}
    result = simulate(machine(instances=2), open_loop(first, other, second), "fixed")
    assert {done.key: done.hit for done in result.finished} == {"0": 0, "1": 0, "2": 19_984}
