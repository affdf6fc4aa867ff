"""What honest clients feel while thousands of streams run slowly and hundreds of connections misbehave.

    python -m benchmarks.proxy_attack

Honest clients ask through the proxy, first alone, then beside 2,000 slow streams and 500 attackers: silent connections,
heads and bodies that drip, headers of megabytes, floods of requests without a key, clients that do not read. The proxy
has core 0, all others share core 1.
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
from contextlib import suppress
from typing import Any

import aiohttp

from benchmarks.proxy_overhead import cpu_s, free_port, mock, quantile, rss_mib

KEY = {"Authorization": "Bearer secret"}
BODY = json.dumps({"model": "mock", "prompt": "word " * 400, "max_tokens": 1, "stream": True}).encode()
LONG = json.dumps({"model": "mock", "prompt": "slow", "max_tokens": 200, "stream": True}).encode()


def head(body: bytes, *more: str, length: int | None = None) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", f"Content-Length: {len(body) if length is None else length}"]
    return "\r\n".join([*lines, *more, "\r\n"]).encode()


async def slow_stream(port: int, opened: asyncio.Event, over: asyncio.Event) -> int:
    """One stream of a word now and then; what it has read at the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head(LONG, "Authorization: Bearer secret") + LONG)
    got = len(await reader.read(1000))
    opened.set()
    while not over.is_set():
        with suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                part = await reader.read(1000)
                if not part:
                    return -1
                got += len(part)
    writer.transport.abort()
    return got


async def attacker(port: int, kind: int, over: asyncio.Event) -> None:
    while not over.is_set():
        with suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                await misbehave(reader, writer, kind, over)
            finally:
                writer.transport.abort()
        await asyncio.sleep(0.2)


async def misbehave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: int, over: asyncio.Event) -> None:
    if kind == 0:  # says nothing
        await reader.read(1)
    elif kind == 1:  # a head that drips
        writer.write(b"POST /v1/completions HTTP/1.1\r\n")
        while not over.is_set() and not reader.at_eof():
            writer.write(b"X: 1\r\n")
            await writer.drain()
            with suppress(TimeoutError):
                async with asyncio.timeout(1):
                    if not await reader.read(100):
                        return
    elif kind == 2:  # an endless header
        writer.write(b"POST /v1/completions HTTP/1.1\r\nX: ")
        for _ in range(4):
            writer.write(b"x" * 65536)
            await writer.drain()
        await reader.read(1000)
        await asyncio.sleep(1)
    elif kind == 3:  # no key, again and again
        for _ in range(5):
            writer.write(head(BODY) + BODY)
            await reader.read(1000)
            await asyncio.sleep(0.5)
    else:  # a body that drips
        writer.write(head(b"", "Authorization: Bearer secret", length=1_000_000) + b"{")
        while not over.is_set():
            writer.write(b" ")
            with suppress(TimeoutError):
                async with asyncio.timeout(1):
                    if not await reader.read(100):
                        return


async def honest(session: aiohttp.ClientSession, port: int, seconds: float) -> list[float]:
    """TTFTs of 32 clients that ask one request after the other."""
    end, took = time.perf_counter() + seconds, []

    async def client() -> None:
        while time.perf_counter() < end:
            began = time.perf_counter()
            url = f"http://127.0.0.1:{port}/v1/completions"
            async with session.post(url, data=BODY, headers=KEY) as response:
                await response.content.readany()
                took.append(time.perf_counter() - began)
                text = await response.read()
                if response.status != 200 or b"[DONE]" not in text:
                    raise SystemExit(f"an honest client got {response.status}: {text[-200:]!r}")
            await asyncio.sleep(random.random() * 0.4)

    await asyncio.gather(*(client() for _ in range(32)))
    return took


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
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            while True:
                with suppress(aiohttp.ClientError):
                    async with session.get(f"http://127.0.0.1:{port}/health") as response:
                        if response.status == 200:
                            break
                await asyncio.sleep(0.1)
            return await attack(session, port, proxy, given)
    finally:
        for process in (proxy, p, d):
            process.kill()
            process.wait()


async def attack(
    session: aiohttp.ClientSession, port: int, proxy: subprocess.Popen[bytes], given: argparse.Namespace
) -> dict[str, Any]:
    await honest(session, port, 2)
    alone = await honest(session, port, given.seconds)
    over = asyncio.Event()
    opened = [asyncio.Event() for _ in range(given.streams)]
    streams = []
    for event in opened:
        streams.append(asyncio.create_task(slow_stream(port, event, over)))
        await asyncio.sleep(0.003)
    await asyncio.gather(*(event.wait() for event in opened))
    beside = await honest(session, port, given.seconds)
    attackers = [asyncio.create_task(attacker(port, index % 5, over)) for index in range(given.attackers)]
    await asyncio.sleep(2)
    before, began = cpu_s(proxy), time.perf_counter()
    attacked = await honest(session, port, given.seconds)
    share = (cpu_s(proxy) - before) / (time.perf_counter() - began)
    over.set()
    await asyncio.gather(*attackers)
    got = await asyncio.gather(*streams)
    return {
        name: {
            "requests": len(took),
            "ttft_median_ms": round(statistics.median(took) * 1e3, 1),
            "ttft_p99_ms": round(quantile(took, 0.99) * 1e3, 1),
        }
        for name, took in (("alone", alone), ("beside slow streams", beside), ("and attackers", attacked))
    } | {
        "streams_cut": sum(count < 0 for count in got),
        "proxys_core": round(share, 2),
        "mib": round(rss_mib(proxy), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--attackers", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=12.0, help="of each of the three parts")
    parser.add_argument("--interval", type=float, default=2.0, help="seconds after each word of a stream")
    print(json.dumps(asyncio.run(measure(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
