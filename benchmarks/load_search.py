"""isochunk against the best schedule that a search finds knowing all arrivals, for small cases.

    python -m benchmarks.load_search

The first prompts of cases of a held-out seed, served in order. The search begins with isochunk's own
steps, the best fixed size's and the rule's, and changes the tokens of some steps as long as the mean TTFT falls.
What is found is a bound on what any law could gain, from above: the search may miss better ones.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, median

from benchmarks.load_cases import Case, cases
from benchmarks.load_study import Fixed, Rule
from isochunk.simulator import OpenLoop, simulate
from isochunk.simulator.scheduler import Queue, Steps
from isochunk.simulator.share import ChunkPolicy, Chunks, Share

PROMPTS = 10
TRIES = 400


class Given(ChunkPolicy):
    """So many tokens in each step, one after the other; the last for all that come after."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens, self._at = tokens, 0

    def share(self, queue: Queue, in_flight: Steps, now: float) -> Share:
        """The next step's."""
        size = self._tokens[min(self._at, len(self._tokens) - 1)]
        self._at += 1
        return Chunks(queue.prefills, size, ())


def small(case: Case) -> Case:
    """Its first prompts only."""
    workload = case.workload()
    assert isinstance(workload, OpenLoop)
    return replace(case, workload=lambda: OpenLoop(workload.requests[:PROMPTS]))


def searched(case: Case, start: list[int], best: float, seed: int) -> float:
    """The least mean TTFT found from these steps on."""
    draw = random.Random(seed)
    limit, block = case.deployment.max_tokens, case.deployment.block
    steps = start
    for _ in range(TRIES):
        trial = list(steps)
        at = draw.randrange(len(trial))
        kind = draw.random()
        factor = draw.choice((0.5, 0.7, 0.85, 0.95, 1.05, 1.2, 1.4, 2.0))
        if kind < 0.1:
            trial = [_size(size * factor, limit, block) for size in trial]
        elif kind < 0.7:
            for near in range(at, min(at + draw.choice((1, 1, 2, 4)), len(trial))):
                trial[near] = _size(trial[near] * factor, limit, block)
        elif kind < 0.85:
            trial.insert(at, trial[at])
        elif len(trial) > 1:
            trial.pop(at)
        found = float(simulate(case.deployment, case.workload(), lambda trial=trial: Given(trial)).ttft.mean())
        if found < best:
            best, steps = found, trial
    return best


def _size(tokens: float, limit: int, block: int) -> int:
    return min(max(round(tokens / block), 1) * block, limit)


def gap(case: Case, seed: int) -> tuple[float, float]:
    """isochunk's mean TTFT, and the best fixed size's, over the best that was found."""
    runs = [simulate(case.deployment, case.workload(), record=True)]
    fixed = [simulate(case.deployment, case.workload(), lambda s=s: Fixed(s), record=True) for s in case.sizes]
    rule = [simulate(case.deployment, case.workload(), lambda s=s: Rule(s, case), record=True) for s in case.sizes[6:]]
    runs += [min(fixed, key=lambda run: run.ttft.mean()), min(rule, key=lambda run: run.ttft.mean())]
    means = [float(run.ttft.mean()) for run in runs]
    best = min(means)
    for run, mean in zip(runs, means, strict=True):
        taken = [sum(chunk for _, chunk, _ in step.parts) for step in run.recorded[0]]
        best = min(best, searched(case, taken, mean, seed))
    return means[0] / best, means[1] / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=101)
    parser.add_argument("--count", type=int, default=24)
    given = parser.parse_args()
    chosen = [c for c in cases(given.seed) if c.kind in ("poisson", "bursty", "on and off", "two groups", "batches")]
    gaps = [gap(small(case), at) for at, case in enumerate(chosen[: given.count])]
    for what, found in zip(("isochunk", "the best fixed size"), zip(*gaps, strict=True), strict=True):
        print(
            f"{what} over the best schedule found, {len(found)} cases: "
            f"mean {fmean(found):.3f}, median {median(found):.3f}, worst {max(found):.3f}"
        )


if __name__ == "__main__":
    main()
