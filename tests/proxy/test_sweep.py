"""What requests and connections leave behind: nothing for Python's collector, whose pauses stop everybody."""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
import uvloop
from proxy_processes import Node, Start

from isochunk.proxy.app import Proxy
from isochunk.proxy.config import NodeSpec, ProxyConfig, Role, Timeouts
from isochunk.proxy.limits import Gate
from isochunk.proxy.listener import Listener
from isochunk.proxy.sweep import sweep


def post(body: Any, *headers: str, path: str = "/v1/completions") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(data)}", *headers]
    return "\r\n".join([*lines, "\r\n"]).encode() + data


KEY = "Authorization: Bearer secret"
BODY = {"model": "mock", "prompt": "hello", "max_tokens": 3}
WAYS = {
    "whole": (post(BODY, KEY), True),
    "streamed": (post(BODY | {"stream": True}, KEY), True),
    "by one node": (post(BODY, KEY, path="/tokenize"), True),
    "unknown model": (post(BODY | {"model": "none"}, KEY), True),
    "no key": (post(BODY), True),
    "no route": (post(BODY, KEY, path="/nowhere"), True),
    "no JSON": (post(b"{", KEY), True),
    "no HTTP": (b"\x00\x01\x02\r\n\r\n", True),
    "long head": (b"POST / HTTP/1.1\r\nX: " + b"x" * 70_000, True),
    "no words": (b"", False),
    "half a head": (b"POST / HTTP/1.1\r\nX", False),
    "gone in the body": (post(BODY, KEY)[:-5], False),
    "gone before the answer": (post(BODY | {"stream": True}, KEY), False),
    "upgrade": (post(BODY, KEY, "Connection: Upgrade", "Upgrade: h2c"), True),
    "not waited for": (post(BODY, "Expect: 100-continue")[:-30], True),
}


async def visit(port: int, data: bytes, *, patient: bool) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    if patient:
        with suppress(TimeoutError):
            async with asyncio.timeout(5):
                await reader.read(20)
    else:
        await writer.drain()
        await asyncio.sleep(0.02)
    writer.transport.abort()


async def left_behind(nodes: dict[Role, Node], way: str) -> Counter[str]:
    """Types of what only the collector frees, after some visits."""
    specs = {role: (NodeSpec.parse(node.name),) for role, node in nodes.items()}
    config = ProxyConfig(nodes=specs, api_key="secret", timeouts=Timeouts(probe_s=60))
    proxy = Proxy(config, ("127.0.0.1", 1))
    await proxy.fleet.set(config.nodes)
    listener = Listener(proxy, Gate(config.limits), patience_s=10, finished=lambda client: None)
    server = await asyncio.get_running_loop().create_server(listener.connection, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    data, patient = WAYS[way]
    for _ in range(3):
        await visit(port, data, patient=patient)
    await drained(listener)
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            await visit(port, data, patient=patient)
        await drained(listener)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found = Counter(f"{type(o).__module__}.{type(o).__qualname__}" for o in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        server.close()
        await proxy.close()
    return found


async def drained(listener: Listener) -> None:
    async with asyncio.timeout(20):
        while listener.connections:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)  # what the loop still has to call


@pytest.fixture(scope="module")
def nodes(start_once: Start) -> dict[Role, Node]:
    return {Role.PREFILL: start_once.node("prefill"), Role.DECODE: start_once.node("decode", "--ignore-kv")}


@pytest.mark.parametrize("way", WAYS)
def test_nothing_waits_for_the_collector(nodes: dict[Role, Node], way: str) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(left_behind(nodes, way))
    # What the visitors' own streams leave is not the proxy's.
    ours = {name: number for name, number in found.items() if name.startswith(("isochunk", "httptools", "aiohttp"))}
    assert not ours, found


def test_the_collector_looks_at_old_objects_only_when_it_is_told() -> None:
    before = gc.get_threshold()

    async def some_time() -> None:
        task = asyncio.create_task(sweep())
        await asyncio.sleep(0)
        kept: list[Any] = []
        passes = gc.get_stats()[2]["collections"]
        for _ in range(300_000):
            kept.append([])  # grows by more than a quarter
        assert gc.get_stats()[2]["collections"] == passes
        assert gc.get_freeze_count() > 0
        task.cancel()

    try:
        asyncio.run(some_time())
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
