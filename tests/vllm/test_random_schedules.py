"""Random traffic through vLLM's own scheduler: nothing is lost, done twice, over budget, or left hanging.

``ISOCHUNK_SCHEDULES=10000`` runs as many schedules as the long check does.
"""

import math
import os
import random
from collections.abc import Callable

import pytest

from isochunk.vllm.testing import Engine

SCHEDULES = int(os.environ.get("ISOCHUNK_SCHEDULES", "300"))
LIMIT = 2048
BLOCKS = 500  # 8,000 tokens: a few long prompts make vLLM preempt


def traffic(engine: Engine, rng: random.Random, schedule: int) -> dict[str, int]:
    """Send random requests between steps, abort some; returns the prompt length of each that was not aborted."""
    prompts: dict[str, int] = {}
    shared = [rng.randrange(1000) for _ in range(1500)]
    for number in range(rng.randint(1, 8)):
        key = f"{schedule}-{number}"
        tokens = shared[: rng.choice((0, 0, 200, 1500))] + rng.choices(range(1000), k=rng.randint(1, 2500))
        engine.add(key, tokens, output_tokens=rng.choice((1, 1, 2, 40)), priority=rng.randint(0, 2))
        prompts[key] = len(tokens)
        for _ in range(rng.randint(0, 6)):
            engine.step_fn()
        if rng.random() < 0.15:
            gone = rng.choice(list(prompts))
            engine.scheduler.finish_requests(gone, _aborted())
            del prompts[gone]
    return prompts


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(  # with as many steps in flight as vLLM has on two stages
    ("scheduler_cls", "in_flight"), [("isochunk.vllm.Scheduler", 2), ("isochunk.vllm.AsyncScheduler", 3)]
)
@pytest.mark.parametrize(("scheduling_policy", "max_queue_delay"), [("fcfs", None), ("fcfs", 0.0), ("priority", None)])
def test_every_prompt_token_is_computed_once_and_every_request_ends(
    make_engine: Callable[..., Engine],
    scheduler_cls: str,
    in_flight: int,
    scheduling_policy: str,
    max_queue_delay: float | None,
) -> None:
    engine = make_engine(
        {"enabled": True, "max_queue_delay": max_queue_delay},
        blocks=BLOCKS,
        max_model_len=4096,
        scheduling_policy=scheduling_policy,
        scheduler_cls=scheduler_cls,
        in_flight=in_flight,
    )
    pool = engine.scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    for schedule in range(math.ceil(SCHEDULES / 6)):
        rng = random.Random(schedule)
        policy = rng.choice(("optimal", "optimal", "first_chunk", "fixed"))
        engine.scheduler.isochunk.use_policy(policy, rng.choice((None, 300)) if policy != "optimal" else None)
        engine.steps.clear()
        engine.histories.clear()
        engine.preempted.clear()
        prompts = traffic(engine, rng, schedule)
        engine.run(20_000)
        assert not engine.scheduler.requests, f"schedule {schedule}"
        assert pool.get_num_free_blocks() == free
        assert all(sum(step.values()) <= LIMIT for step in engine.steps)
        for key, length in prompts.items():
            _covered(engine, key, length)
    counters = engine.scheduler.isochunk.controller.counters
    assert counters.fallbacks == 0
    assert (counters.yields > 0) == (max_queue_delay is not None)


def _covered(engine: Engine, key: str, length: int) -> None:
    """Each step goes on where the one before ended; only the first, and one after a preemption, at a cached prefix.

    A request that is preempted while its last step is in the pipeline ends with that step.
    """
    at, whole = None, False
    for step, history, preempted in zip(engine.steps, engine.histories, engine.preempted, strict=True):
        if key in preempted:
            at, whole = None, at is not None and at >= length
        if key not in step:
            continue
        assert at is None or history[key] == at, (key, history[key], at)
        at = history[key] + step[key]
        whole = at >= length
    assert whole, key


def _aborted() -> object:
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ABORTED
