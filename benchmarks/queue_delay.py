"""Short prompts behind a long one on a real vLLM, with and without ``max_queue_delay``.

    python -m benchmarks.queue_delay

The tiny random Qwen3 on two stages. In each round one long prompt is sent and, a moment later, three short ones; a
server without the option (first come, first served) and one with it take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from benchmarks.load import QUIET_S, random_requests
from benchmarks.models import ENVIRON, isochunk_options, options, tiny_qwen3
from isochunk.bench.client import Server
from isochunk.bench.load import send
from isochunk.deployment.server import running_server

LONG, SHORT = 32_000, 500
MOMENTS_S = (0.0, 0.3, 0.6, 0.9)


async def one_round(url: str) -> tuple[float, float, int]:
    """TTFT of the long prompt, mean TTFT of the short ones, and how often the long one has let others pass."""
    async with Server(url) as server:
        before = (await server.status())["counters"]["yields"]
        requests = await random_requests(server, [LONG, SHORT, SHORT, SHORT], due_s=MOMENTS_S)
        outcomes = await send(server, requests, None)
        assert all(outcome.answer for outcome in outcomes), [outcome.error for outcome in outcomes]
        long, *short = [outcome.answer.ttft_s for outcome in outcomes if outcome.answer]
        yields = (await server.status())["counters"]["yields"] - before
    return long, sum(short) / len(short), yields


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delay", type=float, default=0.2, help="max_queue_delay of the second server, seconds")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("results/queue-delay"))
    given = parser.parse_args()
    with ExitStack() as stack:
        urls = {}
        for name, delay in (("without", None), (f"{given.delay:g} s", given.delay)):
            chosen = [*options("tiny-qwen3", LONG), *isochunk_options(max_queue_delay=delay)]
            log = given.output / f"{name.replace(' ', '')}.log"
            urls[name] = stack.enter_context(running_server(tiny_qwen3(), chosen, log=log, environ=ENVIRON))
        rounds: list[dict[str, tuple[float, float, int]]] = []
        for _ in range(given.rounds + 1):
            times = {}
            for name in random.sample(list(urls), 2):
                times[name] = asyncio.run(one_round(urls[name]))
                asyncio.run(asyncio.sleep(QUIET_S))
            rounds.append(times)
    counted = rounds[1:]  # the first is the warm-up
    for name in urls:
        long, short, yields = (median(times[name][kind] for times in counted) for kind in range(3))
        print(f"max_queue_delay {name:8} long prompt {long:.2f} s, short ones {short:.2f} s, yields {yields:.0f}")
    without, with_it = urls
    for kind, label in ((0, "long"), (1, "short")):
        ratios = sorted(times[with_it][kind] / times[without][kind] for times in counted)
        print(f"{label} with / without: {median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})")


if __name__ == "__main__":
    main()
