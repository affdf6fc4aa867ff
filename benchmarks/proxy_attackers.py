"""Slow streams, and clients that misbehave, against a proxy; started by `benchmarks.proxy_attack`.

    python -m benchmarks.proxy_attackers streams --port 8000 --number 2000
    python -m benchmarks.proxy_attackers attack --port 8000 --number 500

Says ``ready`` when all are at it, runs until its input ends, and then tells what it has done. Attackers come from 50
addresses of loopback, each starts at a moment of its own and rests for random times, so that none are in step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress

KEY = "Authorization: Bearer secret"
BODY = json.dumps({"model": "mock", "prompt": "word " * 400, "max_tokens": 1, "stream": True}).encode()
LONG = json.dumps({"model": "mock", "prompt": "slow", "max_tokens": 500, "stream": True}).encode()
MANY = json.dumps({"model": "mock", "prompt": "many", "max_tokens": 2000, "stream": True}).encode()
ADDRESSES = 50

Said = Callable[[str], None]


def head(body: bytes, *more: str, length: int | None = None) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", f"Content-Length: {len(body) if length is None else length}"]
    return "\r\n".join([*lines, *more, "\r\n"]).encode()


class Line:
    """One client's connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def say(self, data: bytes) -> None:
        """Write, and wait while the other side is slow."""
        self.writer.write(data)
        await self.writer.drain()

    async def hear(self, seconds: float) -> bytes | None:
        """What came in so many seconds: None for nothing, empty for the end."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return await self.reader.read(65536)
        return None

    def gone(self) -> None:
        """Leave without a word."""
        self.writer.transport.abort()


def rest(pause: float) -> Awaitable[None]:
    return asyncio.sleep(random.expovariate(1 / pause) if pause else 0)


async def silent(line: Line, pause: float) -> None:
    await line.reader.read(1)


async def dripping_head(line: Line, pause: float) -> None:
    await line.say(b"POST /v1/completions HTTP/1.1\r\n")
    while True:
        await line.say(b"X: 1\r\n")
        if await line.hear(random.uniform(0.5, 1.5)) is not None:
            return


async def endless_header(line: Line, pause: float) -> None:
    await line.say(b"POST /v1/completions HTTP/1.1\r\nX: ")
    for _ in range(16):
        await line.say(b"x" * 65536)
    await line.reader.read(1000)


async def no_key(line: Line, pause: float) -> None:
    """Again and again on one connection."""
    for _ in range(5):
        await line.say(head(BODY) + BODY)
        if not await line.reader.read(65536):
            return
        await rest(pause)


async def dripping_body(line: Line, pause: float) -> None:
    await line.say(head(b"", KEY, length=1_000_000) + b"{")
    while True:
        await line.say(b" ")
        if await line.hear(random.uniform(0.5, 1.5)) is not None:
            return


async def hit_and_run(line: Line, pause: float) -> None:
    """A request with the key, and nobody who waits for the answer."""
    await line.say(head(BODY, KEY) + BODY)
    await asyncio.sleep(random.uniform(0, 0.05))


async def garbage(line: Line, pause: float) -> None:
    await line.say(os.urandom(200))
    await line.reader.read(1000)


async def deaf(line: Line, pause: float) -> None:
    """Asks for a long answer and reads nothing of it."""
    line.writer.transport.pause_reading()
    await line.say(head(MANY, KEY) + MANY)
    await asyncio.sleep(random.uniform(5, 15))


async def only_connects(line: Line, pause: float) -> None:
    """Connects, and closes at once."""


KINDS = (silent, dripping_head, endless_header, no_key, dripping_body, hit_and_run, garbage, deaf, only_connects)


async def attacker(port: int, index: int, pause: float, done: Counter[str]) -> None:
    kind = KINDS[index % len(KINDS)]
    await asyncio.sleep(random.random())
    while True:
        with suppress(OSError, asyncio.IncompleteReadError):
            own = (f"127.1.0.{index % ADDRESSES + 1}", 0)
            line = Line(*await asyncio.open_connection("127.0.0.1", port, local_addr=own))
            done[kind.__name__] += 1
            try:
                await kind(line, pause)
            finally:
                line.gone()
        await rest(pause)


async def slow_stream(port: int, opened: asyncio.Event, done: Counter[str]) -> None:
    """One stream of a word now and then."""
    line = Line(*await asyncio.open_connection("127.0.0.1", port))
    await line.say(head(LONG, KEY) + LONG)
    try:
        while part := await line.reader.read(1000):
            done["words"] += part.count(b"data: ")
            opened.set()
        done["cut"] += 1
    finally:
        opened.set()
        line.gone()


async def connect_input() -> asyncio.StreamReader:
    """This process's input, whose end is the order to stop."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


async def run(given: argparse.Namespace) -> dict[str, float]:
    done: Counter[str] = Counter()
    tasks = []
    over = await connect_input()
    if given.what == "streams":
        opened = [asyncio.Event() for _ in range(given.number)]
        for event in opened:
            tasks.append(asyncio.create_task(slow_stream(given.port, event, done)))
            await asyncio.sleep(0.002)
        await asyncio.gather(*(event.wait() for event in opened))
    else:
        tasks = [asyncio.create_task(attacker(given.port, i, given.pause, done)) for i in range(given.number)]
        await asyncio.sleep(2)
        done.clear()
    print("ready", flush=True)
    began = time.perf_counter()
    await over.read()
    seconds = time.perf_counter() - began
    told: dict[str, float] = {"cut": done.pop("cut", 0)}
    told |= {f"{name} a second": round(number / seconds, 1) for name, number in done.items()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("streams", "attack"))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--pause", type=float, default=0.3, help="mean seconds between two deeds of an attacker")
    given = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # never before an honest client on the same core
    print(json.dumps(asyncio.run(run(given))), flush=True)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
