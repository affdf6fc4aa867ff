"""Mean TTFT of a mixed stream over two real P nodes and a real D node, for ways of choosing the P node.

    python -m benchmarks.pd_routing

The nodes share few cores, so each stage of the P nodes is held to ``--stage-share`` of one (`benchmarks.stage_shares`):
it is as fast when all is busy as when nothing is. The rest is left to the D node, the servers' front ends and the
client. Without it rounds scatter far more. The model is the tiny random Qwen3 cut to one layer a stage, so that a round
of many prompts takes minutes. The ways take turns in random order on the same nodes, with the same lengths and moments
and fresh prompts. ``--utilisation`` is of the P nodes by their own predictions. It takes 40 minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
from contextlib import ExitStack
from pathlib import Path
from statistics import mean

import httpx

from benchmarks.load import poisson, random_requests
from benchmarks.models import ENVIRON, QWEN3, isochunk_options, options, random_model
from benchmarks.routing_way import WAYS
from benchmarks.stage_shares import share_cores
from isochunk.bench.client import Server
from isochunk.bench.load import send
from isochunk.core.profile import default_folder
from isochunk.deployment.pd_nodes import Connector, Node, Role, need_connector, running_node, running_proxy
from isochunk.proxy.price import read_status

SHORTEST, LONGEST = 1000, 32_000
SMALL = {**QWEN3, "num_hidden_layers": 2}


def lengths(count: int, seed: int) -> list[int]:
    """Log-uniform, so that every doubling of the length is as likely as any other; the same ones in another order."""
    tokens = [round(SHORTEST * (LONGEST / SHORTEST) ** ((at + 0.5) / count)) for at in range(count)]
    random.Random(seed).shuffle(tokens)
    return tokens


def busy_s(node: Node) -> float:
    """Predicted seconds that a prompt of the stream occupies a node, on average."""
    model = read_status(httpx.get(f"{node.url}/isochunk/status", timeout=60).json())
    assert model is not None
    return mean(model.price(tokens).busy_s for tokens in lengths(1000, 0))


async def one_block(url: str, tokens: list[int], due_s: list[float]) -> list[float]:
    async with Server(url) as server:
        outcomes = await send(server, await random_requests(server, tokens, due_s=due_s), None)
    assert not any(outcome.error for outcome in outcomes), [outcome.error for outcome in outcomes]
    return [round(outcome.answer.ttft_s, 4) for outcome in outcomes if outcome.answer]


def start_nodes(stack: ExitStack, connector: Connector, share: float, logs: Path) -> tuple[list[Node], list[Node]]:
    """Two P nodes and a D node, until ``stack`` ends."""
    model = random_model(default_folder() / "models" / "tiny-qwen3-2-layers", SMALL)
    held = stack.enter_context(share_cores(share)) if share < 1 else None

    def start(name: str, role: Role, stages: int, cores: str) -> Node:
        environ = {**ENVIRON, "VLLM_CPU_OMP_THREADS_BIND": cores, "OMP_NUM_THREADS": "1"}
        environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB for each of the five workers; two million tokens at the least
        chosen = ["--enforce-eager", *options("tiny-qwen3", LONGEST, stages=stages)]
        chosen += isochunk_options(profile="off")  # a stored one may be of another share
        log = logs / f"{name}.log"
        return stack.enter_context(running_node(model, connector, role, chosen, log=log, environ=environ))

    cores = sorted(os.sched_getaffinity(0))
    first, second, third, fourth = (cores[stage * len(cores) // 4] for stage in range(4))
    prefill = [
        start("p0", "kv_producer", 2, f"{first}|{second}"),
        start("p1", "kv_producer", 2, f"{third}|{fourth}"),
    ]
    decode = [start("d", "kv_consumer", 1, "nobind")]
    assert held is None or len(held) == 4, f"{len(held)} of 4 stages have their share"
    return prefill, decode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--utilisation", type=float, default=0.5)
    parser.add_argument("--stage-share", type=float, default=0.4, help="of a core, needs root; 1: no limit")
    parser.add_argument("--connector", default="nixl")
    parser.add_argument("--output", type=Path, default=Path("results/pd-routing"))
    given = parser.parse_args()
    connector = need_connector(given.connector)
    with ExitStack() as stack:
        prefill, decode = start_nodes(stack, connector, given.stage_share, given.output)
        rate = given.utilisation * len(prefill) / mean(map(busy_s, prefill))
        proxies = {}
        for way in WAYS:
            program = ("-m", "benchmarks.routing_way", way)
            log = given.output / f"{way}.log"
            proxies[way] = stack.enter_context(running_proxy(connector, prefill, decode, log=log, program=program))
        # A block that does not count: P nodes meet the D node, caches are touched, and models follow the load.
        warm = given.requests // 3
        asyncio.run(one_block(proxies["round_robin"], lengths(warm, -1), poisson(warm, rate, -1)))
        rounds: list[dict[str, list[float]]] = []
        for index in range(given.rounds):
            tokens, due = lengths(given.requests, index), poisson(given.requests, rate, index)
            times: dict[str, list[float]] = {}
            for way in random.sample(WAYS, len(WAYS)):
                times[way] = asyncio.run(one_block(proxies[way], tokens, due))
                for node in (*prefill, *decode):  # the proxy hides the death of one
                    httpx.get(f"{node.url}/health", timeout=60).raise_for_status()
                print(f"round {index + 1}, {way}: mean TTFT {mean(times[way]):.3f} s", flush=True)
            rounds.append(times)
    (given.output / "samples.json").write_text(json.dumps({"rate": rate, "ttft_s": rounds}), encoding="utf-8")
    ours = [mean(times["predicted_seconds"]) for times in rounds]
    for way in WAYS[1:]:
        ratios = sorted(own / mean(times[way]) for own, times in zip(ours, rounds, strict=True))
        overall = mean(ours) / mean(mean(times[way]) for times in rounds)
        print(f"predicted seconds / {way}: {overall:.3f}, by round {ratios[0]:.3f} to {ratios[-1]:.3f}")


if __name__ == "__main__":
    main()
