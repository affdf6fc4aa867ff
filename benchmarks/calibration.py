"""Does the model stay true on a real vLLM: from a wrong one, through disturbances, and at what cost?

    python -m benchmarks.calibration                          # all three parts
    python -m benchmarks.calibration --parts wrong            # or: disturbed, cost

The tiny random Qwen3 on two stages, prompts of the full length.

wrong      A server for each stored model with coefficients four times too large or too small, alone and together. After
           five prompts: predicted over measured TTFT of the sixth, and the median TTFT from it on over that of a
           freshly probed server; both over vLLM's own fixed size on the same server, so that a slower moment of the
           machine drops out.
disturbed  What moves when both stages are paused for two seconds in mid-prompt, when decodes come in a burst, and when
           three tiny prompts come right after the start: the predictions at several sizes, the refits and the alarms.
cost       Two servers side by side, one with ``need_timing`` off; prompts go to them in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import secrets
import signal
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx

from benchmarks.load import QUIET_S
from benchmarks.models import ENVIRON, isochunk_options, options, tiny_qwen3
from isochunk.bench.client import Server
from isochunk.bench.prompts import PromptMaker
from isochunk.core.cost import COEFFICIENTS, CostModel
from isochunk.deployment.server import running_server

FACTOR = 4.0
PROMPTS = 5
PAUSE_S = 2.0
FOLLOWING = 6  # prompts after a disturbance, enough to fill the window with their steps
PARTS = ("wrong", "disturbed", "cost")


def server_with(profile: Path, tokens: int, log: Path, **section: Any) -> AbstractContextManager[str]:
    """A server that keeps its cost model in this file; gives its URL."""
    chosen = [*options("tiny-qwen3", tokens), *isochunk_options(profile=str(profile), **section)]
    return running_server(tiny_qwen3(), chosen, log=log, environ=ENVIRON)


def maker(server: Server) -> PromptMaker:
    return PromptMaker(server, seed=secrets.randbits(32))


async def taught(url: str, tokens: int, rounds: int) -> tuple[float, float]:
    """Predicted over measured TTFT of the sixth prompt; median TTFT from it on, over that of vLLM's own size."""
    async with Server(url) as server:
        prompts = maker(server)
        for _ in range(PROMPTS):
            await server.complete(await prompts.prompt(tokens))
        own = [(await server.complete(await prompts.prompt(tokens))).ttft_s for _ in range(rounds)]
        sixth = (await server.status())["prompts"][PROMPTS]
        await server.use("fixed")
        fixed = [(await server.complete(await prompts.prompt(tokens))).ttft_s for _ in range(rounds)]
    return sixth["predicted_ttft_s"] / sixth["measured_ttft_s"], median(own) / median(fixed)


def wrong_models(good: dict[str, float]) -> Iterator[tuple[str, dict[str, float]]]:
    for factor, said in ((FACTOR, "large"), (1 / FACTOR, "small")):
        for name in (*COEFFICIENTS, "all"):
            spoilt = {key: value * factor if name in (key, "all") else value for key, value in good.items()}
            yield f"{name} {FACTOR:g}x too {said}", spoilt


def wrong(folder: Path, tokens: int, rounds: int) -> None:
    fresh = folder / "fresh.json"
    fresh.unlink(missing_ok=True)
    with server_with(fresh, tokens, folder / "fresh.log") as url:
        good = httpx.get(f"{url}/isochunk/status", timeout=60).json()["model"]
        predicted, own = asyncio.run(taught(url, tokens, rounds))
    print(f"{'freshly probed':22} predicted/measured {predicted:.2f}  TTFT {own:.3f} of vLLM's size", flush=True)
    for name, spoilt in wrong_models(good):
        profile = folder / "wrong.json"
        profile.write_text(json.dumps(spoilt), encoding="utf-8")
        with server_with(profile, tokens, folder / f"{name.replace(' ', '-')}.log") as url:
            predicted, ratio = asyncio.run(taught(url, tokens, rounds))
        print(f"{name:22} predicted/measured {predicted:.2f}  TTFT {ratio / own:.3f} of the fresh server's", flush=True)


@contextmanager
def paused() -> Iterator[None]:
    """Both stages of the newest server stopped for as long as the block runs."""
    names = [f"VLLM::Worker_PP{stage}" for stage in (0, 1)]
    found = [subprocess.run(["pgrep", "-nf", name], capture_output=True, text=True, check=True) for name in names]
    workers = [int(process.stdout) for process in found]
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    try:
        yield
    finally:
        for worker in workers:
            os.kill(worker, signal.SIGCONT)


