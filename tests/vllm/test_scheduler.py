from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
from vllm.v1.metrics.stats import PrefixCacheStats

from isochunk import plan
from isochunk.core.errors import ConfigError, ModelError
from isochunk.vllm import AsyncScheduler
from isochunk.vllm.compat import PrefixHits
from isochunk.vllm.prompts import Part
from isochunk.vllm.testing import BLOCK, Engine

from .conftest import MODEL

Make = Callable[..., Engine]
ON = {"enabled": True}


def chunks(engine: Engine, request_id: str) -> list[int]:
    return [step[request_id] for step in engine.steps if request_id in step]


def ids(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, count).tolist()


def test_a_prompt_alone_follows_the_plan(make_engine: Make) -> None:
    engine = make_engine(ON)
    engine.add("a", ids(0, 7200))
    engine.run()
    assert chunks(engine, "a") == list(plan(MODEL, 7200, 2, max_chunk=2048, block=BLOCK).chunks)


def test_the_fixed_policy_is_vllm_itself(make_engine: Make) -> None:
    ours, theirs = make_engine({**ON, "policy": "fixed"}), make_engine(None)
    for engine in (ours, theirs):
        for request in range(5):
            engine.add(str(request), ids(request, 1000 + 777 * request), output_tokens=3)
        engine.run()
    assert ours.steps == theirs.steps


def test_a_fixed_size_is_kept_to(make_engine: Make) -> None:
    engine = make_engine(ON)
    engine.scheduler.isochunk.use_policy("fixed", 500)
    engine.add("a", ids(0, 2100))
    engine.run()
    assert chunks(engine, "a") == [500, 500, 500, 500, 100]


def test_no_smoothing_is_vllm_itself(make_engine: Make) -> None:
    engine = make_engine({**ON, "smooth_factor": 0.0})
    engine.add("a", ids(0, 5000))
    engine.run()
    assert chunks(engine, "a") == [2048, 2048, 904]


def test_a_prefix_hit_is_history_and_its_first_chunk_is_planned(make_engine: Make) -> None:
    engine = make_engine(ON)
    shared = ids(0, 3200)
    engine.add("a", shared)
    engine.run()
    engine.add("b", [*shared, *ids(1, 4000)])
    engine.run()
    expected = plan(MODEL, 7200, 2, cached=3200, max_chunk=2048, block=BLOCK).chunks
    assert chunks(engine, "b") == list(expected)


def test_a_prompt_that_vllm_pads_for_speculation_is_served(make_engine: Make) -> None:
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    engine = make_engine(ON, speculative_config=speculation)
    shared = ids(0, 3201)
    for name in "ab":
        engine.add(name, shared)
        engine.run()
    assert sum(chunks(engine, "b")) <= 4


def test_without_prefix_caching_nothing_is_history(make_engine: Make) -> None:
    engine = make_engine(ON, enable_prefix_caching=False)
    shared = ids(0, 3200)
    for name in "ab":
        engine.add(name, shared)
        engine.run()
    assert chunks(engine, "a") == chunks(engine, "b") == list(plan(MODEL, 3200, 2, max_chunk=2048, block=BLOCK).chunks)


