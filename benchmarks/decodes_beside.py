"""Gaps between the tokens of streams beside long prompts: a bound in seconds, and token budgets, on a rehearsed server.

    python -m benchmarks.decodes_beside --bounds 0.2 0.3

Kimi's published costs on four virtual stages. Eight streams decode while long prompts come one after the other. A
server with `max_inter_token_latency` for each bound, and one whose fixed sizes are swept at run time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from itertools import pairwise
from pathlib import Path

import httpx
import numpy as np

from benchmarks.models import isochunk_options
from isochunk.bench.client import Server
from isochunk.cli.rehearsed import running_rehearsal
from isochunk.vllm.virtual.rehearsal import Rehearsal

PROFILE = "kimi-k2.5-mxfp4@mi355x/pp4tp1"
STAGES, STREAMS, LONG, PROMPTS = 4, 8, 65_536, 4


def ids(count: int) -> list[int]:
    return random.choices(range(100, 40_000), k=count)


async def stream(http: httpx.AsyncClient, ended: asyncio.Event) -> list[float]:
    """Decode until the long prompts are done; the moments at which tokens came."""
    body = {"model": "rehearsal", "prompt": ids(100), "max_tokens": 4000, "ignore_eos": True, "stream": True}
    moments: list[float] = []
    async with http.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                moments.append(time.monotonic())
            if ended.is_set():
                break
    return moments


async def one(url: str) -> tuple[float, list[float]]:
    """Mean TTFT of the long prompts, and the gaps of the streams while they were there."""
    limits = httpx.Limits(max_connections=64)
    long = [{"model": "rehearsal", "prompt": ids(LONG), "max_tokens": 1} for _ in range(PROMPTS)]
    bodies = [json.dumps(body) for body in long]  # made before, so that nobody waits here while streams are read
    headers = {"Content-Type": "application/json"}
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
        ended = asyncio.Event()
        streams = [asyncio.create_task(stream(http, ended)) for _ in range(STREAMS)]
        await asyncio.sleep(1.5)
        began, times = time.monotonic(), []
        for body in bodies:
            start = time.monotonic()
            (await http.post("/v1/completions", content=body, headers=headers)).raise_for_status()
            times.append(time.monotonic() - start)
        last = time.monotonic()
        ended.set()
        moments = await asyncio.gather(*streams)
    gaps = [b - a for each in moments for a, b in pairwise(each) if began <= a and b <= last]
    return float(np.mean(times)), gaps


def told(name: str, ttft: float, gaps: list[float]) -> dict[str, float | str]:
    half, nine, high, most = np.quantile(gaps, [0.5, 0.9, 0.99, 1])
    said = f"gaps {half:.3f} median, {nine:.3f} p90, {high:.3f} p99, {most:.3f} most"
    print(f"{name:>14}: TTFT {ttft:.3f} s, {said}", flush=True)
    return {"arm": name, "ttft_s": ttft, "gap_p50_s": half, "gap_p90_s": nine, "gap_p99_s": high, "gaps": len(gaps)}


async def sized(url: str, chunk: int) -> tuple[float, list[float]]:
    async with Server(url) as server:
        await server.use("fixed", chunk)
    return await one(url)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bounds", type=float, nargs="*", default=[0.2, 0.3], help="seconds")
    parser.add_argument("--sizes", type=int, nargs="*", default=[512, 1024, 1536, 2048, 3072, 4096, 8192])
    parser.add_argument("--speed", type=float, default=1 / 0.3)
    parser.add_argument("--output", type=Path, default=Path("results/decodes-beside"))
    given = parser.parse_args()
    rows = []
    given.output.mkdir(parents=True, exist_ok=True)
    for bound in [*given.bounds, None]:
        section = {} if bound is None else {"max_inter_token_latency": bound}
        options = [
            "--max-model-len",
            str(LONG + 4200),
            "--max-num-batched-tokens",
            "32768",
            *isochunk_options(**section),
        ]
        rehearsal = Rehearsal(profile=PROFILE, speed=given.speed, kv_tokens=6 * LONG)
        log = given.output / f"{bound}.log"
        with running_rehearsal(rehearsal, options, stages=STAGES, log=log) as url:
            asyncio.run(one(url))  # warm
            if bound is not None:
                rows.append(told(f"bound {bound:g}", *asyncio.run(one(url))))
                continue
            rows.append(told("isochunk", *asyncio.run(one(url))))
            for size in given.sizes:
                rows.append(told(f"fixed {size}", *asyncio.run(sized(url, size))))
    (given.output / "rows.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
