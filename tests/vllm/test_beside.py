"""What else stands in a step beside the prompt that is planned: it gets what vLLM alone would give it."""

from collections.abc import Callable
from concurrent.futures import Future
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from vllm.config import KVTransferConfig
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from isochunk import plan
from isochunk.vllm.compat import vllm_version, waiting_behind, waiting_requests
from isochunk.vllm.testing import BLOCK, Engine
from isochunk.vllm.versions import NEWEST, minor
from vllm import SamplingParams

from .conftest import MODEL
from .mixes import Grammar, Loads

Make = Callable[..., Engine]
ON = {"enabled": True}


def ids(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, count).tolist()


def steps_of(engine: Engine, key: str) -> list[int]:
    return [at for at, step in enumerate(engine.steps) if key in step]


def asked(engine: Engine, key: str, tokens: int, *, output: int = 1, adapter: int = 0, **params: Any) -> Request:
    return Request(
        request_id=key,
        prompt_token_ids=ids(len(key) * 1000 + ord(key[-1]), tokens),
        sampling_params=SamplingParams(max_tokens=output, ignore_eos=True, **params),
        pooling_params=None,
        block_hasher=engine._hasher,
        lora_request=LoRARequest(f"lora{adapter}", adapter, "nowhere") if adapter else None,
    )


@pytest.mark.parametrize("policy", ["optimal", "first_chunk", "fixed"])
def test_whom_a_threshold_lets_through_gets_through_in_the_same_step(make_engine: Make, policy: str) -> None:
    served = []
    for section in ({**ON, "policy": policy}, None):
        engine = make_engine(section, long_prefill_token_threshold=4096, max_num_batched_tokens=8192)
        if section and policy == "fixed":
            engine.scheduler.isochunk.use_policy("fixed", 1024)
        engine.add("long", ids(0, 60_000))
        for _ in range(4):
            engine.step_fn()
        for name in "abcd":
            engine.add(name, ids(ord(name), 500))
        engine.run()
        served.append({name: steps_of(engine, name) for name in "abcd"})
        assert all(step["long"] <= 4096 for step in engine.steps if len(step) > 1)
    assert served[0] == served[1]


def test_whoever_decodes_gets_a_token_while_a_prompt_takes_turns(make_engine: Make) -> None:
    engine = make_engine({**ON, "max_queue_delay": 0.0})
    engine.add("long", ids(0, 60_000))
    for _ in range(4):
        engine.step_fn()
    engine.add("short", ids(1, 100), output_tokens=10)
    engine.run()
    taken = steps_of(engine, "short")
    assert max(b - a for a, b in pairwise(taken)) <= 2  # two stages: every other step


@pytest.mark.parametrize("bound", [None, 0.0])
@pytest.mark.parametrize("most", [1, 2])
def test_turns_and_adapters_work_together(make_engine: Make, bound: float | None, most: int) -> None:
    engine = make_engine({**ON, "max_queue_delay": bound}, enable_lora=True, max_loras=most)
    for at, (tokens, adapter) in enumerate([(20_000, 1), (700, 2), (900, 3), (400, 1), (300, 0)]):
        engine.scheduler.add_request(asked(engine, f"r{at}", tokens, output=5, adapter=adapter))
        for _ in range(3):
            engine.step_fn()
    engine.run()
    assert not engine.scheduler.requests
    assert engine.scheduler.isochunk.controller.counters.fallbacks == 0


def test_a_prompt_is_planned_in_the_step_in_which_its_grammar_is_there(make_engine: Make) -> None:
    engine = make_engine(ON, max_num_batched_tokens=16_384)
    request = asked(engine, "g", 12_000, structured_outputs=StructuredOutputsParams(regex="a*"))
    future: Future[Any] = Future()
    request.structured_output_request.grammar = future
    engine.scheduler.add_request(request)
    for _ in range(3):
        engine.step_fn()
    assert not engine.steps
    future.set_result(Grammar())
    engine.run()
    taken = [step["g"] for step in engine.steps]
    assert taken == list(plan(MODEL, 12_000, 2, max_chunk=16_384, block=BLOCK).chunks)