class StoredPrefix(ExampleConnector):  # type: ignore[misc]
    """vLLM's example of a connector, with the first 3200 tokens of every prompt in store."""

    asked: ClassVar[list[tuple[str, int]]] = []

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        self.asked.append((request.request_id, num_computed_tokens))
        return max(3200 - num_computed_tokens, 0), False


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What vLLM notes of its prefix caches, local and external."""
    notes: list[dict[str, Any]] = []
    monkeypatch.setattr(PrefixCacheStats, "record", lambda self, **note: notes.append(note))
    return notes


def test_an_external_hit_is_history_and_the_connector_is_asked_once_or_twice(
    make_engine: Make, tmp_path: Path, looked_up: list[dict[str, Any]]
) -> None:
    transfer = {
        "kv_connector": "StoredPrefix",
        "kv_connector_module_path": __name__,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    seen = []
    for section in (ON, None):
        engine = make_engine(section, kv_transfer_config=KVTransferConfig(**transfer))
        for name in "ab":
            engine.add(name, ids(ord(name), 7200))
            engine.run()
        for name in "cdef":  # all at once
            engine.add(name, ids(ord(name), 7200))
        engine.run()
        if section:
            expected = plan(MODEL, 7200, 2, cached=3200, max_chunk=2048, block=BLOCK).chunks
            assert chunks(engine, "a") == chunks(engine, "b") == list(expected)
            assert engine.scheduler.isochunk.controller.counters.fallbacks == 0
        assert {sum(chunks(engine, name)) for name in "abcdef"} == {4000}
        asked = StoredPrefix.asked
        assert max(map(asked.count, asked)) <= (2 if section else 1)  # once to learn whether its KV is to be loaded
        if not hasattr(engine.scheduler, "kv_holding_waiting"):  # until 0.30 a look-up counts though it is put off
            looked_up[:] = [note for at, note in enumerate(looked_up) if note not in looked_up[:at]]
        seen.append((looked_up.copy(), list(dict.fromkeys(asked))))
        looked_up.clear()
        StoredPrefix.asked.clear()
    assert seen[0] == seen[1]
    assert len(seen[0][1]) == 6
    assert 3200 in [note["num_hits"] for note in seen[0][0]]


def test_looking_up_a_hit_changes_no_statistics(make_engine: Make, looked_up: list[dict[str, Any]]) -> None:
    seen = []
    for section in (ON, None):
        engine = make_engine(section)
        shared = ids(0, 3200)
        for name in "abc":
            engine.add(name, [*shared, *ids(ord(name), 900)])
            engine.run()
        seen.append(looked_up.copy())
        looked_up.clear()
    assert seen[0] == seen[1]
    assert [note["num_hits"] for note in seen[0]] == [0, 3200, 3200]


def test_looking_up_a_hit_changes_no_eviction_order(make_engine: Make) -> None:
    engine = make_engine(ON)
    engine.add("a", ids(0, 3200))
    engine.run()
    engine.add("b", ids(0, 3300))
    pool = engine.scheduler.kv_cache_manager.block_pool.free_block_queue
    before = [block.block_id for block in pool.get_all_free_blocks()]
    assert PrefixHits(engine.scheduler).of(engine.scheduler.requests["b"], 0) == 3200
    assert [block.block_id for block in pool.get_all_free_blocks()] == before


def test_decodes_are_served_beside_a_long_prompt(make_engine: Make) -> None:
    engine = make_engine(ON)
    engine.add("short", ids(0, 50), output_tokens=20)
    for _ in range(4):
        engine.step_fn()
    engine.add("long", ids(1, 30_000))
    engine.run()
    first = next(at for at, step in enumerate(engine.steps) if "long" in step)
    beside = [step for step in engine.steps[first:] if "short" in step]
    assert len(beside) >= 15
    assert all(step["short"] == 1 for step in beside)
    # vLLM can give a decode its next turn only when its last one is out of the pipeline.
    turns = [at for at, step in enumerate(engine.steps) if "short" in step]
    assert max(b - a for a, b in pairwise(turns)) <= 2


def test_every_token_is_scheduled_once_under_load(make_engine: Make) -> None:
    engine = make_engine(ON)
    lengths = np.random.default_rng(3).integers(1, 9000, 64)
    for request, length in enumerate(lengths):
        engine.add(str(request), ids(request, int(length)))
    engine.run()
    assert [sum(chunks(engine, str(r))) for r in range(64)] == lengths.tolist()
    assert max(sum(step.values()) for step in engine.steps) <= 2048


def test_preempted_and_aborted_requests_end(make_engine: Make) -> None:
    engine = make_engine(ON, blocks=700)
    for request in range(6):
        engine.add(str(request), ids(request, 3000), output_tokens=400)
    for turn in range(60):
        engine.step_fn()
        if turn == 30:
            engine.scheduler.finish_requests("1", _aborted())
    engine.run()
    assert not engine.scheduler.requests
    assert engine.scheduler.isochunk.controller.counters.fallbacks == 0


def test_a_planner_that_fails_leaves_the_step_to_vllm_and_is_counted(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, plain = make_engine(ON), make_engine(None)

    def broken(*_: object, **__: object) -> int:
        raise ModelError("broken on purpose")

    monkeypatch.setattr(engine.scheduler.isochunk.controller.planner, "tokens", broken)
    for each in (engine, plain):
        each.add("a", ids(0, 5000))
        each.run()
    assert engine.steps == plain.steps
    assert engine.scheduler.isochunk.controller.counters.fallbacks >= 3


def test_a_fault_in_recording_stops_nothing_and_spoils_no_later_step(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(ON)
    controller = engine.scheduler.isochunk.controller
    entered, turns = controller.entered, iter(range(1000))

    def broken(parts: list[Part], *arguments: object) -> None:
        if parts and next(turns) == 1:
            raise IndexError("broken on purpose")
        entered(parts, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(controller, "entered", broken)
    for name in "ab":
        engine.add(name, ids(ord(name), 5000))
        engine.run()
    assert sum(chunks(engine, "a")) == sum(chunks(engine, "b")) == 5000
    assert controller.counters.fallbacks == 1
    assert controller.as_dict()["prompts"][-1]["chunks"] == chunks(engine, "b")


def test_priority_order_is_vllms(make_engine: Make) -> None:
    engine = make_engine(ON, scheduling_policy="priority")
    engine.add("later", ids(0, 4000), priority=5)
    engine.add("sooner", ids(1, 4000), priority=1)
    engine.run()
    order = [request for step in engine.steps for request in step]
    assert order.index("later") > len(order) - 1 - order[::-1].index("sooner") - 1


def test_the_asynchronous_scheduler_is_narrowed_too(make_engine: Make) -> None:
    engine = make_engine(ON, scheduler_cls="isochunk.vllm.AsyncScheduler")
    assert isinstance(engine.scheduler, AsyncScheduler)
    engine.add("a", ids(0, 7200))
    engine.run()
    assert chunks(engine, "a") == list(plan(MODEL, 7200, 2, max_chunk=2048, block=BLOCK).chunks)


def test_what_happened_to_a_prompt_is_told(make_engine: Make) -> None:
    engine = make_engine(ON)
    engine.add("a", ids(0, 7200))
    engine.run()
    told = engine.scheduler.isochunk.as_dict()
    prompt = told["prompts"][-1]
    assert prompt["request_id"] == "a"
    assert prompt["tokens"] == 7200
    assert prompt["alone"]
    assert prompt["chunks"] == chunks(engine, "a")
    assert prompt["predicted_ttft_s"] == pytest.approx(plan(MODEL, 7200, 2, max_chunk=2048, block=BLOCK).ttft_s)
    assert len(prompt["measured_s"]) == len(prompt["entered_s"]) == len(prompt["chunks"])
    assert told["counters"]["planned"] == 1


def _aborted() -> object:
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ABORTED


def ended_after(engine: Engine, key: str) -> int:
    """Steps made until the prompt's last chunk."""
    return max(at for at, step in enumerate(engine.steps) if key in step) + 1


