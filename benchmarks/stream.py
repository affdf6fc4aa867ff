"""A recorded stream of 30 mixed prompts on a real vLLM, and the same stream in the simulator.

    python -m benchmarks.stream --record benchmarks/results/stream-smollm2.json    # on the demo's model
    python -m benchmarks.stream --replay benchmarks/results/stream-smollm2.json    # needs no vLLM

Prompts of 256 to 6000 tokens, every doubling as likely as any other, four clients that each send their next prompt when
they have a first token. The recording holds the cost model that the server had when each policy's turn began; the
simulator drives the same planner with it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from pathlib import Path
from typing import Any

import numpy as np

from isochunk.core.cost import CostModel
from isochunk.simulator import ClosedLoop, Deployment, Request, simulate

SHORTEST, LONGEST = 256, 6000
CONCURRENCY = 4
ARMS = (("isochunk", "optimal", None), ("fixed 1024", "fixed", 1024), ("fixed 8192", "fixed", 8192))


def record(path: Path, requests: int, rounds: int) -> None:
    from benchmarks.models import ENVIRON, options
    from isochunk.cli.demo_model import demo_model
    from isochunk.deployment.server import running_server

    log = Path("results/stream/server.log")
    with running_server(demo_model(), options("smollm2", LONGEST), log=log, environ=ENVIRON) as url:
        recording = asyncio.run(_record(url, requests, rounds))
    path.write_text(json.dumps(recording, indent=1) + "\n", encoding="utf-8")


async def _record(url: str, count: int, rounds: int) -> dict[str, Any]:
    from benchmarks.load import random_requests
    from isochunk.bench.client import Server
    from isochunk.bench.load import send

    generator = random.Random(0)
    lengths = [round(SHORTEST * (LONGEST / SHORTEST) ** generator.random()) for _ in range(count)]
    runs = []
    async with Server(url, timeout=1800) as server:
        for _ in range(rounds):
            for label, policy, chunk in random.sample(ARMS, len(ARMS)):
                await server.use(policy, chunk)
                status = await server.status()
                outcomes = await send(server, await random_requests(server, lengths), CONCURRENCY)
                times = [outcome.answer.ttft_s for outcome in outcomes if outcome.answer]
                assert len(times) == count
                print(f"{label}: mean TTFT {np.mean(times):.3f} s", flush=True)
                runs.append({"arm": label, "policy": policy, "chunk": chunk, "model": status["model"], "ttft_s": times})
    kept = ("version", "stages", "max_num_batched_tokens", "alignment")
    return {"concurrency": CONCURRENCY, "lengths": lengths, "server": {key: status[key] for key in kept}, "runs": runs}


def simulated(recording: dict[str, Any], run: dict[str, Any]) -> list[float]:
    """TTFT in seconds of each prompt of the stream, in its order."""
    server = recording["server"]
    deployment = Deployment(
        models=(CostModel(**run["model"]),) * server["stages"],
        max_tokens=server["max_num_batched_tokens"],
        block=server["alignment"],
    )
    requests = [Request(key=str(at), tokens=tokens) for at, tokens in enumerate(recording["lengths"])]
    result = simulate(deployment, ClosedLoop(requests, recording["concurrency"]), run["policy"], chunk=run["chunk"])
    times = {done.key: done.first_token - done.arrived for done in result.finished}
    return [times[str(at)] for at in range(len(requests))]


def replay(path: Path) -> None:
    recording = json.loads(path.read_text(encoding="utf-8"))
    print("arm          measured mean, s   simulated   error    p90, s   simulated   error")
    for run in recording["runs"]:
        real, model = np.array(run["ttft_s"]), np.array(simulated(recording, run))
        cells = []
        for value in (np.mean, lambda times: np.percentile(times, 90)):
            measured, predicted = float(value(real)), float(value(model))
            cells.append(f"{measured:8.3f} {predicted:11.3f} {predicted / measured - 1:+8.1%}")
        print(f"{run['arm']:12} {cells[0]:>29} {cells[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--replay", type=Path)
    parser.add_argument("--requests", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    if given.record:
        record(given.record, given.requests, given.rounds)
    path = given.replay or given.record
    if path is None:
        parser.error("give --record FILE or --replay FILE")
    replay(path)


if __name__ == "__main__":
    main()
