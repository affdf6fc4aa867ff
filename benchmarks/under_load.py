"""isochunk, the published rule and every fixed chunk size under the same load, interleaved on one running vLLM.

    python -m benchmarks.under_load                                  # closed loop: concurrency x prefix hits
    python -m benchmarks.under_load --utilisations 0.5,0.8,0.95      # Poisson arrivals

The tiny random Qwen3 on two stages; lengths from a normal distribution of mean 6000 cut to 1024..16384. In each round
all arms get the same lengths (and moments) with prompts of their own, in random order; the shared beginning of the
prompts is in the prefix cache before the first. Ratios are paired by round. The simulator gets the same loads with the
server's cost model. vLLM's queues sleep between two looks (``isochunk_shared_cores``): where they spin, three of its
processes compete with the stages for two cores, and a step is at times held up for a second, under every policy.
Samples go to ``<output>/samples.json``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, median

import numpy as np

from benchmarks.load import poisson, random_requests
from benchmarks.models import ENVIRON, options, tiny_qwen3
from isochunk.bench.client import Server, Status
from isochunk.bench.lengths import Normal
from isochunk.bench.load import send
from isochunk.core.cost import CostModel
from isochunk.deployment.server import running_server
from isochunk.simulator import ClosedLoop, Deployment, OpenLoop, Request, simulate
from isochunk.vllm.shared_cores import PLUGIN

LENGTHS = Normal(6000, 3000, 1024, 16_384)
LARGEST = 8192
KV_BLOCK = 128  # tokens of a block of vLLM's CPU build: prefix hits end on one
OURS, RULE = "isochunk", "published rule"
FIELDS = ("mean_ttft_s", "p90_ttft_s", "tokens_per_s")


@dataclass(frozen=True)
class Arm:
    """A policy, and the size that goes with it."""

    label: str
    policy: str
    chunk: int | None = None


@dataclass(frozen=True)
class Cell:
    """A load: so many at a time, or Poisson arrivals at so many requests a second."""

    concurrency: int | None
    rate: float | None
    shared: float
    label: str


@dataclass(frozen=True)
class Block:
    """What one arm did in one round."""

    mean_ttft_s: float
    p90_ttft_s: float
    tokens_per_s: float


Rounds = list[dict[str, Block]]


def arms(sizes: list[int]) -> list[Arm]:
    fixed = [Arm(f"fixed {size}", "fixed", size) for size in sizes]
    return [Arm(OURS, "optimal"), Arm(RULE, "first_chunk", LARGEST), *fixed]


async def one_block(server: Server, arm: Arm, cell: Cell, tokens: list[int], seed: int, common: list[int]) -> Block:
    if cell.shared:
        await server.complete(common)  # what the arm before pushed out of the cache comes in again
    await server.use(arm.policy, arm.chunk)
    due = None if cell.rate is None else poisson(len(tokens), cell.rate, seed)
    requests = await random_requests(server, tokens, due_s=due, common=common, shared=cell.shared)
    outcomes = await send(server, requests, cell.concurrency)
    answers = [outcome.answer for outcome in outcomes]
    assert all(answers), [outcome.error for outcome in outcomes if outcome.error]
    for request, answer in zip(requests, answers, strict=True):
        assert answer is None or (answer.cached_tokens or 0) >= request.shared - KV_BLOCK
    span = max(outcome.sent_s + answer.seconds for outcome, answer in zip(outcomes, answers, strict=True) if answer)
    return block(cell, tokens, [answer.ttft_s for answer in answers if answer], span - outcomes[0].sent_s)


def simulated_block(
    server: Status, arm: Arm, cell: Cell, tokens: list[int], seed: int, *, in_flight: int | None = None
) -> Block:
    """The same load in the simulator, with the cost model that the server has."""
    deployment = Deployment(
        models=(CostModel(**server["model"]),) * server["stages"],
        max_tokens=server["max_num_batched_tokens"],
        block=server["alignment"],
        in_flight=in_flight,
    )
    due = [0.0] * len(tokens) if cell.rate is None else poisson(len(tokens), cell.rate, seed)
    requests = [
        Request(key=str(at), tokens=count, arrival=due[at], cached=int(cell.shared * count) // KV_BLOCK * KV_BLOCK)
        for at, count in enumerate(tokens)
    ]
    load = OpenLoop(requests) if cell.concurrency is None else ClosedLoop(requests, cell.concurrency)
    finished = sorted(simulate(deployment, load, arm.policy, chunk=arm.chunk).finished, key=lambda done: int(done.key))
    times = [done.first_token - done.arrived for done in finished]
    return block(cell, tokens, times, max(done.first_token for done in finished) - due[0])


def block(cell: Cell, tokens: list[int], times: list[float], span: float) -> Block:
    """Of a closed loop without the first prompt of each client: those all come at once."""
    later = times[cell.concurrency or 0 :]
    return Block(fmean(later), float(np.percentile(later, 90)), sum(tokens) / span)


async def one_cell(url: str, cell: Cell, chosen: list[Arm], given: argparse.Namespace) -> tuple[Rounds, Rounds]:
    """What each arm did in each round, on the engine and in the simulator."""
    rounds, simulated = [], []
    async with Server(url, timeout=1800) as server:
        common = random.choices(range(100, 40_000), k=LENGTHS.longest)
        count = max(given.requests, 3 * (cell.concurrency or 1))
        for index in range(given.rounds):
            generator = random.Random(index)
            tokens = [LENGTHS.draw(generator) for _ in range(count)]
            blocks = {}
            for arm in random.sample(chosen, len(chosen)):
                blocks[arm.label] = await one_block(server, arm, cell, tokens, index, common)
            rounds.append(blocks)
            status = await server.status()
            simulated.append({arm.label: simulated_block(status, arm, cell, tokens, index) for arm in chosen})
    return rounds, simulated


def paired(rounds: Rounds, field: str, over: str, under: str) -> list[float]:
    return sorted(getattr(blocks[over], field) / getattr(blocks[under], field) for blocks in rounds)


def best_fixed(rounds: Rounds, field: str) -> str:
    """The fixed size with the best mean: the highest throughput, or the shortest time."""
    labels = [label for label in rounds[0] if label.startswith("fixed")]
    sign = -1 if field == "tokens_per_s" else 1
    return min(labels, key=lambda label: sign * fmean(getattr(blocks[label], field) for blocks in rounds))


def report(cell: Cell, engine: Rounds, simulated: Rounds) -> None:
    """isochunk over the best fixed size of this very cell, and over the rule; for throughput, above 1 is better."""
    print(cell.label, flush=True)
    for where, rounds in (("engine", engine), ("simulator", simulated)):
        for field in FIELDS:
            parts = []
            for under in (best_fixed(rounds, field), RULE):
                ratios = paired(rounds, field, OURS, under)
                parts.append(f"{under} {median(ratios):.3f} ({ratios[0]:.3f}-{ratios[-1]:.3f})")
            print(f"  {where:9} {field:12} over {' and '.join(parts)}", flush=True)


def verdict(field: str, engine: list[Rounds]) -> str:
    """In how many cells isochunk is within 3% of the best fixed size, and better than the rule."""
    over_best = [median(paired(rounds, field, OURS, best_fixed(rounds, field))) for rounds in engine]
    over_rule = [median(paired(rounds, field, OURS, RULE)) for rounds in engine]
    if field == "tokens_per_s":
        near, better = sum(ratio >= 0.97 for ratio in over_best), sum(ratio > 1 for ratio in over_rule)
    else:
        near, better = sum(ratio <= 1 / 0.97 for ratio in over_best), sum(ratio < 1 for ratio in over_rule)
    return (
        f"{field}: {near} of {len(engine)} cells at least 0.97x of the best fixed size, {better} better than the rule"
    )


def cells(given: argparse.Namespace, capacity: float | None) -> Iterator[Cell]:
    hits = [float(part) for part in given.hits.split(",")]
    if capacity is not None:
        for part in map(float, given.utilisations.split(",")):
            yield Cell(None, part * capacity, 0.0, f"Poisson, {part:.0%} of {capacity:.2f} requests/s")
        return
    for shared, concurrency in product(hits, map(int, given.concurrencies.split(","))):
        yield Cell(concurrency, None, shared, f"concurrency {concurrency}, {shared:.0%} of each prompt in the cache")


def plain(rounds: Rounds) -> list[dict[str, dict[str, float]]]:
    return [{label: asdict(block) for label, block in blocks.items()} for blocks in rounds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrencies", default="1,4,16")
    parser.add_argument("--hits", default="0,0.5,0.9")
    parser.add_argument("--utilisations", default="", help="Poisson arrivals in place of the closed loop")
    parser.add_argument("--sizes", default="128,256,512,1024,2048,4096")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("results/under-load"))
    given = parser.parse_args()
    chosen = arms([int(part) for part in given.sizes.split(",")])
    saved: dict[str, dict[str, list[dict[str, dict[str, float]]]]] = {}
    measured: list[Rounds] = []
    log = given.output / "server.log"
    vllm_options = options("tiny-qwen3", LENGTHS.longest)
    with running_server(tiny_qwen3(), vllm_options, log=log, environ=ENVIRON, plugins=("isochunk", PLUGIN)) as url:
        capacity = None
        if given.utilisations:
            full = Cell(16, None, 0.0, "capacity")
            ours, _ = asyncio.run(one_cell(url, full, [Arm(OURS, "optimal")], given))
            typical = fmean(LENGTHS.draw(random.Random(seed)) for seed in range(10_000))
            capacity = fmean(blocks[OURS].tokens_per_s for blocks in ours) / typical
        for cell in cells(given, capacity):
            engine, simulated = asyncio.run(one_cell(url, cell, chosen, given))
            measured.append(engine)
            saved[cell.label] = {"engine": plain(engine), "simulator": plain(simulated)}
            (given.output / "samples.json").write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
            report(cell, engine, simulated)
    for field in FIELDS:
        print(verdict(field, measured))


if __name__ == "__main__":
    main()
