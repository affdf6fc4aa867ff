"""The cells of the grid: one deployment and one closed loop each, and the best fixed size of that very cell."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from isochunk.core.cost import CostModel
from isochunk.simulator import ClosedLoop, Deployment, Lengths, make_requests, simulate

STAGES = (1, 2, 4, 8, 16)
TOKENS = (2048, 8192, 32768, 131072, 524288, 1048576)
CONCURRENCY = (1, 4, 16)
HITS = (0.0, 0.5, 0.9, 0.99)
BLOCK = 16
_ROUNDS = {1: 1, 4: 8, 16: 6}  # requests a client; one is enough where all are alike and alone


@dataclass(frozen=True, slots=True)
class Cell:
    """What is simulated; ``limit`` is ``max_num_batched_tokens``."""

    name: str
    model: CostModel
    stages: int
    tokens: int
    concurrency: int
    hit: float
    limit: int

    @property
    def cached(self) -> int:
        """Tokens of the prefix hit, whole blocks."""
        return int(self.tokens * self.hit + 1e-9) // BLOCK * BLOCK

    def run(self, policy: str, chunk: int | None = None) -> float:
        """Mean TTFT in seconds. In a closed loop without pauses throughput is its inverse, but for the ends."""
        return self.times(policy, chunk)[0]

    def times(self, policy: str, chunk: int | None = None, *, longer: int = 1) -> tuple[float, float]:
        """Mean TTFT in seconds and prompt tokens a second; of a run ``longer`` times as long."""
        deployment = Deployment(models=(self.model,) * self.stages, max_tokens=self.limit, block=BLOCK)
        count = self.concurrency * _ROUNDS[self.concurrency] * longer
        requests = make_requests(count, Lengths(mean=self.tokens), prefix_hit=self.hit, block=BLOCK)
        result = simulate(deployment, ClosedLoop(requests, self.concurrency), policy, chunk=chunk)
        return float(result.ttft.mean()), result.tokens_per_s

    def sizes(self) -> list[int]:
        """Fixed sizes worth trying: even parts of the prompt, whole prompts together, and the powers of two."""
        new = self.tokens - self.cached
        ideal = math.sqrt(self.stages * self.model.work(self.cached, self.tokens) / self.model.c0)
        parts = np.unique(np.round(np.geomspace(1, max(3 * ideal, 4), 18)))
        together = [new * k for k in (2, 3, 4, 6, 8, 12, 16) if k <= self.concurrency]
        powers = [2**k for k in range(8, 20) if new / 2**k <= 3 * ideal + 1]
        sizes = {*(math.ceil(new / n / BLOCK) * BLOCK for n in parts), *together, *powers, self.limit}
        return sorted({min(size, self.limit) for size in sizes})

    def best_fixed(self) -> tuple[float, float, int]:
        """Least mean TTFT and greatest throughput over all sizes, and the size of the first."""
        rows = [(*self.times("fixed", size), size) for size in self.sizes()]
        ttft, _, size = min(rows)
        return ttft, max(rate for _, rate, _ in rows), size


def cells(models: dict[str, CostModel], limit: int) -> Iterator[Cell]:
    """All cells of the grid."""
    for (name, model), *rest in itertools.product(models.items(), STAGES, TOKENS, CONCURRENCY, HITS):
        stages, tokens, concurrency, hit = rest
        yield Cell(name, model, stages, tokens, concurrency, hit, limit)