class Between(Loads):
    """Everything but the last block of every prompt named "load..." is loaded between steps."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        more = (request.num_prompt_tokens - 1) // BLOCK * BLOCK - num_computed_tokens
        return (more, True) if request.request_id.startswith("load") and more > 0 else (0, False)


def test_loads_start_in_the_step_in_which_vllm_alone_starts_them(make_engine: Make, tmp_path: Any) -> None:
    started = []
    for section in (ON, None):
        transfer = KVTransferConfig(
            kv_connector="Between",
            kv_connector_module_path=__name__,
            kv_role="kv_both",
            kv_connector_extra_config={"shared_storage_path": str(tmp_path)},
        )
        engine = make_engine(section, kv_transfer_config=transfer, max_num_batched_tokens=32_768)
        engine.add("first", ids(0, 20_000))
        engine.add("second", ids(1, 5000))
        for name in ("load1", "load2"):
            engine.add(name, ids(len(name) + ord(name[-1]), 3000))
        engine.add("third", ids(2, 500))
        engine.scheduler.schedule()
        remote = RequestStatus.WAITING_FOR_REMOTE_KVS
        started.append([key for key, request in engine.scheduler.requests.items() if request.status is remote])
        if section:
            waiting = [request.request_id for request in waiting_requests(engine.scheduler)]
            assert waiting == ["second", "third"]
            assert waiting_behind(engine.scheduler, []) == 2
    assert started[0] == started[1] == ["load1", "load2"]


def test_blocked_requests_at_the_front_hide_nobody(make_engine: Make) -> None:
    engine = make_engine(ON)
    for at in range(300):
        request = asked(engine, f"blocked{at}", 50, structured_outputs=StructuredOutputsParams(regex="a*"))
        request.structured_output_request.grammar = Future()
        engine.scheduler.add_request(request)
    engine.add("a", ids(0, 7200))
    for _ in range(30):
        engine.step_fn()
    assert [step["a"] for step in engine.steps] == list(plan(MODEL, 7200, 2, max_chunk=2048, block=BLOCK).chunks)


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_no_size_is_too_small_for_multi_token_prediction(make_engine: Make, chunk: int) -> None:
    engine = make_engine(ON)
    engine.scheduler.num_prefill_lookahead = 4  # as with a drafter of four modules
    engine.scheduler.isochunk.use_policy("fixed", chunk)
    engine.add("a", ids(0, 301), output_tokens=2)
    engine.run(5000)
    assert not engine.scheduler.requests


def test_a_pause_asks_no_connector_and_is_no_harm(make_engine: Make, tmp_path: Any) -> None:
    transfer = KVTransferConfig(
        kv_connector="Counting",
        kv_connector_module_path=__name__,
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": str(tmp_path)},
    )
    engine = make_engine(ON, kv_transfer_config=transfer)
    engine.add("a", ids(0, 7200))
    for _ in range(4):
        engine.step_fn()
    engine.add("b", ids(1, 700))
    asked_before = Counting.asked
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    for _ in range(5):
        engine.scheduler.schedule()
    assert Counting.asked == asked_before
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run()
    records = {record["request_id"]: record for record in engine.scheduler.isochunk.as_dict()["prompts"]}
    assert not records["a"]["alone"]


class Counting(Loads):
    asked = 0

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        Counting.asked += 1
        return 0, False


def test_a_record_is_one_run_of_one_prompt(make_engine: Make) -> None:
    engine = make_engine(ON)
    engine.add("a", ids(0, 7200))
    for _ in range(4):
        engine.step_fn()
    engine.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    engine.add("a", ids(1, 964))
    engine.run()
    engine.add("b", ids(2, 5000))
    for _ in range(4):
        engine.step_fn()
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.run()
    records = {record["request_id"]: record for record in engine.scheduler.isochunk.as_dict()["prompts"]}
    for key, tokens in (("a", 964), ("b", 5000)):
        assert sum(records[key]["chunks"]) == records[key]["tokens"] == tokens
        assert records[key]["histories"][0] == 0


def test_a_step_beside_a_stream_keeps_to_its_seconds(make_engine: Make) -> None:
    engine = make_engine({**ON, "max_inter_token_latency": 0.04})
    engine.add("stream", ids(0, 50), output_tokens=60)
    for _ in range(4):
        engine.step_fn()
    engine.add("long", ids(1, 20_000))
    engine.run()
    taken = steps_of(engine, "stream")
    for at in range(taken[2], taken[-1]):
        step, history = engine.steps[at], engine.histories[at]
        seconds = MODEL.c0 + sum(float(MODEL.marginal(new, history[key])) for key, new in step.items())
        assert seconds <= 0.02 + float(MODEL.marginal(16, 20_000) - MODEL.c3 * 20_000) or step.get("long", 0) <= 16
    beside = [step["long"] for step in engine.steps[: taken[-1]] if "long" in step]
    after = [step["long"] for step in engine.steps[taken[-1] + 1 :]]
    assert max(after) > beside[-1]


def test_a_look_at_what_is_cached_costs_a_few_blocks(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(ON, max_model_len=131_072)
    shared = ids(0, 115_200)
    engine.add("first", shared)
    engine.run()
    for at in range(64):
        engine.add(f"w{at}", [*shared, *ids(at + 1, 12_000)])
    pool, looked = engine.scheduler.kv_cache_manager.block_pool, [0]
    inner = pool.get_cached_block

    def counted(*args: Any) -> Any:
        looked[0] += 1
        return inner(*args)

    monkeypatch.setattr(pool, "get_cached_block", counted)
    costs = []
    for _ in range(40):
        before = looked[0]
        batch = engine.scheduler._bounds()
        costs.append(looked[0] - before)
        assert batch is not None
        engine.step_fn()
    assert max(costs) < 32 * 40  # the first look at 32 prompts
    assert sorted(costs)[len(costs) // 2] < 64
    assert engine.scheduler._hits.of(engine.scheduler.requests["w9"], -1, following=True) == 115_200


@pytest.mark.parametrize(("policy", "chunk"), [("optimal", None), ("fixed", 5)])
def test_chunks_end_on_blocks_where_vllm_keeps_state_at_their_ends(
    make_engine: Make, policy: str, chunk: int | None
) -> None:
    engine = make_engine(ON)
    engine.scheduler.need_mamba_block_aligned_split = True  # as with Mamba layers in vLLM's "align" mode
    engine.scheduler.isochunk.use_policy(policy, chunk)
    engine.add("a", ids(0, 1500), output_tokens=3)
    engine.run(5000)
    assert not engine.scheduler.requests
    assert all(history["a"] % BLOCK == 0 for history in engine.histories if history["a"] < 1500)
    assert engine.scheduler.need_mamba_block_aligned_split


@pytest.mark.skipif((minor(vllm_version()) or NEWEST) < (0, 24), reason="0.23 has no such argument")
def test_steps_in_which_data_parallel_ranks_hold_prefills_back_are_vllms(make_engine: Make) -> None:
    engine = make_engine(ON)
    engine.add("stream", ids(0, 50), output_tokens=30)
    for _ in range(4):
        engine.step_fn()
    engine.add("long", ids(1, 9000))
    schedule, turns = engine.scheduler.schedule, iter(range(10_000))
    engine.scheduler.schedule = lambda: schedule(next(turns) % 2 == 0)
    engine.run(2000)
    assert not engine.scheduler.requests
    assert sum(step.get("long", 0) for step in engine.steps) == 9000
    assert engine.scheduler.isochunk.controller.counters.fallbacks == 0
