"""HTTP servers a proxy could stand on: processor time of a request, and what three attacks do to each.

    python benchmarks/proxy_servers.py --python VENV/bin/python    # with granian, hypercorn, uvicorn, httptools, h11

The server has core 0, the client core 1. Each answers a request of 2 kB with a stream of four parts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

BODY = b'{"prompt":"' + b"x" * 2000 + b'"}'
APP = """
async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": message["type"] + ".complete"})
            if message["type"] == "lifespan.shutdown":
                return
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body"):
            break
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    for _ in range(4):
        await send({"type": "http.response.body", "body": b"data: {}\\n\\n", "more_body": True})
    await send({"type": "http.response.body", "body": b""})
"""
OURS = """
import asyncio, sys, uvloop
from isochunk.proxy.limits import Gate, Limits
from isochunk.proxy.listener import Listener
async def app(client):
    await client.read()
    client.start(200, [(b"content-type", b"text/event-stream")])
    for _ in range(4):
        await client.send(b"data: {}\\n\\n")
    await client.send(b"", last=True)
async def main():
    listener = Listener(app, Gate(Limits()), patience_s=60, finished=lambda client: None)
    server = await asyncio.get_running_loop().create_server(listener.connection, "127.0.0.1", int(sys.argv[1]))
    await server.serve_forever()
uvloop.run(main())
"""
COMMANDS = {
    "granian": "-m granian --interface asgi --host 127.0.0.1 --port {port} --no-ws app:app",
    "hypercorn": "-m hypercorn --worker-class uvloop --bind 127.0.0.1:{port} app:app",
    "uvicorn h11": "-m uvicorn --http h11 --no-access-log --log-level error --port {port} app:app",
    "uvicorn httptools": "-m uvicorn --http httptools --no-access-log --log-level error --port {port} app:app",
}


@contextmanager
def server(python: str, name: str, folder: str) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    if name == "isochunk":
        command = [sys.executable, "-c", OURS, str(port)]
    else:
        command = [python, *COMMANDS[name].format(port=port).split()]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(["taskset", "-c", "0", *command], cwd=folder, start_new_session=True, **quiet)
    try:
        for _ in range(200):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)
        yield port, process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()


def family(process: subprocess.Popen[bytes]) -> list[int]:
    pids, index = [process.pid], 0
    while index < len(pids):
        with suppress(OSError):
            pids += map(int, Path(f"/proc/{pids[index]}/task/{pids[index]}/children").read_text().split())
        index += 1
    return pids


def cpu_s(process: subprocess.Popen[bytes]) -> float:
    total = 0
    for pid in family(process):
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def rss_mib(process: subprocess.Popen[bytes]) -> float:
    pages = 0
    for pid in family(process):
        with suppress(OSError):
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / (1 << 20)


async def cost(port: int, process: subprocess.Popen[bytes], requests: int) -> dict[str, float]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def worker(left: Iterator[int]) -> None:
            for _ in left:
                async with session.post(f"http://127.0.0.1:{port}/", data=BODY) as response:
                    await response.read()

        for _ in range(2):
            left = iter(range(requests))
            before, began = cpu_s(process), time.perf_counter()
            await asyncio.gather(*(worker(left) for _ in range(64)))
    spent, seconds = cpu_s(process) - before, time.perf_counter() - began
    return {"cpu_ms": round(spent / requests * 1e3, 3), "requests_per_s": round(requests / seconds)}


def ask(port: int) -> float:
    began = time.perf_counter()
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
        while connection.recv(65536):
            pass
    return time.perf_counter() - began


def long_header(port: int) -> dict[str, Any]:
    """100 MB of one header; then somebody else asks."""
    answer, sent, began = b"", 0, time.perf_counter()
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        with suppress(OSError):
            connection.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nX-Long: ")
            while sent < 100 << 20:
                connection.sendall(b"x" * (1 << 20))
                sent += 1 << 20
        other = ask(port)
        with suppress(OSError):
            connection.settimeout(5)
            answer = connection.recv(100)
    return {
        "sent_mb": sent >> 20,
        "answer": answer.split(b"\r\n")[0].decode(errors="replace"),
        "others_wait_s": round(other, 2),
        "all_s": round(time.perf_counter() - began, 1),
    }


def silent(port: int, seconds: float) -> int:
    """How many of 50 connections that say nothing are still open after so long."""
    connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(50)]
    time.sleep(seconds)
    still = 0
    for connection in connections:
        connection.setblocking(False)
        try:
            still += connection.recv(10) is None
        except BlockingIOError:
            still += 1
        except OSError:
            pass
        connection.close()
    return still


def bodies(port: int, process: subprocess.Popen[bytes]) -> float:
    """MiB that the server grows by when eight bodies of 200 MB come and do not end."""
    before, connections = rss_mib(process), []
    for _ in range(8):
        connection = socket.create_connection(("127.0.0.1", port), timeout=20)
        connections.append(connection)
        with suppress(OSError):
            connection.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 200000001\r\n\r\n")
            for _ in range(200):
                connection.sendall(b"x" * 1_000_000)
    grown = rss_mib(process) - before
    for connection in connections:
        connection.close()
    return round(grown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--silence", type=float, default=20.0, help="seconds that silent connections are watched")
    given = parser.parse_args()
    os.sched_setaffinity(0, {1})
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "app.py").write_text(APP)
        for name in (*COMMANDS, "isochunk"):
            with server(given.python, name, folder) as (port, process):
                result: dict[str, Any] = asyncio.run(cost(port, process, given.requests))
                result["long_header"] = long_header(port)
            with server(given.python, name, folder) as (port, process):
                result["silent_still_open"] = silent(port, given.silence)
                result["bodies_mib"] = bodies(port, process)
            print(json.dumps({name: result}), flush=True)


if __name__ == "__main__":
    main()
