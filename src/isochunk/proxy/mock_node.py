"""One P or D node that computes nothing; see `isochunk.proxy.mock`."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import fields
from typing import Any

import aiohttp
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from isochunk.proxy import mock_answers
from isochunk.proxy.errors import ClientGoneError, ProxyError
from isochunk.proxy.mock_client import Client
from isochunk.proxy.price import NodeModel

__all__ = ["MODEL", "MockNode"]

MODEL = "mock"
_ONE_NODE = ("/tokenize", "/v1/responses", "/v1/messages", "/v1/embeddings")
_MOST_HELD = 10_000  # a D that fetches nothing must not fill the memory
_JSON = [(b"content-type", b"application/json")]
_EVENTS = [(b"content-type", b"text/event-stream")]


class MockNode:
    """One node.

    Args:
        role: ``prefill`` or ``decode``.
        model: P's cost model.
        hide_model: take the model's time, but do not tell it.
        delay_s: seconds that each prefill takes, all at once, when there is no model.
        ignore_kv: D answers without fetching any KV.
        interval_s: seconds between two words of D.
        filler: characters added to each word of D.
        name: of the model that it serves.
        longest: tokens that its model takes, as it tells; 0 for not telling.
    """

    def __init__(
        self,
        role: str,
        *,
        model: NodeModel | None = None,
        hide_model: bool = False,
        delay_s: float = 0.0,
        ignore_kv: bool = False,
        interval_s: float = 0.0,
        filler: int = 0,
        name: str = MODEL,
        longest: int = 0,
    ) -> None:
        self.name = name
        self.role = role
        self.model = model
        self.hide_model = hide_model
        self.delay_s = delay_s
        self.ignore_kv = ignore_kv
        self.interval_s = interval_s
        self.filler = "." * filler
        self.longest = longest
        self.knobs = mock_answers.Knobs()
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
                *(Route(path, self._one_node, methods=["POST"]) for path in _ONE_NODE),
                Route("/v1/responses/{id}", self._kept),
                Route("/v1/responses/{id}/cancel", self._kept, methods=["POST"]),
                Route("/reset_prefix_cache", self._reset, methods=["POST"]),
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
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.headers = headers
        self.active += 1
        try:
            data = await client.read(1 << 30)
            await client.while_there(self._complete(client, headers, data))
            self.counts["finished"] += 1
        except ClientGoneError:
            self.counts["cancelled"] += 1
        except ProxyError as error:
            with suppress(ClientGoneError):
                await client.fail(error)
        finally:
            self.active -= 1

    async def _complete(self, client: Client, headers: dict[str, str], data: bytes) -> None:
        if self.knobs.hang:
            await asyncio.Event().wait()
        if self.knobs.die == "before":
            os._exit(1)
        if self.knobs.die_on and self.knobs.die_on.encode() in data:
            os._exit(1)
        await asyncio.sleep(self.knobs.slow_s)
        if self.knobs.status and random.random() < self.knobs.share:
            raise ProxyError(self.knobs.status, "mock_error", f"status {self.knobs.status} as ordered")
        try:
            self.body = request = json.loads(data)
        except ValueError as error:
            raise ProxyError(400, "invalid_request_error", f"not JSON: {error}") from error
        if request.get("model") != self.name:
            raise ProxyError(404, "not_found_error", f"The model {request.get('model')!r} does not exist.")
        if self.knobs.empty:
            await client.answer(200, _JSON, b"")
        elif self.role == "prefill" and (request.get("kv_transfer_params") or {}).get("do_remote_decode"):
            await self._prefill(client, headers, request)
        else:
            await self._decode(client, request)

    async def _prefill(self, client: Client, headers: dict[str, str], request: dict[str, Any]) -> None:
        tokens = mock_answers.tokens(request)
        self.counts["prefills"] += 1
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
        key = params.get("transfer_id") or headers.get("x-request-id", "")
        answer: dict[str, Any] = mock_answers.answer(request, ["one"])
        answer |= mock_answers.usage(request, 1, self.knobs.cached)
        if params.get("do_remote_decode"):
            self._held[key] = tokens
            if len(self._held) > _MOST_HELD:
                del self._held[next(iter(self._held))]
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
        if self.ignore_kv:
            self.counts["ignored_kv"] += 1
        elif params.get("do_remote_prefill"):
            await self._fetch_kv(params)
        else:
            self.counts["local_prefills"] += 1
        words = [word + self.filler for word in mock_answers.words(request)]
        gives_up = self._gives_up(request)
        if not mock_answers.is_true(request.get("stream")):
            await asyncio.sleep(self.interval_s * len(words))
            answer = mock_answers.answer(request, words)
            if gives_up:
                words = words[: self.knobs.recompute_after]
                answer = mock_answers.answer(request, words)
                answer["choices"][0]["stop_reason"] = "recomputed"
            answer |= mock_answers.usage(request, len(words), mock_answers.tokens(request) - 1)
            await client.answer(200, _JSON, json.dumps(answer).encode())
            return
        await client.start(200, _EVENTS)
        async for event in self._events(request, words):
            await client.send(event)
        await client.send(b"", last=True)

    def _gives_up(self, request: dict[str, Any]) -> bool:
        """Whether this request is given up; the rest of its answer, asked for anew, is not."""
        return self.knobs.recompute_after > 0 and mock_answers.continues(request) is None

    async def _events(self, request: dict[str, Any], words: list[str]) -> AsyncIterator[bytes]:
        gives_up = self._gives_up(request)
        for index, word in enumerate(words, 1):
            if self.knobs.error_event == index - 1:
                error = {"message": "as ordered", "type": "mock_error", "code": self.knobs.error_code}
                yield b"data: " + json.dumps({"error": error}).encode() + b"\n\ndata: [DONE]\n\n"
                return
            event = b"data: " + json.dumps(mock_answers.answer(request, [word])).encode() + b"\n\n"
            if self.knobs.half_event == index:
                yield event[: len(event) // 2]
                await asyncio.sleep(0.05)
                os._exit(1)
            yield event
            if self.knobs.die == "midstream":
                await asyncio.sleep(0.05)  # what has been written must leave before the process goes
                os._exit(1)
            if gives_up and index == self.knobs.recompute_after:
                yield b"data: " + json.dumps(mock_answers.stopped(request, "recomputed")).encode() + b"\n\n"
                yield b"data: [DONE]\n\n"
                return
            if index == self.knobs.stall_after:
                await asyncio.Event().wait()
            if index == self.knobs.cut_after:
                return
            if index < len(words):
                await asyncio.sleep(self.interval_s)
        if (request.get("stream_options") or {}).get("include_usage"):
            last = mock_answers.answer(request, [])
            last |= {"choices": []} | mock_answers.usage(request, len(words), mock_answers.tokens(request) - 1)
            yield b"data: " + json.dumps(last).encode() + b"\n\n"
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
        raise ProxyError(500, "mock_error", f"can't fetch the KV of {key} from {where}")

    async def _give_kv(self, request: Request) -> Response:
        known = self._held.pop(request.path_params["id"], None)
        return JSONResponse({}, 404 if known is None else 200)

    async def _models(self, request: Request) -> Response:
        told = {"id": self.name, "object": "model"} | ({"max_model_len": self.longest} if self.longest else {})
        return JSONResponse({"object": "list", "data": [told]})

    async def _one_node(self, request: Request) -> Response:
        """Says who answers; in a stream when that is asked for."""
        self.counts["requests"] += 1
        if self.knobs.status:
            return JSONResponse({"error": {"message": "as ordered"}}, self.knobs.status)
        body = await request.json()
        if body.get("previous_response_id", own := f"resp_{self.address[1]}") != own:
            return JSONResponse({"error": {"message": "not kept here"}}, 404)
        if not mock_answers.is_true(body.get("stream")):
            return JSONResponse({"role": self.role, "path": request.url.path, "body": body})
        names = ("response.created", "response.output_text.delta", "response.completed")
        events = "".join(f"event: {name}\ndata: {json.dumps({'type': name})}\n\n" for name in names)
        return Response(events, media_type="text/event-stream")

    async def _kept(self, request: Request) -> Response:
        """The one answer that it keeps is named after its port."""
        if self.knobs.status:
            return JSONResponse({"error": {"message": "as ordered"}}, self.knobs.status)
        if request.path_params["id"] != f"resp_{self.address[1]}":
            return JSONResponse({"error": {"message": "not kept here"}}, 404)
        return JSONResponse({"id": request.path_params["id"], "method": request.method})

    async def _reset(self, request: Request) -> Response:
        self.counts["resets"] += 1
        return Response()

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
                **dict.fromkeys(("requests", "finished", "cancelled", "prefills", "local_prefills", "fetched_kv"), 0),
                **self.counts,
                "active": self.active,
                "held_kv": len(self._held),
                "headers": self.headers,
                "body": {key: value for key, value in self.body.items() if key not in ("prompt", "messages")},
            }
        )

    async def _set_knobs(self, request: Request) -> Response:
        knobs = await request.json()
        known = [item.name for item in fields(mock_answers.Knobs)]
        if unknown := sorted(set(knobs) - set(known)):
            return JSONResponse({"error": f"unknown knobs {unknown}; known are {known}"}, 400)
        for name, value in knobs.items():
            setattr(self.knobs, name, value)
        return JSONResponse(vars(self.knobs))