@pytest.mark.parametrize("policy", ["optimal", "fixed"])
def test_a_short_prompt_waits_no_longer_than_the_bound_behind_a_long_one(make_engine: Make, policy: str) -> None:
    ends = {}
    for bound in (None, 0.0):
        engine = make_engine({**ON, "policy": policy, "max_queue_delay": bound})
        engine.add("long", ids(0, 60_000))
        for _ in range(4):
            engine.step_fn()
        engine.add("short", ids(1, 1500))
        engine.run()
        ends[bound] = ended_after(engine, "short")
        assert sum(chunks(engine, "long")) == 60_000
        assert sum(chunks(engine, "short")) == 1500
        counters = engine.scheduler.isochunk.controller.counters
        assert (counters.yields > 0) == (bound is not None)
        record = next(r for r in engine.scheduler.isochunk.as_dict()["prompts"] if r["request_id"] == "long")
        assert bound is None or not record["alone"]  # so that the guard does not judge it
    assert ends[0.0] < 15 < ends[None]


def test_two_prompts_of_a_kind_don_t_take_turns(make_engine: Make) -> None:
    engine = make_engine({**ON, "max_queue_delay": 0.0})
    engine.add("a", ids(0, 20_000))
    engine.step_fn()
    engine.add("b", ids(1, 30_000))
    engine.run()
    assert ended_after(engine, "a") <= min(at for at, step in enumerate(engine.steps) if "b" in step) + 2


def test_a_step_is_not_given_to_a_prompt_that_has_no_room(make_engine: Make) -> None:
    engine = make_engine({**ON, "max_queue_delay": 0.0}, blocks=30_000 // BLOCK, max_model_len=32_768)
    engine.add("long", ids(0, 28_000))
    for _ in range(4):
        engine.step_fn()
    engine.add("short", ids(1, 6000))
    engine.run()
    assert sum(chunks(engine, "long")) == 28_000
    assert sum(chunks(engine, "short")) == 6000
    assert engine.scheduler.isochunk.controller.counters.yields < 5


def order_served(engine: Engine) -> list[str]:
    """Prompts in the order of their first chunks."""
    return list(dict.fromkeys(key for step in engine.steps for key in step))


def test_least_work_first_serves_waiting_prompts_by_what_they_need(make_engine: Make) -> None:
    served = {}
    for bound in (None, 1000.0, 0.0):
        engine = make_engine({**ON, "least_work_first": bound})
        engine.add("running", ids(0, 20_000))
        engine.step_fn()
        for at, (key, tokens) in enumerate({"long": 30_000, "middle": 9000, "short": 700, "shorter": 300}.items()):
            engine.add(key, ids(at + 1, tokens))
        engine.run()
        served[bound] = order_served(engine)
        assert sum(chunks(engine, "long")) == 30_000
        assert engine.scheduler.isochunk.controller.counters.fallbacks == 0
    assert served[None] == served[0.0] == ["running", "long", "middle", "short", "shorter"]
    assert served[1000.0] == ["running", "shorter", "short", "middle", "long"]


def test_least_work_first_counts_what_the_prefix_cache_holds(make_engine: Make) -> None:
    engine = make_engine({**ON, "least_work_first": 1000.0})
    engine.add("before", ids(7, 20_000))
    engine.run()
    engine.add("running", ids(0, 20_000))
    engine.step_fn()
    engine.add("middle", ids(1, 9000))
    engine.add("cached", [*ids(7, 20_000), *ids(8, 500)])
    engine.run()
    assert order_served(engine) == ["before", "running", "cached", "middle"]


@pytest.mark.parametrize("option", ["max_queue_delay", "least_work_first"])
def test_turns_and_priorities_exclude_each_other(make_engine: Make, option: str) -> None:
    with pytest.raises(ConfigError, match=option + r" = 1\.0 and --scheduling-policy priority"):
        make_engine({**ON, option: 1.0}, scheduling_policy="priority")
