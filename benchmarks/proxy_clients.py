"""Processor time of one request with a streamed answer, for the HTTP clients a proxy could use."""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import httpx
import uvicorn

BODY = b'{"prompt":"' + b"x" * 2000 + b'"}'


async def answer(scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    for _ in range(4):
        await send({"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def serve(listening: socket.socket) -> None:
    uvicorn.Server(uvicorn.Config(answer, log_level="error", lifespan="off")).run(sockets=[listening])


async def cpu_ms(ask: Callable[[], Awaitable[None]], concurrency: int, requests: int = 1500) -> float:
    async def worker(left: Any) -> None:
        for _ in left:
            await ask()

    for _ in range(2):  # the first round opens the connections
        left = iter(range(requests))
        began = time.process_time()
        await asyncio.gather(*(worker(left) for _ in range(concurrency)))
    return (time.process_time() - began) / requests * 1e3


async def main(url: str) -> None:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    async with httpx.AsyncClient(limits=limits) as slow, aiohttp.ClientSession() as fast:

        async def ask_httpx() -> None:
            async with slow.stream("POST", url, content=BODY) as response:
                async for _ in response.aiter_raw():
                    pass

        async def ask_aiohttp() -> None:
            async with fast.post(url, data=BODY) as response:
                async for _ in response.content.iter_any():
                    pass

        for concurrency in (1, 64):
            for name, ask in (("httpx", ask_httpx), ("aiohttp", ask_aiohttp)):
                print(f"{name:8} {concurrency:3} at once: {await cpu_ms(ask, concurrency):.3f} ms a request")


if __name__ == "__main__":
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = multiprocessing.get_context("fork").Process(target=serve, args=(listening,))
        server.start()
        try:
            asyncio.run(main(f"http://127.0.0.1:{listening.getsockname()[1]}/"))
        finally:
            server.terminate()
