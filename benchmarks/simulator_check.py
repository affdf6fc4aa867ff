"""`isochunk simulate` held against vLLM's own server on virtual stages (`isochunk rehearse`), cell by cell.

    python -m benchmarks.simulator_check              # 40 cells on four servers; --report prints what is there
    python -m benchmarks.simulator_check --only 4     # the server with four stages of Kimi's costs

A cell is a load on one server: prompts one at a time, closed loops of 4 and 16 clients, Poisson arrivals at 50, 80 and
95% of what the stages can do; lengths mixed or alike; prompts that share nothing, or nine tenths. Both get the same
requests: where the simulator has hash ids, the server gets the token ids that they stand for. The server's time is
real, with HTTP, parsing and hashing; of this the simulator is told what prompts of two lengths alone take before the
cells. What is measured goes to ``--output`` after each cell, and a later run goes on with those that are missing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.load import QUIET_S
from benchmarks.models import isochunk_options
from isochunk.bench import load
from isochunk.bench.client import Server
from isochunk.cli.rehearsed import running_rehearsal
from isochunk.core.cost import CostModel
from isochunk.core.published import known_profile
from isochunk.simulator import ClosedLoop, Deployment, OpenLoop, Request, Result, poisson, simulate
from isochunk.vllm.virtual.rehearsal import Rehearsal

KIMI, DEEPSEEK = "kimi-k2.5-mxfp4@mi355x/pp4tp1", "deepseek-v3.1-w8a8@atlas-a3/pp2tp8/hi"
SERVERS = {"2": (2, KIMI), "4": (4, KIMI), "8": (8, KIMI), "4d": (4, DEEPSEEK)}
UNIT, BLOCK = 512, 16
LIMIT = 32768
KV_TOKENS = 4_000_000
MEAN_WITHIN, P90_WITHIN = 0.05, 0.10


@dataclass(frozen=True)
class Cell:
    """A load and a policy; ``clients`` for a closed loop, ``busy`` for Poisson arrivals."""

    policy: str = "optimal"
    chunk: int | None = None
    clients: int | None = None
    busy: float | None = None
    least: int = 2000
    most: int = 32000
    shared: float = 0.0
    count: int = 40

    @property
    def name(self) -> str:
        """What it is called."""
        load = f"{self.clients} clients" if self.busy is None else f"Poisson {self.busy:.0%}"
        lengths = f"{self.least}" if self.least == self.most else f"{self.least}-{self.most}"
        return (
            f"{self.policy}{f' {self.chunk}' if self.chunk else ''}, {load}, {lengths} tokens, {self.shared:.0%} shared"
        )

    def requests(self) -> list[Request]:
        """The same for the server and the simulator, and like no other cell's."""
        rng = random.Random(self.name)
        base = rng.randrange(1 << 40)
        made = []
        for at in range(self.count):
            tokens = round(self.least * (self.most / self.least) ** rng.random())
            units = -(-tokens // UNIT)
            kept = int(self.shared * tokens) // UNIT
            hashes = [base + n if n < kept else base + (1 << 20) * (at + 1) + n for n in range(units)]
            made.append(Request(key=str(at), tokens=tokens, blocks=tuple(hashes), unit=UNIT))
        return made


CELLS = (
    Cell(clients=1, least=32000, most=32000, count=10),
    Cell(clients=4),
    Cell(clients=4, policy="fixed", chunk=4096),
    Cell(clients=4, shared=0.9),
    Cell(clients=16, count=64),
    Cell(clients=16, count=64, policy="fixed", chunk=8192),
    Cell(clients=16, count=64, least=16000, most=16000),
    Cell(busy=0.5),
    Cell(busy=0.8),
    Cell(busy=0.95, policy="fixed", chunk=8192),
)


def deployment(server: str, given: argparse.Namespace, intake: Sequence[float] = (0.0, 0.0)) -> Deployment:
    stages, profile = SERVERS[server]
    model = known_profile(profile).model
    return Deployment(
        models=(model.scaled(1 / given.speed),) * stages,
        max_tokens=LIMIT,
        block=BLOCK,
        kv_tokens=KV_TOKENS,
        max_seqs=256,
        intake_s=intake[0],
        intake_token_s=intake[1],
    )


async def intake(url: str, machine: Deployment) -> list[float]:
    """Seconds of a request and of each of its tokens that a prompt alone takes beside its steps."""
    lengths, beside = (2000, 32000), []
    async with Server(url, timeout=600) as server:
        await server.use("fixed", LIMIT)
        for tokens in lengths:
            seconds = machine.stages * machine.models[0].seconds(tokens)
            bodies = [await server.body(random.choices(range(100, 1000), k=tokens), 1) for _ in range(7)]
            beside.append(median([(await server.send(body)).ttft_s - seconds for body in bodies]))
    each = max(beside[1] - beside[0], 0.0) / (lengths[1] - lengths[0])
    return [max(beside[0] - each * lengths[0], 0.0), each]


def due(cell: Cell, model: CostModel) -> list[Request]:
    """The requests, at their times when they have any."""
    requests = cell.requests()
    if cell.busy is None:
        return requests
    hit = [int(cell.shared * request.tokens) // UNIT * UNIT for request in requests]
    work = np.mean([model.seconds(request.tokens - h, h) for request, h in zip(requests, hit, strict=True)])
    return poisson(requests, cell.busy / float(work), seed=1).requests


def simulated(cell: Cell, machine: Deployment) -> Result:
    requests = due(cell, machine.models[0])
    arrivals = OpenLoop(requests) if cell.clients is None else ClosedLoop(requests, cell.clients)
    return simulate(machine, arrivals, cell.policy, chunk=cell.chunk)


async def measured(url: str, cell: Cell, machine: Deployment) -> list[float]:
    """TTFT of each request on the server."""
    async with Server(url, timeout=600) as server:
        await server.use(cell.policy, cell.chunk)
        requests = []
        for request in due(cell, machine.models[0]):
            ids = [token for unit in request.blocks for token in random.Random(unit).choices(range(100, 1000), k=UNIT)]
            body = await server.body(ids[: request.tokens], 1)
            requests.append(load.Request(tokens=request.tokens, shared=0, due_s=request.arrival, body=body))
        await asyncio.sleep(QUIET_S)
        outcomes = await load.send(server, requests, cell.clients)
    assert all(outcome.answer for outcome in outcomes), [outcome.error for outcome in outcomes]
    return [outcome.answer.ttft_s for outcome in outcomes if outcome.answer]


def run(server: str, given: argparse.Namespace, known: dict[str, Any]) -> None:
    missing = [cell for cell in CELLS if f"{server}: {cell.name}" not in known]
    if not missing:
        return
    machine, begin = deployment(server, given), time.monotonic()
    profile = given.output.with_suffix(f".{server}.profile.json")
    profile.parent.mkdir(parents=True, exist_ok=True)
    profile.write_text(json.dumps(machine.models[0].as_dict()))
    stages, name = SERVERS[server]
    options = [
        *("--max-num-batched-tokens", str(LIMIT), "--block-size", str(BLOCK), "--no-async-scheduling"),
        *("--max-num-seqs", "256", "--max-model-len", "131072"),
        *isochunk_options(profile=str(profile), need_timing=False),
    ]
    rehearsal = Rehearsal(profile=name, speed=given.speed, kv_tokens=KV_TOKENS)
    with running_rehearsal(rehearsal, options, stages=stages, log=given.output.with_suffix(f".{server}.log")) as url:
        known[server] = asyncio.run(intake(url, machine))
        print(f"{server}: a request takes {known[server][0] * 1e3:.1f} ms and {known[server][1] * 1e6:.2f} us a token")
        for cell in missing:
            if time.monotonic() - begin > given.seconds:
                return
            times = asyncio.run(measured(url, cell, machine))
            known[f"{server}: {cell.name}"] = {"ttft_s": times}
            given.output.write_text(json.dumps(known, indent=1) + "\n")
            print(_row(server, cell, given, known), flush=True)


def _row(server: str, cell: Cell, given: argparse.Namespace, known: dict[str, Any]) -> str:
    real = np.array(known[f"{server}: {cell.name}"]["ttft_s"])
    told = simulated(cell, deployment(server, given, known[server])).ttft
    mean = told.mean() / real.mean() - 1
    p90 = np.percentile(told, 90) / np.percentile(real, 90) - 1
    good = abs(mean) <= MEAN_WITHIN and abs(p90) <= P90_WITHIN
    return (
        f"| {server} | {cell.name} | {real.mean():.3f} | {told.mean():.3f} | {mean:+.1%} | "
        f"{np.percentile(real, 90):.3f} | {p90:+.1%} | {'' if good else 'off'} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(SERVERS), action="append")
    parser.add_argument("--speed", type=float, default=1.0, help="how many times as fast as the machine the clocks run")
    parser.add_argument("--seconds", type=float, default=400.0, help="start no cell on a server after so many")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/simulator-check.json"))
    given = parser.parse_args()
    known = json.loads(given.output.read_text()) if given.output.exists() else {}
    print("| server | cell | measured mean, s | simulated | error | measured p90 | error | |\n|" + " --- |" * 8)
    for server in given.only or SERVERS:
        if given.report:
            for cell in CELLS:
                if f"{server}: {cell.name}" in known:
                    print(_row(server, cell, given, known))
        else:
            run(server, given, known)


if __name__ == "__main__":
    main()
