"""What honest clients feel while thousands of streams run slowly and hundreds of connections misbehave.

    python -m benchmarks.proxy_attack

32 honest clients ask through the proxy, half of the time on a new connection: alone, beside 2,000 slow streams, and
beside 500 attackers as well (`benchmarks.proxy_attackers`); rounds of the three parts. At the same time 8 clients ask P
and D themselves: what they feel is not the proxy's doing. The proxy has core 0; nodes and honest clients have core 1,
which streams and attackers get when nobody else wants it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import aiohttp

from benchmarks.proxy_attackers import BODY
from benchmarks.proxy_overhead import cpu_s, direct, free_port, mock, quantile, rss_mib

KEY = {"Authorization": "Bearer secret"}
Times = dict[str, list[float]]


async def ask(session: aiohttp.ClientSession, port: int) -> float:
    fresh = {"Connection": "close"} if random.random() < 0.5 else {}
    began = time.perf_counter()
    url = f"http://127.0.0.1:{port}/v1/completions"
    async with session.post(url, data=BODY, headers=KEY | fresh) as response:
        text = await response.content.readany()
        took = time.perf_counter() - began
        text += await response.read()
        if response.status != 200 or b"[DONE]" not in text:
            raise SystemExit(f"an honest client got {response.status}: {text[-200:]!r}")
    return took


async def honest(session: aiohttp.ClientSession, port: int, nodes: tuple[str, str], seconds: float) -> Times:
    """TTFTs of clients that ask one request after the other."""
    end = time.perf_counter() + seconds
    took: Times = {"proxy": [], "direct": []}
    past = direct(*nodes, json.loads(BODY))

    async def client(way: str) -> None:
        await asyncio.sleep(random.random() * 0.3)
        while time.perf_counter() < end:
            took[way].append(await (ask(session, port) if way == "proxy" else past(session)))
            await asyncio.sleep(random.random() * 0.4)

    await asyncio.gather(*(client("proxy") for _ in range(32)), *(client("direct") for _ in range(8)))
    return took


@asynccontextmanager
async def others(what: str, number: int, port: int, told: dict[str, Any]) -> AsyncIterator[None]:
    """Streams or attackers for as long as the context lasts."""
    command = [sys.executable, "-m", "benchmarks.proxy_attackers", what, "--port", str(port), "--number", str(number)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    try:
        assert (await process.stdout.readline()).strip() == b"ready"
        yield
        said, _ = await process.communicate(b"")
        for name, value in json.loads(said).items():
            told.setdefault(f"{what}: {name}", []).append(value)
    finally:
        with suppress(ProcessLookupError):
            process.kill()


async def lag(session: aiohttp.ClientSession, port: int, over: asyncio.Event, took: list[float]) -> None:
    """How long the proxy takes to say that it is well: no node is asked for that."""
    while not over.is_set():
        began = time.perf_counter()
        async with session.get(f"http://127.0.0.1:{port}/health") as response:
            await response.read()
        took.append(time.perf_counter() - began)
        await asyncio.sleep(random.uniform(0.01, 0.03))


async def part(
    session: aiohttp.ClientSession,
    port: int,
    nodes: tuple[str, str],
    given: argparse.Namespace,
    into: dict[str, Any],
    proxy: subprocess.Popen[bytes],
) -> None:
    over, healths = asyncio.Event(), []
    before, began = cpu_s(proxy), time.perf_counter()
    looking = asyncio.create_task(lag(session, port, over, healths))
    for way, took in (await honest(session, port, nodes, given.seconds)).items():
        into.setdefault(way, []).append(took)
    into.setdefault("core", []).append((cpu_s(proxy) - before) / (time.perf_counter() - began))
    over.set()
    await looking
    into.setdefault("health", []).append(healths)


def summary(rounds: list[list[float]]) -> dict[str, Any]:
    values = [value for one in rounds for value in one]
    p99 = [round(quantile(one, 0.99) * 1e3, 1) for one in rounds]
    return {
        "requests": len(values),
        "median_ms": round(statistics.median(values) * 1e3, 1),
        "p99_ms": round(quantile(values, 0.99) * 1e3, 1),
        "p99_ms_by_round": p99,
        "max_ms": round(max(values) * 1e3, 1),
    }


async def measure(given: argparse.Namespace) -> dict[str, Any]:
    os.sched_setaffinity(0, {1})
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    p, prefill = mock("prefill", "--delay", "0.1")
    d, decode = mock("decode", "--ignore-kv", "--interval", str(given.interval))
    port = free_port()
    command = [sys.executable, "-c", "from isochunk.cli.app import main; main()", "proxy", "--port", str(port)]
    for kind, url in (("prefiller", prefill), ("decoder", decode)):
        command += [f"--{kind}-hosts", "127.0.0.1", f"--{kind}-ports", url.rsplit(":", 1)[1]]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    proxy = subprocess.Popen(["taskset", "-c", "0", *command, "--api-key", "secret"], **quiet)
    try:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3)
        async with aiohttp.ClientSession(connector=connector) as session:
            while True:
                with suppress(aiohttp.ClientError):
                    async with session.get(f"http://127.0.0.1:{port}/health") as response:
                        if response.status == 200:
                            break
                await asyncio.sleep(0.1)
            return await rounds(session, port, (prefill, decode), proxy, given)
    finally:
        for process in (proxy, p, d):
            process.kill()
            process.wait()


async def rounds(
    session: aiohttp.ClientSession,
    port: int,
    nodes: tuple[str, str],
    proxy: subprocess.Popen[bytes],
    given: argparse.Namespace,
) -> dict[str, Any]:
    parts: dict[str, dict[str, Any]] = {"alone": {}, "beside slow streams": {}, "and attackers": {}}
    told: dict[str, Any] = {}
    await honest(session, port, nodes, 2)
    for _ in range(given.rounds):
        await part(session, port, nodes, given, parts["alone"], proxy)
        async with AsyncExitStack() as held:
            await held.enter_async_context(others("streams", given.streams, port, told))
            await part(session, port, nodes, given, parts["beside slow streams"], proxy)
            await held.enter_async_context(others("attack", given.attackers, port, told))
            await part(session, port, nodes, given, parts["and attackers"], proxy)
        await asyncio.sleep(3)
    return {
        name: {way: summary(into[way]) for way in ("proxy", "direct", "health")}
        | {"proxys_core": [round(share, 2) for share in into["core"]]}
        for name, into in parts.items()
    } | {"told": told, "mib": round(rss_mib(proxy), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--attackers", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=12.0, help="of each part")
    parser.add_argument("--interval", type=float, default=2.0, help="seconds after each word of a stream")
    print(json.dumps(asyncio.run(measure(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
