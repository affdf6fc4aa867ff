"""isochunk, the published rule and every fixed chunk size under the same load, interleaved on one running vLLM.

    python -m benchmarks.under_load                                  # closed loop: concurrency x prefix hits
    python -m benchmarks.under_load --utilisations 0.5,0.8,0.95      # Poisson arrivals

The tiny random Qwen3 on two stages; lengths from a normal distribution of mean 6000 cut to 1024..16384. In each round
all arms get the same lengths (and moments) with prompts of their own, in random order; the shared beginning of the
prompts is in the prefix cache before the first. Ratios are paired by round. Samples go to ``<output>/samples.json``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, median

import numpy as np

from benchmarks.load import poisson, random_requests
from benchmarks.models import ENVIRON, options, tiny_qwen3
from isochunk.bench.client import Server
from isochunk.bench.lengths import Normal
from isochunk.bench.load import send
from isochunk.cli.server import running_server

LENGTHS = Normal(6000, 3000, 1024, 16_384)
LARGEST = 8192
OURS, RULE = "isochunk", "published rule"


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


def arms(sizes: list[int]) -> list[Arm]:
    fixed = [Arm(f"fixed {size}", "fixed", size) for size in sizes]
    return [Arm(OURS, "optimal"), Arm(RULE, "first_chunk", LARGEST), *fixed]


async def one_block(server: Server, arm: Arm, cell: Cell, tokens: list[int], seed: int, common: list[int]) -> Block:
    await server.use(arm.policy, arm.chunk)
    due = None if cell.rate is None else poisson(len(tokens), cell.rate, seed)
    requests = await random_requests(server, tokens, due_s=due, common=common, shared=cell.shared)
    outcomes = await send(server, requests, cell.concurrency)
    answers = [outcome.answer for outcome in outcomes]
    assert all(answers), [outcome.error for outcome in outcomes if outcome.error]
    times = [answer.ttft_s for answer in answers if answer]
    span = max(outcome.sent_s + answer.seconds for outcome, answer in zip(outcomes, answers, strict=True) if answer)
    return Block(fmean(times), float(np.percentile(times, 90)), sum(tokens) / (span - outcomes[0].sent_s))


async def one_cell(url: str, cell: Cell, chosen: list[Arm], given: argparse.Namespace) -> list[dict[str, Block]]:
    rounds = []
    async with Server(url, timeout=1800) as server:
        common = random.choices(range(100, 40_000), k=LENGTHS.longest)
        await server.complete(common)
        # At least two batches of a closed loop, so that not all of it is its beginning.
        count = max(given.requests, 2 * (cell.concurrency or 1))
        for index in range(given.rounds):
            generator = random.Random(index)
            tokens = [LENGTHS.draw(generator) for _ in range(count)]
            blocks = {}
            for arm in random.sample(chosen, len(chosen)):
                blocks[arm.label] = await one_block(server, arm, cell, tokens, index, common)
            rounds.append(blocks)
    return rounds


def paired(rounds: list[dict[str, Block]], field: str, over: str, under: str) -> list[float]:
    return sorted(getattr(blocks[over], field) / getattr(blocks[under], field) for blocks in rounds)


def best_fixed(rounds: list[dict[str, Block]], field: str) -> str:
    """The fixed size with the best mean: the highest throughput, or the shortest time."""
    labels = [label for label in rounds[0] if label.startswith("fixed")]
    sign = -1 if field == "tokens_per_s" else 1
    return min(labels, key=lambda label: sign * fmean(getattr(blocks[label], field) for blocks in rounds))


def report(cell: Cell, rounds: list[dict[str, Block]]) -> None:
    """isochunk over the best fixed size of this very cell, and over the rule; for throughput, above 1 is better."""
    parts = []
    for field in ("mean_ttft_s", "p90_ttft_s", "tokens_per_s"):
        for under in (best_fixed(rounds, field), RULE):
            ratios = paired(rounds, field, OURS, under)
            parts.append(f"{field} / {under}: {median(ratios):.3f} ({ratios[0]:.3f}-{ratios[-1]:.3f})")
    print(f"{cell.label}\n  " + "\n  ".join(parts), flush=True)


def cells(given: argparse.Namespace, capacity: float | None) -> Iterator[Cell]:
    hits = [float(part) for part in given.hits.split(",")]
    if capacity is not None:
        for part in map(float, given.utilisations.split(",")):
            yield Cell(None, part * capacity, 0.0, f"Poisson, {part:.0%} of {capacity:.2f} requests/s")
        return
    for shared, concurrency in product(hits, map(int, given.concurrencies.split(","))):
        yield Cell(concurrency, None, shared, f"concurrency {concurrency}, {shared:.0%} of each prompt in the cache")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrencies", default="1,4,16")
    parser.add_argument("--hits", default="0,0.5,0.9")
    parser.add_argument("--utilisations", default="", help="Poisson arrivals in place of the closed loop")
    parser.add_argument("--sizes", default="512,1024,2048,4096,8192")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("results/under-load"))
    given = parser.parse_args()
    chosen = arms([int(part) for part in given.sizes.split(",")])
    saved = {}
    log = given.output / "server.log"
    vllm_options = options("tiny-qwen3", LENGTHS.longest)
    with running_server(tiny_qwen3(), vllm_options, log=log, environ=ENVIRON) as url:
        capacity = None
        if given.utilisations:
            full = Cell(16, None, 0.0, "capacity")
            ours = asyncio.run(one_cell(url, full, [Arm(OURS, "optimal")], given))
            typical = fmean(LENGTHS.draw(random.Random(seed)) for seed in range(10_000))
            capacity = fmean(blocks[OURS].tokens_per_s for blocks in ours) / typical
        for cell in cells(given, capacity):
            rounds = asyncio.run(one_cell(url, cell, chosen, given))
            saved[cell.label] = [{label: vars(block) for label, block in blocks.items()} for blocks in rounds]
            (given.output / "samples.json").write_text(json.dumps(saved, indent=1), encoding="utf-8")
            report(cell, rounds)


if __name__ == "__main__":
    main()
