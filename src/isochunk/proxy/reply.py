"""A node's answer on its way to the client."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import aiohttp

from isochunk.proxy.client import Client
from isochunk.proxy.errors import NodeFailedError, RecomputedError, StreamError
from isochunk.proxy.events import Cutter, Transcript, data_of, encoded, error_of, payload, split
from isochunk.proxy.exchange import passed, said_error, whole
from isochunk.proxy.nodes import Node
from isochunk.proxy.request import ProxyRequest

__all__ = ["Reply"]

_DONE = b"data: [DONE]"
# What makes an event worth a look; inside a string of the answer the quotes would be escaped.
_NOTABLE = re.compile(rb'"error"|"recomputed"|"usage"\s*:\s*\{|"object"\s*:\s*"error"')


class Reply:
    """Hands the answer on, of one node after the other when they give up in the middle.

    Args:
        silence_s: seconds between two pieces of a stream.

    Attributes:
        client: whom it is for.
        tokens: of the answer, as far as events tell them.
        cached: prefix hit of P, when it said so: D's own count holds all that P computed.
        begun: the node at work has had something of its answer passed on.
    """

    def __init__(self, request: ProxyRequest, client: Client, silence_s: float) -> None:
        self._request = request
        self.client = client
        self.tokens = 0
        self._silence_s = silence_s
        self._clock = asyncio.get_running_loop().time
        self._transcript = Transcript()
        self._earlier = 0  # tokens of nodes that gave up
        self._prompt_tokens: int | None = None
        self.cached: int | None = None
        self.begun = False

    def said(self) -> tuple[str, int]:
        """Text and tokens of the answer so far.

        Raises:
            NodeFailedError: they can't be told apart from the rest of it.
        """
        text = self._transcript.text()
        if not self._transcript.whole:
            raise NodeFailedError("", "decode", "gave the request up, and the answer can't be continued")
        self._earlier = self._transcript.tokens
        return text, self._earlier

    async def take(
        self, node: Node, response: aiohttp.ClientResponse, patience: asyncio.Timeout, began: Callable[[], None]
    ) -> None:
        """Hand on a node's answer; ``began`` is called when its first part is good.

        Raises:
            NodeFailedError: it is at fault.
            RecomputedError: it gave up, and `said` tells what must come before the rest.
        """
        self.begun = False
        if self._request.stream:
            await self._stream(node, response, patience, began)
        else:
            await self._whole(node, response, patience, began)

    async def _whole(
        self, node: Node, response: aiohttp.ClientResponse, patience: asyncio.Timeout, began: Callable[[], None]
    ) -> None:
        data, answer = await whole(node, response)
        patience.reschedule(None)
        began()
        choices = answer.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
        if choice.get("stop_reason") == "recomputed":
            self._transcript.add_choice(choice)
            usage = answer.get("usage") or {}
            self._transcript.tokens += int(usage.get("completion_tokens") or 0)
            self._note_prompt(usage)
            raise RecomputedError
        changed = self._earlier > 0
        if changed:
            text = self._transcript.text()
            holder, name = (choice["message"], "content") if "message" in choice else (choice, "text")
            holder[name] = text + str(holder.get(name) or "")
        usage = answer.get("usage")
        if isinstance(usage, dict):
            changed |= self._set_usage(usage)
            self.tokens = int(usage.get("completion_tokens") or 0)
        self.begun = True
        data = json.dumps(answer, ensure_ascii=False).encode() if changed else data
        await self.client.answer(response.status, passed(response), data)

    async def _stream(
        self, node: Node, response: aiohttp.ClientResponse, patience: asyncio.Timeout, began: Callable[[], None]
    ) -> None:
        cutter, content, client = Cutter(), response.content, self.client
        done = False
        while piece := await content.readany():
            try:
                events = cutter.feed(piece)
            except StreamError as error:
                raise NodeFailedError(node.name, node.role, str(error)) from None
            if not events:
                continue
            if not self.begun and not any(map(data_of, split(events))):
                continue  # comments prove nothing
            end: Exception | None = None
            if not self.begun or _NOTABLE.search(events):
                events, end = self._look(node, events)
            if events:
                if not self.begun:
                    began()
                    self.begun = True
                if not client.started:
                    client.start(response.status, passed(response))
                done = events.rstrip().endswith(_DONE)
                patience.reschedule(None)  # the client's slowness is not the node's
                self._transcript.add(events)
                self.tokens += events.count(b"\n\n")
                await client.send(events)
                patience.reschedule(self._clock() + self._silence_s)
            if end is not None:
                raise end
        if not self.begun:
            raise NodeFailedError(node.name, node.role, "ended its stream before the first event")
        if not done:
            raise NodeFailedError(node.name, node.role, "ended its stream without an end mark")
        await client.send(b"", last=True)

    def _look(self, node: Node, events: bytes) -> tuple[bytes, Exception | None]:
        """The events as the client should get them, up to one that is an error or gives the request up."""
        out: list[bytes] = []
        for event in split(events):
            value = payload(event)
            if error := error_of(value):
                return b"".join(out), said_error(node, error)
            if value is None:
                out.append(event)
                continue
            choices = value.get("choices") or []
            if choices and choices[0].get("stop_reason") == "recomputed":
                self._note_prompt(value.get("usage") or {})
                said = choices[0].get("delta") or choices[0]
                if said.get("content") or said.get("text"):
                    choices[0] |= {"stop_reason": None, "finish_reason": None}
                    out.append(encoded(value))
                return b"".join(out), RecomputedError()
            usage = value.get("usage")
            changed = isinstance(usage, dict) and self._set_usage(usage)
            out.append(encoded(value) if changed else event)
        return b"".join(out), None

    def _note_prompt(self, usage: dict[str, Any]) -> None:
        if self._prompt_tokens is None and isinstance(usage.get("prompt_tokens"), int):
            self._prompt_tokens = usage["prompt_tokens"]

    def _set_usage(self, usage: dict[str, Any]) -> bool:
        """Make a count true: D takes for cached what P computed, and what an earlier node said for prompt."""
        before = json.dumps(usage)
        if self.cached is not None:
            usage["prompt_tokens_details"] = {
                **(usage.get("prompt_tokens_details") or {}),
                "cached_tokens": self.cached,
            }
        if self._earlier:
            usage["completion_tokens"] = int(usage.get("completion_tokens") or 0) + self._earlier
            if self._prompt_tokens is not None:
                usage["prompt_tokens"] = self._prompt_tokens
            elif isinstance(usage.get("prompt_tokens"), int):
                usage["prompt_tokens"] -= self._earlier
            usage["total_tokens"] = int(usage.get("prompt_tokens") or 0) + usage["completion_tokens"]
        return json.dumps(usage) != before
