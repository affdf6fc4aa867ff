"""What is kept of the queue from step to step is what a walk through it finds."""

import random
from collections.abc import Callable

import pytest

from isochunk.vllm.batch import Walker
from isochunk.vllm.testing import Engine

from .test_random_schedules import traffic

ON = {"enabled": True}


@pytest.mark.parametrize("scheduling_policy", ["fcfs", "priority"])
def test_a_kept_queue_is_what_a_walk_finds(make_engine: Callable[..., Engine], scheduling_policy: str) -> None:
    engine = make_engine(ON, blocks=500, max_model_len=4096, scheduling_policy=scheduling_policy)
    scheduler = engine.scheduler
    walker, walk = scheduler._walker, Walker._walk
    walks = compared = 0

    def counted(*args: object) -> None:
        nonlocal walks
        walks += 1
        walk(*args)  # type: ignore[arg-type]

    def batch() -> object:
        nonlocal compared
        kept = Walker.batch(walker)
        fresh = Walker(scheduler, scheduler._hits, scheduler._external, timed=False).batch()
        for name in ("limit", "left", "room", "decodes", "streams", "begun", "more"):
            assert getattr(kept, name) == getattr(fresh, name), name
        seen = [
            [(each.request, each.prefill, each.waits, each.cached) for each in one.prompts] for one in (kept, fresh)
        ]
        assert seen[0] == seen[1]
        compared += 1
        return kept

    walker.batch, walker._walk = batch, lambda *args: counted(walker, *args)
    for schedule in range(40):
        traffic(engine, random.Random(schedule), schedule)
        engine.run()
    assert scheduler.isochunk.controller.counters.fallbacks == 0
    assert 0 < walks < compared


def test_an_id_used_again_finds_nothing_of_the_request_before(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(ON, max_num_batched_tokens=8192)
    chunks = []
    for name in ("a", "b"):
        engine.add("a", [ord(name)] * 40_000)
        for _ in range(3):
            engine.step_fn()
        engine.scheduler.finish_requests("a", _aborted())
        engine.add(name, [ord(name) + 1] * 9000)
        before = len(engine.steps)
        engine.run()
        chunks.append([step[name] for step in engine.steps[before:] if name in step])
        assert engine.scheduler.isochunk.controller.log.find(name).tokens == 9000
    assert chunks[0] == chunks[1]
    controller = engine.scheduler.isochunk.controller
    engine.scheduler.schedule()
    assert not controller.planner._cuts
    assert not engine.scheduler._hits._known


def _aborted() -> object:
    from isochunk.vllm.compat import aborted_status

    return aborted_status()
