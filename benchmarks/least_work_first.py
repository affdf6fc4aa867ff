"""Least work first against first come, first served: simulated, and on a rehearsed vLLM.

    python -m benchmarks.least_work_first                # simulated
    python -m benchmarks.least_work_first --engine       # on vLLM's own server over virtual stages, and simulated

Kimi's costs, prompts of 1k to 32k tokens (every length as likely as any other, and every doubling), Poisson arrivals
at 80% of what the pipeline serves with 64 prompts at a time. Times are those of the machine that is rehearsed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from math import exp, log
from pathlib import Path

import numpy as np

from benchmarks.load import poisson, random_requests
from benchmarks.models import isochunk_options
from isochunk.bench.client import Server
from isochunk.bench.load import send
from isochunk.cli.rehearsed import running_rehearsal
from isochunk.core.cost import CostModel
from isochunk.simulator import ClosedLoop, Deployment, OpenLoop, Request, simulate
from isochunk.vllm.virtual.rehearsal import Rehearsal

KIMI = CostModel(0.0261, 6.03e-6, 6.5e-10, 5.39e-7)
PROFILE = "kimi-k2.5-mxfp4@mi355x/pp4tp1"
SHORTEST, LONGEST, LIMIT = 1000, 32_768, 16_384
LOAD, BOUND_S, SPEED = 0.8, 10.0, 4.0

Times = np.ndarray


def lengths(shape: str, count: int, seed: int) -> list[int]:
    """``uniform`` or ``log-uniform``."""
    draw = random.Random(seed)
    if shape == "uniform":
        return [draw.randint(SHORTEST, LONGEST) for _ in range(count)]
    return [round(exp(draw.uniform(log(SHORTEST), log(LONGEST)))) for _ in range(count)]


def arrivals(tokens: list[int], stages: int, seed: int) -> list[float]:
    """Moments of Poisson arrivals at so much of the capacity."""
    requests = [Request(key=str(at), tokens=count) for at, count in enumerate(tokens)]
    full = simulate(machine(stages), ClosedLoop(requests, 64)).tokens_per_s
    return poisson(len(tokens), LOAD * full * len(tokens) / sum(tokens), seed)


def machine(stages: int) -> Deployment:
    return Deployment(models=(KIMI,) * stages, max_tokens=LIMIT)


def simulated(tokens: list[int], due: list[float], stages: int, bound: float | None) -> Times:
    """Seconds to first token."""
    requests = [
        Request(key=str(at), tokens=count, arrival=when)
        for at, (count, when) in enumerate(zip(tokens, due, strict=True))
    ]
    return simulate(machine(stages), OpenLoop(requests), least_work_first=bound).ttft


async def asked(url: str, tokens: list[int], due: list[float]) -> Times:
    async with Server(url, timeout=3600) as server:
        requests = await random_requests(server, tokens, due_s=[when / SPEED for when in due])
        outcomes = await send(server, requests, None)
        assert all(outcome.answer for outcome in outcomes), [outcome.error for outcome in outcomes if outcome.error]
        return np.array([outcome.answer.ttft_s * SPEED for outcome in outcomes if outcome.answer])


def measured(tokens: list[int], due: list[float], stages: int, bound: float | None, log_file: Path) -> Times:
    """The same on vLLM."""
    options = [*("--max-num-batched-tokens", str(LIMIT), "--max-model-len", "65536", "--disable-log-stats")]
    options += isochunk_options(enabled=True, least_work_first=None if bound is None else bound / SPEED)
    rehearsal = Rehearsal(profile=PROFILE, speed=SPEED)
    with running_rehearsal(rehearsal, options, stages=stages, log=log_file) as url:
        return asyncio.run(asked(url, tokens, due))


def line(what: str, first_come: Times, least_work: Times) -> str:
    """Mean TTFT of both and its ratio, and the longest of each."""
    ratio = least_work.mean() / first_come.mean()
    return (
        f"| {what} | {first_come.mean():.2f} | {least_work.mean():.2f} | {ratio:.2f} | {first_come.max():.1f} "
        f"| {least_work.max():.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", action="store_true")
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--stages", default="4,8")
    parser.add_argument("--shapes", default="uniform,log-uniform")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--log", type=Path, default=Path("results/least-work-first/server.log"))
    given = parser.parse_args()
    print(f"| load | first come, s | least work, s | ratio | longest, s | longest, bound {BOUND_S:g} s |")
    print("| --- | --- | --- | --- | --- | --- |")
    for shape in given.shapes.split(","):
        for stages in map(int, given.stages.split(",")):
            for seed in map(int, given.seeds.split(",")):
                tokens = lengths(shape, given.requests, seed)
                due = arrivals(tokens, stages, seed)
                what = f"{shape}, P = {stages}, seed {seed}"
                print(line(what, *(simulated(tokens, due, stages, bound) for bound in (None, BOUND_S))), flush=True)
                if given.engine:
                    both = [measured(tokens, due, stages, bound, given.log) for bound in (None, BOUND_S)]
                    print(line(f"{what}, vLLM", *both), flush=True)


if __name__ == "__main__":
    main()
