"""An HTTP client of one running server: timed completions, and isochunk's status and policy switch."""

from __future__ import annotations

import json
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from isochunk.bench import trouble
from isochunk.core.errors import BrokenAnswerError, ServerError

if TYPE_CHECKING:
    import httpx

__all__ = ["Answer", "Server", "Status"]

Status = dict[str, Any]

_CONNECT_SECONDS = 10.0
_NO_ROUTE = (404, 405, 501)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One streamed completion.

    Attributes:
        request_id: the ``X-Request-Id`` it was sent with.
        sent_s: `time.perf_counter` when it was sent.
        ttft_s: seconds from sending to the first data chunk.
        gaps_s: seconds between one data chunk and the next.
        prompt_tokens: tokens the server counted in the prompt; None when it did not say.
        cached_tokens: tokens of a prefix hit; None when the server does not report them.
        output_tokens: tokens the server counted in the answer.
        text: the answer; may be empty, and still counts.
    """

    request_id: str
    sent_s: float
    ttft_s: float
    gaps_s: tuple[float, ...]
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int
    text: str

    @property
    def seconds(self) -> float:
        """From sending to the last token."""
        return self.ttft_s + sum(self.gaps_s)


class Server:
    """A connection to a server; use it with ``async with``.

    Args:
        url: where it listens, with or without ``/v1``.
        api_key: sent as a bearer token.
        timeout: seconds without a byte after which a request is given up.

    Every method raises `ServerError` when the server can't be reached or refuses.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout: float = 900.0) -> None:
        httpx = trouble.need_httpx()
        self._notes: Counter[str] = Counter()
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            # A proxy named in the environment would be measured with the server, so none is used.
            self._http = httpx.AsyncClient(
                base_url=self.url,
                headers=headers,
                timeout=httpx.Timeout(timeout, connect=_CONNECT_SECONDS),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
                trust_env=False,
            )
        except httpx.InvalidURL as error:
            raise trouble.no_url(url, error) from error
        self._model: dict[str, Any] | None = None

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.__aexit__(kind, error, trace)

    def note(self, text: str) -> None:
        """Remember something about this server that whoever reads the results should know."""
        self._notes[text] += 1

    @property
    def notes(self) -> list[str]:
        """What was noted, each once, with how often where that was more than once."""
        return [text if count == 1 else f"{count} x {text}" for text, count in self._notes.items()]

    async def status(self, request_id: str | None = None) -> Status:
        """What isochunk says about itself on this server, with the id of the prompt that was sent with this one."""
        return await self._json("GET", "/isochunk/status" + (f"?request_id={request_id}" if request_id else ""))

    async def use(self, policy: str, chunk: int | None = None) -> None:
        """Switch the policy at run time; ``chunk`` None means the server's ``max_num_batched_tokens``."""
        await self._json("POST", "/isochunk/policy", {"policy": policy, "chunk": chunk})

    async def model(self) -> str:
        """Name of the model the server serves."""
        return str((await self._card())["id"])

    async def max_model_len(self) -> int | None:
        """Most tokens of a prompt and its answer; None when the server does not say."""
        limit = (await self._card()).get("max_model_len")
        return None if limit is None else int(limit)

    async def tokenize(self, text: str) -> list[int] | None:
        """Token ids of a text, with the special tokens that the model puts before a prompt.

        None where there is no such route, as on most proxies.
        """
        response = await self._answer("POST", "/tokenize", {"model": await self.model(), "prompt": text})
        if response.status_code in _NO_ROUTE:
            return None
        return [int(token) for token in self._read(response, "/tokenize")["tokens"]]

    async def complete(self, prompt: Sequence[int], *, output_tokens: int = 1) -> Answer:
        """Send a prompt of token ids, stream exactly ``output_tokens`` tokens back, and time them."""
        return await self.send(await self.body(prompt, output_tokens))

    async def body(self, prompt: Sequence[int], output_tokens: int) -> bytes:
        """The request of `complete`, ready to send: writing out a long list of ids takes milliseconds."""
        body = {
            "model": await self.model(),
            "prompt": list(prompt),
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return json.dumps(body).encode()

    async def send(self, body: bytes) -> Answer:
        """Send a request made by `body` and time its answer."""
        request_id = uuid.uuid4().hex
        headers = {"X-Request-Id": request_id, "Content-Type": "application/json"}
        arrivals: list[float] = []
        text: list[str] = []
        usage: dict[str, Any] = {}
        sent = time.perf_counter()
        async with self._stream("/v1/completions", body, headers) as events:
            async for event in events:
                if event.get("choices"):
                    arrivals.append(time.perf_counter())
                    text.append(event["choices"][0].get("text") or "")
                usage = event.get("usage") or usage
        if not arrivals:
            raise BrokenAnswerError(f"{self.url} ended a completion without a token; look at the server's log")
        details = usage.get("prompt_tokens_details") or {}
        return Answer(
            request_id=request_id,
            sent_s=sent,
            ttft_s=arrivals[0] - sent,
            gaps_s=tuple(b - a for a, b in pairwise(arrivals)),
            prompt_tokens=usage.get("prompt_tokens"),
            cached_tokens=details.get("cached_tokens"),
            output_tokens=usage.get("completion_tokens") or len(arrivals),
            text="".join(text),
        )

    async def _card(self) -> dict[str, Any]:
        if self._model is None:
            models = (await self._json("GET", "/v1/models")).get("data")
            if not models:
                raise ServerError(f"{self.url}/v1/models names no model; is this an OpenAI-compatible server?")
            self._model = dict(models[0])
        return self._model

    async def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._read(await self._answer(method, path, body), path)

    async def _answer(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
        library = trouble.need_httpx()
        try:
            response: httpx.Response = await self._http.request(method, path, json=body)
        except library.HTTPError as error:
            raise trouble.unreachable(self.url, error) from error
        return response

    def _read(self, response: httpx.Response, path: str) -> dict[str, Any]:
        if response.is_error:
            raise trouble.refusal(self.url, path, response)
        try:
            told = response.json()
        except ValueError:
            told = None
        if not isinstance(told, dict):
            raise ServerError(f"{self.url}{path} answered with something that is not a JSON object")
        return told

    @asynccontextmanager
    async def _stream(
        self, path: str, content: bytes, headers: dict[str, str]
    ) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        httpx = trouble.need_httpx()
        try:
            async with self._http.stream("POST", path, content=content, headers=headers) as response:
                if response.is_error:
                    await response.aread()
                    raise trouble.refusal(self.url, path, response)
                yield self._events(response)
        except httpx.HTTPError as error:
            raise trouble.unreachable(self.url, error) from error

    async def _events(self, response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
        # httpx's own lines end at U+2028 and U+0085 too, which a model may write inside an event.
        from httpx_sse import EventSource, SSEError

        try:
            async for sent in EventSource(response).aiter_sse():
                if sent.data != "[DONE]":
                    yield self._event(sent.data)
        except SSEError as error:
            raise ServerError(f"{self.url} did not stream its answer ({error}); is this vLLM's server?") from error

    def _event(self, data: str) -> dict[str, Any]:
        try:
            event = json.loads(data)
        except ValueError as error:
            raise BrokenAnswerError(f"{self.url} sent an event that is no JSON ({error}): {data[:200]!r}") from error
        if not isinstance(event, dict):
            raise BrokenAnswerError(f"{self.url} sent an event that is no JSON object: {data[:200]!r}")
        if event.get("error"):
            raise BrokenAnswerError(f"{self.url} failed in the middle of an answer: {trouble.message(event)}")
        return event
