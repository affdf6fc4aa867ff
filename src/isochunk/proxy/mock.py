"""P and D nodes that compute nothing: they take the predicted time and keep account, for testing a proxy.

    python -m isochunk.proxy.mock prefill --port 8100 --coefficients 0.006,1.8e-5,2e-8,5.6e-7 --stages 2
    python -m isochunk.proxy.mock decode --port 8200 --interval 0.01

A P node serves one prompt at a time, first come first served, in the seconds of its cost model, and keeps the KV of
each until a D node fetches it. A D node fetches it and streams words made from the prompt. Faults are knobs that
``POST /mock/knobs`` sets while it runs; ``GET /mock/state`` tells what it has done.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

import aiohttp
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from isochunk.core.cost import CostModel
from isochunk.proxy.client import Client
from isochunk.proxy.errors import ClientGoneError, NodeFailedError, ProxyError
from isochunk.proxy.price import NodeModel

__all__ = ["MockNode", "main"]

MODEL = "mock"
_JSON = [(b"content-type", b"application/json")]
_EVENTS = [(b"content-type", b"text/event-stream")]


@dataclass
class Knobs:
    """Faults, all off.

    Attributes:
        hang: accept requests and never answer one.
        hang_health: never answer ``/health`` either.
        status: answer requests with this status; 0 for the proper one.
        die: end the process at ``before``, ``during`` or ``after`` the prefill, or in ``midstream``.
        stall_after: words after which a stream says no more; 0 for never.
        cut_after: words after which a stream ends without its end mark; 0 for never.
        empty: answer 200 and nothing.
    """

    hang: bool = False
    hang_health: bool = False
    status: int = 0
    die: str = ""
    stall_after: int = 0
    cut_after: int = 0
    empty: bool = False


class MockNode:
    """One node.

    Args:
        role: ``prefill`` or ``decode``.
        model: P's cost model.
        hide_model: take the model's time, but do not tell it.
        delay_s: seconds that each prefill takes, all at once, when there is no model.
        interval_s: seconds between two words of D.
        filler: characters added to each word of D.
    """

    def __init__(
        self,
        role: str,
        *,
        model: NodeModel | None = None,
        hide_model: bool = False,
        delay_s: float = 0.0,
        interval_s: float = 0.0,
        filler: int = 0,
    ) -> None:
        self.role = role
        self.model = model
        self.hide_model = hide_model
        self.delay_s = delay_s
        self.interval_s = interval_s
        self.filler = "." * filler
        self.knobs = Knobs()
        self.address = ("", 0)
        self.counts: Counter[str] = Counter()
        self.active = 0
        self.headers: dict[str, str] = {}
        self.body: dict[str, Any] = {}
        self._held: dict[str, int] = {}
        self._stage = asyncio.Lock()
        self._session: aiohttp.ClientSession | None = None
        self.app = Starlette(
            routes=[
                Route("/v1/completions", self),
                Route("/v1/chat/completions", self),
                Route("/v1/models", self._models),
                Route("/health", self._health),
                Route("/isochunk/status", self._status),
                Route("/query", self._bootstrap),
                Route("/mock/state", self._state),
                Route("/mock/knobs", self._set_knobs, methods=["POST"]),
                Route("/mock/kv/{id}", self._give_kv, methods=["DELETE"]),
            ]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A completion."""
        client = Client(receive, send, 3600.0)
        self.counts["requests"] += 1
        self.headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.active += 1
        try:
            data = await client.read(1 << 30)
            await client.while_there(self._complete(client, data))
            self.counts["finished"] += 1
        except ClientGoneError:
            self.counts["cancelled"] += 1
        except ProxyError as error:
            with suppress(ClientGoneError):
                await client.fail(error)
        finally:
            self.active -= 1

    async def _complete(self, client: Client, data: bytes) -> None:
        if self.knobs.hang:
            await asyncio.Event().wait()
        if self.knobs.die == "before":
            os._exit(1)
        if self.knobs.status:
            raise ProxyError(self.knobs.status, "mock_error", f"status {self.knobs.status} as ordered")
        try:
            self.body = request = json.loads(data)
        except ValueError as error:
            raise ProxyError(400, "invalid_request_error", f"not JSON: {error}") from error
        if request.get("model") != MODEL:
            raise ProxyError(404, "not_found_error", f"The model {request.get('model')!r} does not exist.")
        if self.knobs.empty:
            await client.answer(200, _JSON, b"")
        elif self.role == "prefill":
            await self._prefill(client, request)
        else:
            await self._decode(client, request)

    async def _prefill(self, client: Client, request: dict[str, Any]) -> None:
        tokens = _tokens(request)
        if self.model is not None:
            price = self.model.price(tokens)
            async with self._stage:
                if self.knobs.die == "during":
                    os._exit(1)
                await asyncio.sleep(price.busy_s)
            await asyncio.sleep(price.ttft_s - price.busy_s)
        else:
            await asyncio.sleep(self.delay_s)
        params = request.get("kv_transfer_params") or {}
        key = params.get("transfer_id") or self.headers["x-request-id"]
        answer: dict[str, Any] = _answer(request, ["one"]) | {"usage": {"prompt_tokens": tokens}}
        if params.get("do_remote_decode"):
            self._held[key] = tokens
            if "transfer_id" not in params:
                host, port = self.address
                answer["kv_transfer_params"] = {
                    "do_remote_prefill": True, "do_remote_decode": False, "remote_host": host, "remote_port": port,
                    "remote_request_id": key, "pp_size": self.model.stages if self.model else 1,
                }  # fmt: skip
        await client.answer(200, _JSON, json.dumps(answer).encode())
        if self.knobs.die == "after":
            os._exit(1)

    async def _decode(self, client: Client, request: dict[str, Any]) -> None:
        params = request.get("kv_transfer_params") or {}
        if params.get("do_remote_prefill"):
            await self._fetch_kv(params)
        else:
            self.counts["local_prefills"] += 1
        words = [word + self.filler for word in _words(request)]
        if not request.get("stream"):
            await asyncio.sleep(self.interval_s * len(words))
            usage = {"usage": {"prompt_tokens": _tokens(request), "completion_tokens": len(words)}}
            await client.answer(200, _JSON, json.dumps(_answer(request, words) | usage).encode())
            return
        await client.start(200, _EVENTS)
        async for event in self._events(request, words):
            await client.send(event)
        await client.send(b"", last=True)

    async def _events(self, request: dict[str, Any], words: list[str]) -> AsyncIterator[bytes]:
        for index, word in enumerate(words, 1):
            yield b"data: " + json.dumps(_answer(request, [word])).encode() + b"\n\n"
            if self.knobs.die == "midstream":
                await asyncio.sleep(0.05)  # what has been written must leave before the process goes
                os._exit(1)
            if index == self.knobs.stall_after:
                await asyncio.Event().wait()
            if index == self.knobs.cut_after:
                return
            await asyncio.sleep(self.interval_s)
        yield b"data: [DONE]\n\n"

    async def _fetch_kv(self, params: dict[str, Any]) -> None:
        key = params.get("transfer_id") or params["remote_request_id"]
        where = params.get("remote_bootstrap_addr") or f"http://{params['remote_host']}:{params['remote_port']}"
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        try:
            async with self._session.delete(f"{where}/mock/kv/{key}") as response:
                if response.status == 200:
                    self.counts["fetched_kv"] += 1
                    return
        except aiohttp.ClientError:
            pass
        raise NodeFailedError("mock", f"can't fetch the KV of {key} from {where}", status=500)

    async def _give_kv(self, request: Request) -> Response:
        known = self._held.pop(request.path_params["id"], None)
        return JSONResponse({}, 404 if known is None else 200)

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _health(self, request: Request) -> Response:
        if self.knobs.hang_health:
            await asyncio.Event().wait()
        return Response()

    async def _bootstrap(self, request: Request) -> Response:
        """What a Mooncake bootstrap server answers."""
        return JSONResponse({"0": {"engine_id": f"engine-{self.address[1]}", "worker_addr": {}}})

    async def _status(self, request: Request) -> Response:
        if self.model is None or self.hide_model:
            return JSONResponse({"detail": "isochunk does not schedule on this server"}, 404)
        return JSONResponse(
            {
                "model": self.model.cost.as_dict(),
                "stages": self.model.stages,
                "max_num_batched_tokens": self.model.max_chunk,
                "block_size": self.model.block,
                "queue": {"running": self.active, "waiting": 0},
            }
        )

    async def _state(self, request: Request) -> Response:
        return JSONResponse(
            {
                **dict.fromkeys(("requests", "finished", "cancelled", "local_prefills", "fetched_kv"), 0),
                **self.counts,
                "active": self.active,
                "held_kv": len(self._held),
                "headers": self.headers,
                "body": {key: value for key, value in self.body.items() if key not in ("prompt", "messages")},
            }
        )

    async def _set_knobs(self, request: Request) -> Response:
        knobs = await request.json()
        known = [item.name for item in fields(Knobs)]
        if unknown := sorted(set(knobs) - set(known)):
            return JSONResponse({"error": f"unknown knobs {unknown}; known are {known}"}, 400)
        for name, value in knobs.items():
            setattr(self.knobs, name, value)
        return JSONResponse(vars(self.knobs))


