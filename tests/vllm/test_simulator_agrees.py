"""`simulate` makes the very steps that vLLM's own scheduler and KV cache make of the same requests.

``ISOCHUNK_SCHEDULES=10000`` runs as many random traces as the long check does.
"""

import os
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from isochunk.core.cost import CostModel
from isochunk.simulator import Deployment, OpenLoop, Request, simulate
from isochunk.vllm.compat import vllm_version
from isochunk.vllm.testing import Engine
from isochunk.vllm.versions import NEWEST, minor
from tests.vllm.clocked import in_simulator, through_vllm
from tests.vllm.conftest import MODEL

if (minor(vllm_version()) or NEWEST) < (0, 24):
    pytest.skip("the simulator's KV cache is that of vLLM 0.24 on", allow_module_level=True)

TRACES = int(os.environ.get("ISOCHUNK_SCHEDULES", "80"))
BLOCK = 16
UNEQUAL = CostModel(c0=0.003, c1=25e-6, c2=20e-9, c3=0.4e-6)


def random_requests(rng: random.Random, room: int, most: int) -> list[Request]:
    """Prompts that share beginnings, some with long answers, some alike, of all lengths that there is room for."""
    unit = rng.choice((48, 64, 100, 512))
    rate = rng.choice((0.5, 5.0, 500.0))
    answers = rng.choice(((1,), (1, 1, 1, 2, 40), (20, 60)))
    most = min(most, rng.choice((room, room // 8)))
    roots = [[rng.randrange(1000)] for _ in range(rng.randint(1, 4))]
    now, requests = 0.0, []
    for number in range(rng.randint(3, 40)):
        output = rng.choice(answers)
        tokens = rng.randint(1, min(room - output + 1, most))
        root = rng.choice(roots)
        hashes = (root + [rng.randrange(1000) for _ in range(tokens // unit + 1)])[: -(-tokens // unit)]
        if rng.random() < 0.5:
            roots.append(hashes)
        now += rng.choice((0.0, rng.expovariate(rate)))
        blocks = tuple(hashes) if rng.random() < 0.9 else ()
        requests.append(Request(key=f"{number}", tokens=tokens, arrival=now, blocks=blocks, unit=unit, output=output))
    return requests


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("blocks", "seqs", "stages"), [(400, 64, 2), (150, 64, 2), (60, 4, 4), (20000, 64, 2)])
def test_every_step_of_a_random_trace_is_the_same(
    make_engine: Callable[..., Engine], blocks: int, seqs: int, stages: int
) -> None:
    deployment = Deployment(
        models=(MODEL,) * (stages - 1) + (UNEQUAL,),
        max_tokens=2048,
        max_seqs=seqs,
        kv_tokens=blocks * BLOCK,
        block=BLOCK,
    )
    engine = make_engine(blocks=blocks, pipeline_parallel_size=stages, max_num_seqs=seqs, in_flight=stages)
    preemptions = hits = 0
    for trace in range(TRACES // 4):
        requests = random_requests(random.Random(f"{blocks} {trace}"), (blocks - 1) * BLOCK, 6000)
        result = simulate(deployment, OpenLoop(requests), "fixed", record=True)
        steps, first_tokens = in_simulator(result)
        real_steps, real_first_tokens = through_vllm(engine, deployment, requests)
        assert steps == real_steps, f"trace {trace}"
        assert first_tokens == pytest.approx(real_first_tokens, rel=1e-9), f"trace {trace}"
        assert engine.scheduler.reset_prefix_cache()
        preemptions += result.preemptions
        hits += result.hit_tokens
    assert hits > 0
    assert (preemptions > 0) == (blocks < 20000)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("policy", "chunk"), [("optimal", None), ("fixed", 700), ("first_chunk", 2048)])
@pytest.mark.parametrize(("blocks", "stages"), [(20000, 2), (400, 3)])
def test_the_plugin_makes_the_steps_that_are_simulated(
    make_engine: Callable[..., Engine], policy: str, chunk: int | None, blocks: int, stages: int
) -> None:
    if blocks < 20000 and (minor(vllm_version()) or NEWEST) < (0, 31):
        pytest.skip("whoever was passed over goes before whoever is preempted after it, until vLLM 0.30")
    deployment = Deployment(
        models=(MODEL,) * stages, max_tokens=2048, max_seqs=64, kv_tokens=blocks * BLOCK, block=BLOCK
    )
    for trace in range(TRACES // 10):
        engine = make_engine(
            {"enabled": True, "need_timing": False}, blocks=blocks, pipeline_parallel_size=stages, in_flight=stages
        )
        requests = random_requests(random.Random(f"{blocks} {trace}"), (blocks - 1) * BLOCK, 6000)
        engine.scheduler.isochunk.use_policy(policy, chunk)
        result = simulate(deployment, OpenLoop(requests), policy, chunk=chunk, record=True)
        steps, first_tokens = in_simulator(result)
        real_steps, real_first_tokens = through_vllm(engine, deployment, requests)
        assert steps == real_steps, f"trace {trace}"
        assert first_tokens == pytest.approx(real_first_tokens, rel=1e-9), f"trace {trace}"
        assert engine.scheduler.isochunk.controller.counters.fallbacks == 0


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("blocks", [20000, 400])
def test_prompts_whose_kv_comes_from_elsewhere_are_loaded_and_computed_in_the_same_steps(
    make_engine: Callable[..., Engine], blocks: int
) -> None:
    deployment = Deployment(
        models=(MODEL,) * 2,
        max_tokens=2048,
        max_seqs=64,
        kv_tokens=blocks * BLOCK,
        block=BLOCK,
        load_rate=20_000.0,
    )
    transfer = {
        "kv_connector": "Elsewhere",
        "kv_connector_module_path": "tests.vllm.clocked",
        "kv_role": "kv_producer",
    }
    for trace in range(TRACES // 8):
        rng = random.Random(f"loads {blocks} {trace}")
        requests = [
            replace(request, blocks=(), cached=rng.choice((0, request.tokens // 2, request.tokens - 1)), output=1)
            for request in random_requests(rng, (blocks - 1) * BLOCK, 6000)
        ]
        engine = make_engine(blocks=blocks, kv_transfer_config=transfer)
        steps, first_tokens = in_simulator(simulate(deployment, OpenLoop(requests), "fixed", record=True))
        real_steps, real_first_tokens = through_vllm(engine, deployment, requests)
        assert steps == real_steps, f"trace {trace}"
        assert first_tokens == pytest.approx(real_first_tokens, rel=1e-9), f"trace {trace}"
