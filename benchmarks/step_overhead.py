"""What isochunk itself costs a step, inside vLLM's scheduler with 64 requests.

    python -m benchmarks.step_overhead

Runs the same requests through vLLM's scheduler (no model behind it) and prints the microseconds that the
mixin adds to a step: its bounds, record of the entry, record of the exit, refits included; on blocks of 16 and of 128
tokens, also with prompts most of which is in the prefix cache.
Then how long a plan for a million tokens takes.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import isochunk.vllm.batch as batches
import isochunk.vllm.scheduler as scheduling
from isochunk import CostModel, plan
from isochunk.core.cost import features
from isochunk.vllm import testing
from isochunk.vllm.testing import Engine, engine_config

REQUESTS = 64
ROUNDS = 20
MILLION = 1 << 20
STAGES = (2, 4, 8, 16)
TRUE = CostModel(0.0059, 18e-6, 20e-9, 0.56e-6)
NOISE = 0.05


class Clock:
    """Time that passes by steps: without a model behind the scheduler they take none of their own."""

    now = 0.0

    def monotonic(self) -> float:
        """Seconds."""
        return self.now

    def time(self) -> float:
        """Seconds; requests of the benchmark came at moment 0."""
        return self.now


def timed(target: Any, name: str, spent: list[float]) -> None:
    """Add the seconds of each call of a method to the last entry of ``spent``."""
    inner: Callable[..., Any] = getattr(target, name)

    def outer(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return inner(*args, **kwargs)
        finally:
            spent[-1] += time.perf_counter() - start

    setattr(target, name, outer)


def last_step_s(engine: Engine, rng: np.random.Generator) -> float:
    """Seconds of the last step under the true model, and a little noise: what the next one waits for."""
    if not engine.steps:
        return TRUE.c0
    row = features(list(engine.steps[-1].values()), list(engine.histories[-1].values()))
    return float(TRUE.predict(row[None])[0] * rng.lognormal(0, NOISE))


def plan_s(stages: int) -> float:
    """Seconds that the plan for one very long prompt takes."""
    start = time.perf_counter()
    plan(TRUE, MILLION, stages, max_chunk=32_768, block=16)
    return time.perf_counter() - start


def measured(folder: str, block: int, *, cached: int) -> np.ndarray:
    """Microseconds that isochunk adds to each step; with ``cached`` tokens of long prompts in the prefix cache."""
    testing.BLOCK = block
    long = {"max_model_len": 131_072, "max_num_batched_tokens": 8192} if cached else {}
    engine = Engine(engine_config(Path(folder), {"enabled": True}, block_size=block, **long), blocks=3_200_000 // block)
    scheduler = engine.scheduler
    scheduler.isochunk.controller.use_model(TRUE, "benchmark")
    clock = Clock()
    scheduling.time = batches.time = clock  # type: ignore[attr-defined, assignment]
    spent = [0.0]
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 1000, cached).tolist()
    if cached:
        engine.add("first", shared)
        engine.run()
    for name in ("_bounds", "_entered"):
        timed(scheduler, name, spent)
    timed(scheduler.isochunk, "exited", spent)
    for turn in range(2 if cached else ROUNDS):
        for request in range(REQUESTS):
            tokens = rng.integers(0, 1000, 12_000 if cached else int(rng.integers(200, 16_000))).tolist()
            engine.add(f"{turn}-{request}", [*shared, *tokens], output_tokens=4)
        while engine.has_work():
            spent.append(0.0)
            clock.now += last_step_s(engine, rng)
            engine.step_fn()
    assert scheduler.isochunk.controller.counters.fallbacks == 0
    return np.array(spent[50:]) * 1e6


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ISOCHUNK_CACHE"] = folder
        for block in (16, 128):
            for cached in (0, 115_200):
                micro = measured(folder, block, cached=cached)
                median, high, most = np.quantile(micro, [0.5, 0.99, 1])
                what = f"{REQUESTS} requests of 127k tokens, 115k cached" if cached else f"{REQUESTS} requests"
                print(
                    f"blocks of {block}, {what}: {len(micro)} steps, median {median:.0f} us, 99% below {high:.0f} us, "
                    f"most {most:.0f} us",
                    flush=True,
                )
    milli = [1e3 * plan_s(stages) for stages in STAGES for _ in range(ROUNDS)]
    print(f"a plan for {MILLION} tokens on {STAGES} stages: median {np.median(milli):.1f} ms, most {max(milli):.1f} ms")


if __name__ == "__main__":
    main()