def _prompt(request: dict[str, Any]) -> Any:
    return request["messages"] if "messages" in request else request.get("prompt", "")


def _tokens(request: dict[str, Any]) -> int:
    prompt = _prompt(request)
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return len(prompt)
    return max(len(json.dumps(prompt)) // 4, 1)


def _words(request: dict[str, Any]) -> list[str]:
    """The answer depends on the whole prompt, so that a mixed-up one is noticed."""
    count = int(request.get("max_completion_tokens") or request.get("max_tokens") or 16)
    digest = hashlib.sha256(json.dumps(_prompt(request)).encode()).hexdigest()[:8]
    return [f"{digest}-{index} " for index in range(count)]


def _answer(request: dict[str, Any], words: list[str]) -> dict[str, Any]:
    text = "".join(words)
    chat = "messages" in request
    choice: dict[str, Any] = {"index": 0, "finish_reason": None}
    if chat:
        choice["delta" if request.get("stream") else "message"] = {"role": "assistant", "content": text}
    else:
        choice["text"] = text
    return {"id": "mock", "object": "chat.completion" if chat else "text_completion", "choices": [choice]}


def main(arguments: list[str] | None = None) -> None:
    """Run one node until it is killed."""
    parser = argparse.ArgumentParser(prog="isochunk.proxy.mock", description=__doc__.splitlines()[0])
    parser.add_argument("role", choices=("prefill", "decode"))
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--coefficients", help="c0,c1,c2,c3 of P's cost model, in seconds")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--max-chunk", type=int, default=8192)
    parser.add_argument("--hide-model", action="store_true")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds of each prefill without --coefficients")
    parser.add_argument("--interval", type=float, default=0.0, help="seconds between two words of D")
    parser.add_argument("--filler", type=int, default=0, help="characters added to each word of D")
    given = parser.parse_args(arguments)
    model = None
    if given.coefficients:
        cost = CostModel(*map(float, given.coefficients.split(",")))
        model = NodeModel(cost=cost, stages=given.stages, max_chunk=given.max_chunk)
    node = MockNode(
        given.role,
        model=model,
        hide_model=given.hide_model,
        delay_s=given.delay,
        interval_s=given.interval,
        filler=given.filler,
    )
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind((given.host, given.port))
    listening.listen(2048)
    node.address = (given.host, listening.getsockname()[1])
    print(f"mock {given.role} node: listening on {node.address[0]}, port {node.address[1]}", flush=True)
    uvicorn.Server(uvicorn.Config(node.app, log_level="error", access_log=False)).run(sockets=[listening])


if __name__ == "__main__":
    main()
