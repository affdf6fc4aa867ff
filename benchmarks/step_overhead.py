"""What isochunk itself costs a step, inside vLLM's scheduler with 64 requests that wait.

    python -m benchmarks.step_overhead

Serves the same requests through vLLM's scheduler (no model behind it) and prints the microseconds that isochunk adds
to a step: all that `schedule` (the decision, the record of the entry) and `update_from_output` (the record of the exit)
take beside vLLM's own; and the longest such part of one `schedule`. Refits run in `get_grammar_bitmask`, which vLLM
calls when it has sent a step off to the workers; what they take is printed by itself. On blocks of 16 and of 128
tokens, also with prompts most of which is in the prefix cache. Then how long a plan for a million tokens takes.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import isochunk.vllm.batch as batches
import isochunk.vllm.scheduler as scheduling
from isochunk import CostModel, plan
from isochunk.core.cost import features
from isochunk.vllm import testing
from isochunk.vllm.testing import Engine, StepTime, engine_config

REQUESTS = 64
ROUNDS = 20
CACHED_ROUNDS = 6
PLANS = 20
WARM = 50  # steps
MILLION = 1 << 20
STAGES = (2, 4, 8, 16)
TRUE = CostModel(0.0059, 18e-6, 20e-9, 0.56e-6)
NOISE = 0.05
Floats = npt.NDArray[np.float64]

ADDED = ("schedule", "update_from_output", "get_grammar_bitmask")


class Added:
    """Seconds of a scheduler's methods less those of vLLM's own of the same name, one entry a turn of the engine."""

    def __init__(self, scheduler: Any) -> None:
        self.turns: list[dict[str, float]] = []
        self._inner = 0.0
        own = next(kind for kind in type(scheduler).__mro__ if kind.__module__.startswith("vllm."))
        for name in ADDED:
            setattr(scheduler, name, self._outer(name, getattr(scheduler, name)))
            plain: Callable[..., Any] = getattr(own, name)
            setattr(own, name, self._own(getattr(plain, "__wrapped__", plain)))

    def _own(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self._inner += time.perf_counter() - start

        return timed

    def _outer(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner, start = 0.0, time.perf_counter()
            result = method(*args, **kwargs)
            self.turns[-1][name] += time.perf_counter() - start - self._inner
            return result

        return timed

    def of(self, *names: str) -> Floats:
        """Microseconds of these methods together in each turn, the first ones left out."""
        return 1e6 * np.array([sum(turn[name] for name in names) for turn in self.turns[WARM:]])


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


def measured(folder: str, block: int, *, cached: int) -> Added:
    """What isochunk adds to each step; with ``cached`` tokens of long prompts in the prefix cache."""
    testing.BLOCK = block
    long = {"max_model_len": 131_072, "max_num_batched_tokens": 8192} if cached else {}
    engine = Engine(engine_config(Path(folder), {"enabled": True}, block_size=block, **long), blocks=3_200_000 // block)
    scheduler = engine.scheduler
    scheduler.isochunk.controller.use_model(TRUE, "benchmark")
    clock = StepTime()
    scheduling.time = batches.time = clock  # type: ignore[attr-defined, assignment]
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 1000, cached).tolist()
    if cached:
        engine.add("first", shared)
        engine.run()
    added = Added(scheduler)
    for turn in range(CACHED_ROUNDS if cached else ROUNDS):
        for request in range(REQUESTS):
            tokens = rng.integers(0, 1000, 12_000 if cached else int(rng.integers(200, 16_000))).tolist()
            engine.add(f"{turn}-{request}", [*shared, *tokens], output_tokens=4)
        while engine.has_work():
            added.turns.append(dict.fromkeys(ADDED, 0.0))
            clock.now += last_step_s(engine, rng)
            engine.step_fn()
    assert scheduler.isochunk.controller.counters.fallbacks == 0
    return added


def said(micro: Floats) -> str:
    """Median and tail."""
    median, high, most = np.quantile(micro, [0.5, 0.99, 1])
    return f"median {median:.0f} us, 99% below {high:.0f} us, most {most:.0f} us"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ISOCHUNK_CACHE"] = folder
        for block in (16, 128):
            for cached in (0, 115_200):
                added = measured(folder, block, cached=cached)
                refits = added.of("get_grammar_bitmask")
                refits = refits[refits > 100]  # most turns have none
                print(
                    f"blocks of {block}, {REQUESTS} requests{' of 127k tokens, 115k cached' if cached else ''}: "
                    f"{len(added.turns) - WARM} steps, {said(added.of('schedule', 'update_from_output'))}\n"
                    f"  of that in schedule: {said(added.of('schedule'))}\n"
                    f"  while a step is under way: {len(refits)} refits, {said(refits) if len(refits) else ''}",
                    flush=True,
                )
    milli = [1e3 * plan_s(stages) for stages in STAGES for _ in range(PLANS)]
    print(f"a plan for {MILLION} tokens on {STAGES} stages: median {np.median(milli):.1f} ms, most {max(milli):.1f} ms")


if __name__ == "__main__":
    main()
