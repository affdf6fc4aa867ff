"""What a proxy adds: TTFT at a given concurrency, throughput, and memory over many requests, against mock nodes.

    python benchmarks/proxy_overhead.py                        # isochunk proxy
    python benchmarks/proxy_overhead.py --other 'vllm-router ...{prefill}...{decode}...{port}'
    python benchmarks/proxy_overhead.py --memory 100000

The proxy has core 0 for itself; nodes and client share core 1. "direct" is the client going to P and to D itself.
Proxies take turns, so that the machine's drift hits all alike; each turn begins with requests that only open its
connections.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import socket
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

MODEL = "mock"
BODY = {"model": MODEL, "prompt": "word " * 400, "max_tokens": 4, "stream": True}
Ask = Callable[[aiohttp.ClientSession], Awaitable[float]]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(command: list[str], core: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["taskset", "-c", str(core), *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def mock(role: str, *more: str) -> tuple[subprocess.Popen[bytes], str]:
    port = free_port()
    command = [sys.executable, "-m", "isochunk.proxy.mock", role, "--port", str(port), *more]
    return start(command, 1), f"http://127.0.0.1:{port}"


async def wait_up(session: aiohttp.ClientSession, url: str) -> None:
    for _ in range(600):
        try:
            async with session.post(f"{url}/v1/completions", json={**BODY, "stream": False}) as response:
                if response.status == 200:
                    return
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.05)
    raise SystemExit(f"{url} did not come up")


def through(url: str) -> Ask:
    data = json.dumps(BODY).encode()

    async def ask(session: aiohttp.ClientSession) -> float:
        began = time.perf_counter()
        headers = {"Content-Type": "application/json"}
        async with session.post(f"{url}/v1/completions", data=data, headers=headers) as response:
            first = await response.content.readany()
            seconds = time.perf_counter() - began
            assert response.status == 200, first
            assert first
            async for _ in response.content.iter_any():
                pass
        return seconds

    return ask


def direct(prefill: str, decode: str, body: dict[str, Any] = BODY) -> Ask:
    async def ask(session: aiohttp.ClientSession) -> float:
        began = time.perf_counter()
        headers = {"X-Request-Id": uuid.uuid4().hex}
        order = {**body, "stream": False, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        async with session.post(f"{prefill}/v1/completions", json=order, headers=headers) as response:
            params = (await response.json())["kv_transfer_params"]
        order = {**body, "kv_transfer_params": params}
        async with session.post(f"{decode}/v1/completions", json=order, headers=headers) as response:
            await response.content.readany()
            seconds = time.perf_counter() - began
            async for _ in response.content.iter_any():
                pass
        return seconds

    return ask


async def load(session: aiohttp.ClientSession, ask: Ask, concurrency: int, requests: int) -> tuple[list[float], float]:
    left = iter(range(requests))
    seconds: list[float] = []

    async def worker(index: int) -> None:
        await asyncio.sleep(index * 0.005)  # clients do not start in step
        for _ in left:
            seconds.append(await ask(session))

    began = time.perf_counter()
    await asyncio.gather(*(worker(index) for index in range(concurrency)))
    return seconds, requests / (time.perf_counter() - began)


def rss_mib(process: subprocess.Popen[bytes]) -> float:
    with open(f"/proc/{process.pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / (1 << 20)


def cpu_s(process: subprocess.Popen[bytes] | None) -> float:
    """Processor seconds so far; of this process, the client, for None."""
    with open(f"/proc/{process.pid if process else 'self'}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


async def measure(given: argparse.Namespace) -> dict[str, Any]:
    os.sched_setaffinity(0, {1})
    delay = 0.0 if given.memory else given.delay
    processes = []
    try:
        p_process, prefill = mock("prefill", "--delay", str(delay))
        d_process, decode = mock("decode", "--ignore-kv")
        processes += [p_process, d_process]
        asks: dict[str, Ask] = {"direct": direct(prefill, decode)}
        commands = {
            "isochunk": f"{sys.executable} -c 'from isochunk.cli.app import main; main()' proxy --port {{port}} "
            "--prefiller-hosts 127.0.0.1 --prefiller-ports {prefill_port} "
            "--decoder-hosts 127.0.0.1 --decoder-ports {decode_port}"
        }
        if given.other:
            commands["other"] = given.other
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3)) as session:
            await wait_up(session, decode)
            await wait_up(session, prefill)
            for name, command in commands.items():
                port = free_port()
                places = {"port": port, "prefill": prefill, "decode": decode}
                places |= {"prefill_port": prefill.rsplit(":", 1)[1], "decode_port": decode.rsplit(":", 1)[1]}
                process = start(shlex.split(command.format(**places)), 0)
                processes.append(process)
                asks[name] = through(f"http://127.0.0.1:{port}")
                await wait_up(session, f"http://127.0.0.1:{port}")
            if given.memory:
                return await memory(session, asks["isochunk"], processes[2], given)
            servers = dict(zip(commands, processes[2:], strict=True))
            return await latency(session, asks, servers, given)
    finally:
        for process in processes:
            process.terminate()
            process.wait()


async def latency(
    session: aiohttp.ClientSession,
    asks: dict[str, Ask],
    servers: dict[str, subprocess.Popen[bytes]],
    given: argparse.Namespace,
) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {name: [] for name in asks}
    p99: dict[str, list[float]] = {name: [] for name in asks}
    rates: dict[str, list[float]] = {name: [] for name in asks}
    cpu = dict.fromkeys(asks, 0.0)
    for _ in range(given.rounds):
        for name, ask in asks.items():
            await load(session, ask, given.concurrency, given.concurrency)  # opens connections
            before = cpu_s(servers.get(name))
            values, rate = await load(session, ask, given.concurrency, given.requests)
            cpu[name] += cpu_s(servers.get(name)) - before
            seconds[name] += values
            p99[name].append(round(quantile(values, 0.99) * 1e3, 2))
            rates[name].append(rate)
    base = seconds["direct"]
    return {
        name: {
            "ttft_median_ms": round(quantile(values, 0.5) * 1e3, 2),
            "ttft_p99_ms": round(quantile(values, 0.99) * 1e3, 2),
            "ttft_p99_ms_by_round": p99[name],
            "added_median_ms": round((quantile(values, 0.5) - quantile(base, 0.5)) * 1e3, 2),
            "added_p99_ms": round((quantile(values, 0.99) - quantile(base, 0.99)) * 1e3, 2),
            "cpu_ms_a_request": round(cpu[name] / len(values) * 1e3, 3),
            "requests_per_s": round(statistics.median(rates[name]), 1),
        }
        for name, values in seconds.items()
    }


async def memory(
    session: aiohttp.ClientSession, ask: Ask, process: subprocess.Popen[bytes], given: argparse.Namespace
) -> dict[str, Any]:
    steps = {0: round(rss_mib(process), 1)}
    for part in range(1, 11):
        await load(session, ask, given.concurrency, given.memory // 10)
        steps[part * given.memory // 10] = round(rss_mib(process), 1)
    return {"rss_mib_after_requests": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--requests", type=int, default=640, help="in each round, for each way")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--delay", type=float, default=0.5, help="seconds of a prefill; 0 measures throughput")
    parser.add_argument("--memory", type=int, default=0, help="send so many requests and watch the proxy's memory")
    parser.add_argument("--other", help="command of another proxy, with {port}, {prefill} and {decode} in it")
    print(json.dumps(asyncio.run(measure(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
