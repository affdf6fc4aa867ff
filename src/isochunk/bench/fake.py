"""A small real HTTP server that prefills nothing: it takes the time that a cost model predicts.

It speaks the part of vLLM's interface, and of isochunk's, that `isochunk.bench` uses, so that clients can
be tested without a model. Needs the extra ``isochunk[proxy]`` (starlette and uvicorn).
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
import zlib
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from isochunk.core.calibrator import Calibrator
from isochunk.core.cost import CostModel, features
from isochunk.core.flowshop import makespan
from isochunk.core.planner import POLICIES, Plan, Policy, plan

__all__ = ["FakePrefill", "serving"]

_SMALL = CostModel(2e-4, 2e-6, 1e-9, 1e-9)
_DONE = "data: [DONE]\n\n"
_WORDS = re.compile(r"\s*\w{1,6}|\s*[^\w\s]|\s+")


class FakePrefill:
    """The server's state and its ASGI app.

    Args:
        model: seconds of a step that it plans with; the default prefills 1,000 tokens in about 4 ms.
        truth: seconds of a step that it takes; None for those of ``model``.
        need_timing: learn from the steps taken, as the plugin does.
        stages: pipeline stages.
        largest: ``max_num_batched_tokens``.
        max_model_len: longest prompt and answer.
        block: KV block size, also of the prefix cache.
        api_key: required as a bearer token when given.
        isochunk: False for a server without isochunk: its routes are missing.
    """

    def __init__(
        self,
        *,
        model: CostModel = _SMALL,
        truth: CostModel | None = None,
        need_timing: bool = True,
        stages: int = 2,
        largest: int = 8192,
        max_model_len: int = 65_536,
        block: int = 16,
        api_key: str | None = None,
        isochunk: bool = True,
    ) -> None:
        self.model = model
        self.truth = truth or model
        self.need_timing = need_timing
        self.source = "stored"
        self.stages = stages
        self.largest = largest
        self.max_model_len = max_model_len
        self.block = block
        self.api_key = api_key
        self.policy: Policy = "optimal"
        self.chunk: int | None = None
        self.running = 0
        self.waiting = 0
        self.steps = 0
        self.refits = 0
        self.prompts: deque[dict[str, Any]] = deque(maxlen=32)
        self.received: list[list[int]] = []
        self._calibrator = Calibrator(model)
        self._cached_blocks: set[int] = set()
        routes = [
            Route("/v1/models", self._models),
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/tokenize", self._tokenize, methods=["POST"]),
        ]
        if isochunk:
            routes += [
                Route("/isochunk/status", self._status),
                Route("/isochunk/policy", self._use, methods=["POST"]),
            ]
        self.app = Starlette(routes=routes, middleware=[Middleware(BaseHTTPMiddleware, dispatch=self._guard)])
        self._engine = asyncio.Lock()

    async def _guard(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        return await call_next(request)

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "fake", "max_model_len": self.max_model_len}]})

    async def _tokenize(self, request: Request) -> Response:
        text = (await request.json())["prompt"]
        tokens = [zlib.crc32(piece.encode()) % 50_000 for piece in _WORDS.findall(text)]
        return JSONResponse({"count": len(tokens), "max_model_len": self.max_model_len, "tokens": tokens})

    async def _status(self, request: Request) -> Response:
        counters = {"steps": self.steps, "planned": self.steps, "fallbacks": 0, "harmful": 0, "alarms": 0}
        return JSONResponse(
            {
                "version": "0",
                "policy": self.policy,
                "chunk": self.chunk,
                "stages": self.stages,
                "max_num_batched_tokens": self.largest,
                "block_size": self.block,
                "alignment": self.block,
                "model": self.model.as_dict(),
                "source": self.source,
                "need_timing": self.need_timing,
                "profile": None,
                "probe": None,
                "counters": counters | {"refits": self.refits},
                "queue": {"running": self.running, "waiting": self.waiting},
                "prompts": list(self.prompts),
            }
        )

    async def _use(self, request: Request) -> Response:
        body = await request.json()
        policy, chunk = body.get("policy"), body.get("chunk")
        if policy not in POLICIES or not (chunk is None or 1 <= chunk <= self.largest):
            return JSONResponse({"error": f"policy = {policy!r}, chunk = {chunk!r} out of range"}, 400)
        self.policy, self.chunk = policy, chunk
        return JSONResponse({"policy": policy, "chunk": chunk})

    async def _completions(self, request: Request) -> Response:
        body = await request.json()
        prompt, output = body["prompt"], body["max_tokens"]
        if len(prompt) + output > self.max_model_len:
            message = f"This model's maximum context length is {self.max_model_len} tokens"
            return JSONResponse({"error": {"message": message, "code": 400}}, 400)
        self.received.append(prompt)
        events = self._answer(prompt, output, request.headers.get("X-Request-Id", "none"))
        if body.get("stream"):
            return StreamingResponse(events, media_type="text/event-stream")
        first, *_, usage = [json.loads(event.removeprefix("data: ")) async for event in events if event != _DONE]
        return JSONResponse(first | {"usage": usage["usage"]})

    async def _answer(self, prompt: list[int], output: int, request_id: str) -> AsyncIterator[str]:
        self.waiting += 1
        alone = self.running + self.waiting == 1
        async with self._engine:
            self.waiting -= 1
            self.running += 1
            try:
                cached = self._cached(prompt)
                await self._prefill(len(prompt), cached, f"cmpl-{request_id}-0", alone)
                for _ in range(output):
                    yield _event({"choices": [{"index": 0, "text": ""}]})
                    await asyncio.sleep(self.model.c0)
            finally:
                self.running -= 1
        usage = {"prompt_tokens": len(prompt), "completion_tokens": output, "total_tokens": len(prompt) + output}
        yield _event({"choices": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": cached}}})
        yield _DONE

    def _cached(self, prompt: list[int]) -> int:
        """Tokens of the prefix hit; the prompt's blocks are in the cache afterwards."""
        prefixes = [0]
        for end in range(self.block, len(prompt), self.block):
            prefixes.append(hash((prefixes[-1], *prompt[end - self.block : end])))
        del prefixes[0]
        hit = next((i for i, prefix in enumerate(prefixes) if prefix not in self._cached_blocks), len(prefixes))
        self._cached_blocks.update(prefixes)
        return hit * self.block

    async def _prefill(self, tokens: int, cached: int, request_id: str, alone: bool) -> None:
        chosen = plan(
            self.model,
            tokens,
            self.stages,
            cached=cached,
            max_chunk=self.chunk or self.largest,
            block=self.block,
            policy=self.policy,
        )
        entered = time.monotonic()
        await asyncio.sleep(makespan(self._seconds(chosen, cached), self.stages))
        self.steps += len(chosen.chunks)
        self.prompts.append(self._record(chosen, tokens, cached, entered) | {"request_id": request_id, "alone": alone})
        if self.need_timing:
            self._learn(chosen, cached)

    def _seconds(self, chosen: Plan, cached: int) -> list[float]:
        """What each step takes."""
        return [self.truth.seconds(*step) for step in zip(chosen.chunks, _histories(chosen, cached), strict=True)]

    def _learn(self, chosen: Plan, cached: int) -> None:
        steps = zip(chosen.chunks, _histories(chosen, cached), self._seconds(chosen, cached), strict=True)
        for chunk, history, seconds in steps:
            self._calibrator.add(features([chunk], [history], self._calibrator.model), seconds, len(self.prompts))
        refit = self._calibrator.refit()
        if refit is not None:
            self.model, self.source = refit.model, "traffic"
            self.refits += 1

    def _record(self, chosen: Plan, tokens: int, cached: int, entered: float) -> dict[str, Any]:
        """The prompt as `isochunk`'s status reports it, with ``stages`` steps in flight at a time."""
        seconds, entries = self._seconds(chosen, cached), [entered]
        exits: list[float] = []
        left = [entered] * self.stages
        for index, step in enumerate(seconds):
            if index:
                entries.append(exits[index - self.stages] if index >= self.stages else entered)
            ready = entries[-1]
            for stage in range(self.stages):
                ready = max(ready, left[stage]) + step
                left[stage] = ready
            exits.append(ready)
        return {
            "policy": chosen.policy,
            "chunk": self.chunk,
            "tokens": tokens,
            "cached": cached,
            "chunks": list(chosen.chunks),
            "histories": _histories(chosen, cached),
            "predicted_s": list(chosen.step_seconds),
            "measured_s": seconds,
            "predicted_ttft_s": chosen.ttft_s,
            "measured_ttft_s": makespan(seconds, self.stages),
            "entered_s": entries,
            "exited_s": exits,
        }


@contextmanager
def serving(fake: FakePrefill) -> Iterator[str]:
    """Run the server in a thread on a free port of this machine; gives its URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(fake.app, log_level="warning", lifespan="off", ws="none"))
    # The socket listens already, so a client that comes before the loop runs waits in its queue.
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def _histories(chosen: Plan, cached: int) -> list[int]:
    return [cached + done for done in accumulate(chosen.chunks[:-1], initial=0)]


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"
