"""Slow days and wrong models, on the controller with a clock of its own: what they cost in TTFT.

    python -m benchmarks.slow_days

Prompts run one after the other on P stages whose seconds follow a true model times the machine's speed at that
moment, with 2% of noise. TTFT is taken over that of the best fixed size at the same speed (slow days), or of a true
model that learns nothing, on steps of the same noise (wrong models, after 20 prompts; alone, and with 8 streams that
decode beside). `CHOSEN` is what the constants of core/calibrator.py and core/guard.py
were chosen on, `JUDGED` are others.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import mean

import numpy as np

from isochunk.core.cost import CostModel
from isochunk.core.planner import static_ttft
from isochunk.core.steps import Prefill, StepPlanner
from isochunk.vllm.config import ChunkConfig
from isochunk.vllm.controller import Controller
from isochunk.vllm.prompts import Part

__all__ = ["Clock", "main"]

LIMIT = 32_768
NOISE = 0.02
# (stages, cost of a step): the tiny Qwen3 of the demo machine, and published ones (data/published_models.json).
CHOSEN = {
    "qwen3 P2": (2, CostModel(5.9e-3, 18e-6, 20e-9, 0.56e-6)),
    "kimi P4": (4, CostModel(0.0234, 1.3e-6, 6.9e-10, 2e-7)),
}
JUDGED = {
    "deepseek P8": (8, CostModel(0.012, 9e-6, 1.1e-10, 9e-8)),
    "dense P16": (16, CostModel(0.004, 4e-6, 4e-11, 0.0)),
    "long P4": (4, CostModel(0.03, 2e-5, 3e-10, 1e-7)),
}
Speed = Callable[[int], float]
DAYS: dict[str, Speed] = {
    "steady": lambda n: 1.0,
    "blocks of 5 at 1x and 2x": lambda n: 1.0 + (n // 5 % 2),
    "one in ten at 5x": lambda n: 5.0 if n % 10 == 5 else 1.0,
    "blocks of 20 at 1x and 3x": lambda n: 1.0 + 2 * (n // 20 % 2),
    "blocks of 5 at 1x and 1.7x": lambda n: 1.0 + 0.7 * (n // 5 % 2),
    "2x from 20 on": lambda n: 1.0 + (n >= 20),
    "half from 20 on": lambda n: 0.5 if n >= 20 else 1.0,
    "slowly to 3x": lambda n: 1.0 + n / 40,
}
WRONG: dict[str, tuple[float, float, float, float]] = {
    "true": (1, 1, 1, 1),
    **{f"step cost {f}x": (f, 1, 1, f) for f in (4, 8, 10, 20)},
    **{f"c0 alone {f}x": (f, 1, 1, 1) for f in (4, 20)},
    **{f"step cost {f}x, work 1/4": (f, 0.25, 0.25, f) for f in (4, 8, 10, 20)},
    "step cost 1/4": (0.25, 1, 1, 0.25),
    "step cost 1/100": (0.01, 1, 1, 0.01),
    "all 4x": (4, 4, 4, 4),
    "all 1/4": (0.25, 0.25, 0.25, 0.25),
    "work 4x": (1, 4, 4, 1),
    "attention 1/4": (1, 1, 0.25, 1),
}


class Clock:
    """P stages on which steps take the true model's seconds times the speed, and a controller in front of them."""

    def __init__(
        self, stages: int, true: CostModel, stored: CostModel, seed: int, *, streams: int = 0, learn: bool = True
    ) -> None:
        config = ChunkConfig.model_validate({"enabled": True, "need_timing": learn})
        self.control = Controller(config, StepPlanner(stages=stages, max_chunk=LIMIT, block=16, min_chunk=16), stages)
        self.control.use_model(stored, "stored")
        self._stages, self._true, self._random = stages, true, random.Random(seed)
        self._decodes = [(1, 2000 + 100 * stream) for stream in range(streams)]
        self._now, self._prompts = 100.0, 0

    def prefill(self, tokens: int, speed: float) -> float:
        """TTFT in seconds of one prompt."""
        self._prompts += 1
        key, start, at = f"p{self._prompts}", self._now, 0
        left = [self._now] * self._stages
        flying: list[tuple[float, int]] = []
        while at < tokens or flying:
            if at < tokens and len(flying) < self._stages:
                chosen = self.control.tokens([Prefill(key, at, tokens - at)], 0, self._decodes)
                size = min(chosen or LIMIT, tokens - at)
                self.control.entered([Part(key, size, at, tokens)], self._decodes, self._now, at)
                shares = [(size, at), *self._decodes]
                seconds = self._true.step(*zip(*shares, strict=True)) * speed * self._random.lognormvariate(0, NOISE)
                ready = self._now
                for stage in range(self._stages):
                    ready = left[stage] = max(ready, left[stage]) + seconds
                flying.append((ready, at))
                at += size
                continue
            ready, step = flying.pop(0)
            self._now = max(self._now, ready)
            self.control.exited(self._now, step)
        took = self._now - start
        self._now += 1.0
        return took


def best_fixed(true: CostModel, tokens: int, stages: int) -> float:
    """TTFT of the best fixed size in steps of 64."""
    return float(static_ttft(true, 0, tokens, np.arange(64, LIMIT + 1, 64, dtype=np.float64), stages).min())


def lengths(seed: int, count: int) -> list[int]:
    """Mixed, 8k to 64k."""
    drawn = random.Random(seed)
    return [int(2 ** drawn.uniform(13, 16)) for _ in range(count)]


def day(stages: int, true: CostModel, speed: Speed, seed: int, count: int = 80) -> float:
    """Mean over the prompts of TTFT over that of the best fixed size at the same speed."""
    clock = Clock(stages, true, true, seed)
    return mean(
        clock.prefill(tokens, speed(n)) / (speed(n) * best_fixed(true, tokens, stages))
        for n, tokens in enumerate(lengths(seed, count))
    )


def wrong(
    stages: int, true: CostModel, factors: tuple[float, float, float, float], seed: int, streams: int = 0
) -> float:
    """After 20 prompts: mean TTFT of 40 more, over what it is with the true model."""
    stored = CostModel(
        *(value * factor for value, factor in zip((true.c0, true.c1, true.c2, true.c3), factors, strict=True))
    )
    drawn = lengths(seed, 60)

    def after(model: CostModel, *, learn: bool) -> float:
        clock = Clock(stages, true, model, seed, streams=streams, learn=learn)
        return mean([clock.prefill(tokens, 1.0) for tokens in drawn][20:])

    return after(stored, learn=True) / after(true, learn=False)


def main() -> None:
    for title, models in (("chosen on", CHOSEN), ("judged on", JUDGED)):
        print(f"{title}: {', '.join(models)}")
        for name, speed in DAYS.items():
            ratios = [day(stages, true, speed, seed) for stages, true in models.values() for seed in (1, 2)]
            print(f"  {name:32s} over the best fixed size " + " ".join(f"{ratio:.3f}" for ratio in ratios))
        for name, factors in WRONG.items():
            for streams in (0, 8):
                ratios = [wrong(*model, factors, seed, streams) for model in models.values() for seed in (1, 2)]
                print(f"  {name:24s} {streams} streams over true " + " ".join(f"{r:.3f}" for r in ratios), flush=True)


if __name__ == "__main__":
    main()
