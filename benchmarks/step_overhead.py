"""What isochunk itself costs a step, inside vLLM's scheduler with 64 requests.

    python -m benchmarks.step_overhead

Runs the same requests through vLLM's scheduler (no model behind it) and prints the microseconds that the
mixin adds to a step: budget, record of the entry, record of the exit, refits included.
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

import isochunk.vllm.scheduler as scheduling
from isochunk import CostModel, plan
from isochunk.core.cost import features
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


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ISOCHUNK_CACHE"] = folder
        engine = Engine(engine_config(Path(folder), {"enabled": True}), blocks=200_000)
    scheduler = engine.scheduler
    scheduler.isochunk.controller.use_model(TRUE, "benchmark")
    clock = Clock()
    scheduling.time = clock  # type: ignore[attr-defined]
    spent = [0.0]
    timed(scheduler, "_budget", spent)
    timed(scheduler, "_entered", spent)
    timed(scheduler.isochunk, "exited", spent)
    rng = np.random.default_rng(0)
    for turn in range(ROUNDS):
        for request in range(REQUESTS):
            tokens = rng.integers(0, 1000, int(rng.integers(200, 16_000))).tolist()
            engine.add(f"{turn}-{request}", tokens, output_tokens=4)
        while engine.has_work():
            spent.append(0.0)
            clock.now += last_step_s(engine, rng)
            engine.step_fn()
    micro = np.array(spent[50:]) * 1e6
    median, high, most = np.quantile(micro, [0.5, 0.99, 1])
    print(
        f"{len(micro)} steps, {REQUESTS} requests: median {median:.0f} us, 99% below {high:.0f} us, most {most:.0f} us"
    )
    milli = [1e3 * plan_s(stages) for stages in STAGES for _ in range(ROUNDS)]
    print(f"a plan for {MILLION} tokens on {STAGES} stages: median {np.median(milli):.1f} ms, most {max(milli):.1f} ms")


if __name__ == "__main__":
    main()
