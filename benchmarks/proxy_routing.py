"""Mean TTFT of a mixed stream over two P nodes, for ways of choosing the node.

The choice is the proxy's own (`isochunk.proxy.router`); nodes and clock are simulated: a node serves first come first
served, a prompt keeps its stages busy for the priced seconds. With ``--wobble`` each node says something else about
itself every half minute, as nodes do that refit their models to their last steps.

    python benchmarks/proxy_routing.py
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from isochunk.core.cost import CostModel
from isochunk.proxy.config import NodeSpec, Role
from isochunk.proxy.nodes import Node, Pool
from isochunk.proxy.price import NodeModel
from isochunk.proxy.prompt import Prompt
from isochunk.proxy.router import choose_prefill

WAYS = ("predicted_seconds", "queued_tokens", "round_robin")
MODEL = NodeModel(cost=CostModel(0.006, 1.8e-5, 2e-8, 5.6e-7), stages=2, max_chunk=8192)  # the tiny Qwen3 on two cores
PROBE_S, REFIT_S = 5.0, 30.0


class Talk:
    """What a node says of itself: the true model, log-normally off by ``wobble`` in each half minute."""

    def __init__(self, node: Node, wobble: float, seed: str) -> None:
        self._node, self._wobble, self._rng = node, wobble, random.Random(seed)
        self._asked, self._refit = 0.0, 0.0
        self._says = MODEL

    def until(self, now: float) -> None:
        """Have the proxy ask as often as it does until now."""
        while self._asked <= now:
            if self._asked >= self._refit:
                self._refit += REFIT_S
                factor = math.exp(self._rng.gauss(0, self._wobble))
                cost = CostModel(*(factor * value for value in MODEL.cost.as_dict().values()))
                self._says = replace(MODEL, cost=cost)
            known = self._node.model
            self._node.model = known.followed_by(self._says) if known else self._says
            self._asked += PROBE_S


def simulate(way: str, *, utilisation: float, requests: int, seed: int, wobble: float = 0.0, nodes: int = 2) -> float:
    """Mean TTFT in seconds; the same seed gives the same stream to every way."""
    rng = random.Random(seed)
    lengths = [int(1000 * 32 ** rng.random()) for _ in range(requests)]
    gap = statistics.mean(MODEL.price(length).busy_s for length in lengths) / nodes / utilisation
    now = [0.0]
    pool = Pool(Role.PREFILL)
    free: dict[str, float] = {}
    talks: list[Talk] = []
    for index in range(nodes):
        node = pool.add(NodeSpec("p", 1 + index), lambda: now[0])
        assert node is not None
        node.alive = True
        if way == "predicted_seconds":
            talks.append(Talk(node, wobble, f"{seed} {index}"))
        free[node.name] = 0.0
    waits: list[float] = []
    ends: list[tuple[float, int, ExitStack]] = []
    at = 0.0
    for index, length in enumerate(lengths):
        at += rng.expovariate(1 / gap)
        while ends and ends[0][0] <= at:
            now[0], _, done = heapq.heappop(ends)
            done.close()
        now[0] = at
        for talk in talks:
            talk.until(at)
        node, busy_s = _choose(way, pool, index, length)
        price = MODEL.price(length)
        began = max(at, free[node.name])
        free[node.name] = began + price.busy_s
        waits.append(began + price.ttft_s - at)
        job = ExitStack()
        job.enter_context(node.load.job(length, busy_s))
        heapq.heappush(ends, (began + price.busy_s, index, job))
    return statistics.mean(waits)


def _choose(way: str, pool: Pool, index: int, length: int) -> tuple[Node, float]:
    if way == "round_robin":
        return list(pool)[index % len(pool)], 0.0
    choice = choose_prefill(pool, Prompt("ids", 0, length, ()), length)
    return choice.node, choice.busy_s


def compare(run: Callable[[str, float, int], float], loads: list[float], seeds: int) -> dict[str, dict[str, float]]:
    return {
        str(load): {way: round(statistics.mean(run(way, load, seed) for seed in range(seeds)), 3) for way in WAYS}
        for load in loads
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--wobble", type=float, default=0.0, help="standard deviation of the models' error, 0.12 say")
    given = parser.parse_args()

    def run(way: str, load: float, seed: int) -> float:
        return simulate(way, utilisation=load, requests=given.requests, seed=seed, wobble=given.wobble)

    print(json.dumps({"mean_ttft_s_at_utilisation": compare(run, [0.3, 0.5, 0.7, 0.85], given.seeds)}, indent=1))


if __name__ == "__main__":
    main()
