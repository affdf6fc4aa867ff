"""Plans by what a probe finds, judged by the true costs: GPU curves and accelerators of others, no noise.

    python -m benchmarks.curve_fits [--stages 2 8] [--silicon] [--noise 0.003]

The start-up probe measures each machine (the clock is simulated, the probe is the server's own), the fit decides
whether there is a curve, and the plan is made with what was fitted. The table has, for each length, the plan's true
TTFT over that of the best fixed size in steps of 64 tokens, and predicted over true. The constants of probe and fit
were chosen with the file's curves and the first six accelerators in sight, on 2 and 8 stages; 4 and 16 stages and the
accelerators after those judge.
"""

from __future__ import annotations

import argparse

import numpy as np

from benchmarks.curves import best_fixed, gpu_models
from isochunk.core.cost import CostModel
from isochunk.core.fit import Fit
from isochunk.core.planner import evaluate, plan
from isochunk.vllm import probe as probing
from isochunk.vllm.probe import Probe, Steps, probe_chunks

LENGTHS = (1024, 2048, 4096, 8192, 16_384, 32_768, 131_072)
LIMIT, BLOCK, LONGEST = 8192, 16, 140_000


class Clock:
    """A pipeline of stages that each take what a model says; the probe's clock."""

    def __init__(self, model: CostModel, stages: int, noise: float) -> None:
        self._model, self._stages, self._noise = model, stages, noise
        self._random = np.random.default_rng(0)
        self.now = 1.0

    def monotonic(self) -> float:
        """Seconds, as the probe reads them."""
        return self.now

    def probe(self, seconds: float) -> tuple[Probe, Fit | None]:
        """The probe after its run, and what it found."""
        probe = Probe(
            chunks=probe_chunks(LONGEST, LIMIT, BLOCK),
            max_chunk=LIMIT,
            block=BLOCK,
            stages=self._stages,
            max_seconds=seconds,
        )
        return probe, probe.run(lambda prompts: self._send(probe, prompts))

    def _send(self, probe: Probe, prompts: dict[str, list[int]]) -> Steps:
        steps = []
        left = [self.now] * self._stages
        for key, chunks in prompts.items():
            history = first = 0
            first = len(steps)
            while history < sum(chunks) and not probe.over:
                chunk = probe.chunk_at(key, history, steps[first:])
                assert chunk is not None
                seconds = self._model.seconds(chunk, history) * (1 + self._noise * abs(self._random.standard_normal()))
                for stage in range(self._stages):
                    left[stage] = max(left[stage], left[stage - 1] if stage else self.now) + seconds
                self.now = left[0]
                steps.append((chunk, history, seconds))
                history += chunk
        self.now = left[-1]
        return steps


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--stages", type=int, nargs="+", default=[2, 8])
    options.add_argument("--silicon", action="store_true", help="also accelerators of others")
    options.add_argument("--noise", type=float, default=0.003, help="how much longer steps are, in parts")
    given = options.parse_args()
    titles = " | ".join(f"{tokens}" for tokens in LENGTHS)
    print(f"| costs | P | probe: s, steps, sizes of the curve | {titles} |")
    print("| --- " * (3 + len(LENGTHS)) + "|")
    for stages in given.stages:
        models = gpu_models(stages)
        if given.silicon:
            from benchmarks.silicon import silicon_models

            models |= silicon_models(stages)
        for name, true in models.items():
            clock = Clock(true, stages, given.noise)
            probing.time = clock  # type: ignore[assignment]
            probe, found = clock.probe(120.0)
            if found is None:
                print(f"| {name} | {stages} | no model |")
                continue
            curve = found.model.curve
            row = []
            for tokens in LENGTHS:
                chosen = plan(found.model, tokens, stages, max_chunk=LIMIT, block=BLOCK)
                taken = evaluate(true, chosen.chunks, stages)
                fixed = best_fixed(true, stages, tokens, LIMIT)
                row.append(f"{taken / fixed:.3f}, {chosen.ttft_s / taken:.3f}")
            sizes = len(curve.tokens) if curve else "a line"
            print(
                f"| {name} | {stages} | {probe.seconds:.1f}, {probe.steps}, {sizes} | {' | '.join(row)} |", flush=True
            )


if __name__ == "__main__":
    main()
