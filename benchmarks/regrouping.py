"""Many prompts with tiny remainders: one step each, P equal groups, the best number of groups, and isochunk.

    python benchmarks/regrouping.py

Prompts that arrive together, nearly all of each in the KV cache, so that the fixed cost of a step outweighs its work.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

from grid_open import MIXED, MODELS
from published_results import load_models, table

from isochunk.core.cost import CostModel
from isochunk.simulator import Deployment, OpenLoop, Request, make_requests, simulate
from isochunk.simulator.scheduler import Queue, Steps
from isochunk.simulator.share import ChunkPolicy, Share

STAGES = (2, 4, 8)
PROMPTS = (16, 64)
HITS = (0.9, 0.99)
SIZES = (16, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536)


class Group(Share):
    """Whole prompts, of these keys; they stand at the head of the queue."""

    def __init__(self, keys: set[str]) -> None:
        super().__init__()
        self._keys = keys

    def chunk(self, key: str, history: int, remaining: int, left: int) -> int:
        """All of a prompt of the group, nothing of any other."""
        return min(remaining, left) if key in self._keys else 0


class Groups(ChunkPolicy):
    """Whole prompts in ``count`` steps of about equal seconds; the prompts come together."""

    def __init__(self, model: CostModel, requests: Sequence[Request], count: int) -> None:
        seconds = [model.marginal(request.tokens - request.cached, request.cached) for request in requests]
        ends = itertools.accumulate(seconds)
        share = sum(seconds) / count
        grouped = itertools.groupby(
            zip(requests, ends, seconds, strict=True), key=lambda row: int((row[1] - row[2] / 2) / share)
        )
        self._groups = deque({request.key for request, _, _ in group} for _, group in grouped)

    def share(self, queue: Queue, in_flight: Steps, now: float) -> Share:
        """The next group."""
        return Group(self._groups.popleft())


def case(model: CostModel, stages: int, count: int, hit: float) -> list[str]:
    """Mean TTFT, and time until the last first token, of each way over isochunk's."""
    requests = make_requests(count, MIXED, prefix_hit=hit, block=16, seed=7)
    deployment = Deployment(models=(model,) * stages, max_tokens=sum(r.tokens - r.cached for r in requests))

    def run(policy: str, chunk: int | None = None) -> tuple[float, float, int]:
        result = simulate(deployment, OpenLoop(requests), policy, chunk=chunk)
        return float(result.ttft.mean()), result.seconds, result.steps

    def groups(number: int) -> tuple[float, float, int]:
        result = simulate(deployment, OpenLoop(requests), lambda: Groups(model, requests, number))
        return float(result.ttft.mean()), result.seconds, result.steps

    mean, last, steps = run("optimal")
    best = min(map(groups, range(1, count + 1)))
    ways = (groups(count * 1000), min(run("fixed", min(size, deployment.max_tokens)) for size in SIZES), groups(stages))
    ratios = [f"{its_mean / mean:.2f}, {its_last / last:.2f} ({its})" for its_mean, its_last, its in (*ways, best)]
    return [*ratios, str(steps)]


def main() -> None:
    models = load_models()
    rows = []
    for name, stages, count, hit in itertools.product(MODELS, STAGES, PROMPTS, HITS):
        rows.append(
            [name.split("-")[0], str(stages), str(count), f"{hit:.0%}", *case(models[name], stages, count, hit)]
        )
    head = ["model", "P", "prompts", "hit", "one prompt a step", "best fixed size", "P groups", "best groups", "steps"]
    print("mean TTFT and time of the last first token, over isochunk's (steps)\n")
    print(table(head, rows))


if __name__ == "__main__":
    main()