def moved(before: dict[str, Any], seen: list[dict[str, Any]]) -> str:
    """What changed in the statuses seen after one."""
    old = CostModel(**before["model"])
    places = [(chunk, history) for chunk in (128, 512, 2048) for history in (0, 4096, 12_288)]
    models = [CostModel(**status["model"]) for status in seen]
    change = max(abs(new.seconds(*place) / old.seconds(*place) - 1) for new in models for place in places)
    last = seen[-1]["counters"]
    counts = {name: last[name] - before["counters"][name] for name in ("refits", "alarms", "fallbacks")}
    return f"predictions moved by up to {change:.1%}, " + ", ".join(f"{name} +{n}" for name, n in counts.items())


async def disturbances(url: str, tokens: int) -> None:
    async with Server(url) as server:
        prompts = maker(server)

        async def one(count: int, output_tokens: int = 1) -> float:
            return (await server.complete(await prompts.prompt(count), output_tokens=output_tokens)).ttft_s

        async def pause() -> None:
            usual = await one(tokens)
            sending = asyncio.create_task(server.complete(await prompts.prompt(tokens)))
            await asyncio.sleep(0.7 * usual)  # its last steps stay in the window
            with paused():
                await asyncio.sleep(PAUSE_S)
            await sending

        async def burst() -> None:
            await asyncio.gather(*(one(300, output_tokens=64) for _ in range(8)))

        async def tiny() -> None:
            for count in (3, 5, 8):
                await one(count)

        for name, disturb in (
            ("tiny prompts", tiny),  # right after the start
            ("nothing", None),
            ("a pause", pause),
            ("decodes", burst),
        ):
            before = await server.status()
            if disturb is not None:
                await disturb()
            seen = [await server.status()]
            for _ in range(FOLLOWING):  # a refit comes at the end of a prompt
                await one(tokens // 4)
                seen.append(await server.status())
            print(f"{name:14} {moved(before, seen)}", flush=True)


def disturbed(folder: Path, tokens: int) -> None:
    profile = folder / "disturbed.json"
    profile.unlink(missing_ok=True)
    with server_with(profile, tokens, folder / "disturbed.log") as url:
        asyncio.run(disturbances(url, tokens))


async def in_turn(urls: dict[str, str], tokens: int, rounds: int) -> list[float]:
    """TTFT with timing over TTFT without, one a round."""
    ratios = []
    async with Server(urls["on"]) as on, Server(urls["off"]) as off:
        servers = {"on": on, "off": off}
        prompts = maker(on)
        for number in range(rounds + 1):
            seconds = {}
            for name in random.sample(list(servers), 2):
                prompt = await prompts.prompt(tokens)
                await asyncio.sleep(QUIET_S)
                seconds[name] = (await servers[name].complete(prompt)).ttft_s
            if number:  # the first is the warm-up
                ratios.append(seconds["on"] / seconds["off"])
    return ratios


def cost(folder: Path, tokens: int, rounds: int) -> None:
    profile = folder / "on.json"
    profile.unlink(missing_ok=True)
    with server_with(profile, tokens, folder / "on.log") as on:
        stored = folder / "off.json"
        stored.write_text(json.dumps(httpx.get(f"{on}/isochunk/status", timeout=60).json()["model"]), encoding="utf-8")
        with server_with(stored, tokens, folder / "off.log", need_timing=False) as off:
            ratios = asyncio.run(in_turn({"on": on, "off": off}, tokens, rounds))
    low, middle, high = quantiles(ratios, n=4, method="inclusive")
    print(f"TTFT with need_timing over TTFT without: {middle:.3f} ({low:.3f}-{high:.3f}), {rounds} rounds", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="prompts under either policy with each wrong model; five times as many for the cost",
    )
    parser.add_argument("--output", type=Path, default=Path("results/calibration"))
    given = parser.parse_args()
    folder: Path = given.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    parts = given.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts {','.join(sorted(unknown))}: the parts are {', '.join(PARTS)}")
    if "wrong" in parts:
        wrong(folder, given.tokens, given.rounds)
    if "disturbed" in parts:
        disturbed(folder, given.tokens)
    if "cost" in parts:
        cost(folder, given.tokens, 5 * given.rounds)


if __name__ == "__main__":
    main()
