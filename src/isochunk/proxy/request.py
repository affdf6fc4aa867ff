"""A client's request, read and understood."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from isochunk.proxy.body import Body, parse_body
from isochunk.proxy.checks import as_bool, check, check_length, wanted_tokens
from isochunk.proxy.client import Client
from isochunk.proxy.config import ProxyConfig
from isochunk.proxy.errors import ProxyError
from isochunk.proxy.prompt import Prompt, TokenEstimate, read_prompt
from isochunk.proxy.upstream import end_to_end

__all__ = ["ProxyRequest", "passed_headers", "read_request"]

_NOT_PASSED = frozenset(
    {"host", "content-length", "content-type", "accept-encoding", "expect", "x-request-id", "x-data-parallel-rank"}
)


@dataclass(frozen=True, slots=True)
class ProxyRequest:
    """A request that makes sense, and what the proxy knows of it.

    Attributes:
        whole: one node must answer all of it, since only who computes the prompt knows its log-probabilities.
        wanted: the most tokens its answer may have; None when it does not say.
    """

    id: str
    path: str
    chat: bool
    stream: bool
    whole: bool
    wanted: int | None
    headers: Mapping[str, str]
    body: Body
    prompt: Prompt
    tokens: int

    async def continued(self, text: str, tokens: int, estimate: TokenEstimate) -> ProxyRequest:
        """The request for the rest of an answer of which ``tokens`` are there, saying ``text``.

        Raises:
            ProxyError: it can't be continued.
        """
        extra = self._with_text(text)
        for name in ("max_tokens", "max_completion_tokens"):
            if self.body.values.get(name) is not None and self.wanted is not None:
                extra[name] = max(self.wanted - tokens, 1)
        fewest = self.body.values.get("min_tokens")
        if isinstance(fewest, int):
            extra["min_tokens"] = max(fewest - tokens, 0)
        body = await parse_body(b"".join(self.body.edited((), extra)))
        prompt = await read_prompt(body, chat=self.chat)
        wanted = None if self.wanted is None else max(self.wanted - tokens, 1)
        return replace(self, body=body, prompt=prompt, tokens=estimate.tokens(prompt), wanted=wanted)

    def _with_text(self, text: str) -> dict[str, Any]:
        member = self.body.find("messages" if self.chat else "prompt")
        assert member is not None
        before = json.loads(bytes(self.body.data[member.value : member.end]))
        if not self.chat:
            before = before[0] if isinstance(before, list) and len(before) == 1 else before
            if not isinstance(before, str):
                raise ProxyError(502, "upstream_error", "a decode node gave up a prompt of token ids in the middle")
            return {"prompt": before + text}
        begun = {"add_generation_prompt": False, "continue_final_message": True}
        if as_bool(self.body.values.get("continue_final_message")):
            last = {**before[-1], "content": f"{before[-1].get('content') or ''}{text}"}
            return {"messages": [*before[:-1], last], **begun}
        return {"messages": [*before, {"role": "assistant", "content": text}], **begun}


async def read_request(
    client: Client, config: ProxyConfig, estimate: TokenEstimate, longest: Mapping[str, int]
) -> ProxyRequest:
    """Read a request.

    Args:
        longest: tokens of prompt and answer together that each model takes.

    Raises:
        ProxyError: it can't be served.
    """
    chat = client.path.endswith("/chat/completions")
    body = await parse_body(await client.read())
    values = body.values
    check(values, chat=chat)
    prompt = await read_prompt(body, chat=chat)
    wanted = wanted_tokens(values, chat=chat)
    check_length(longest.get(str(values.get("model"))), prompt.ids, wanted)
    logprobs = values.get("logprobs") is not None
    return ProxyRequest(
        id=client.id,
        path=client.path,
        chat=chat,
        stream=as_bool(values.get("stream")) or False,
        whole=values.get("prompt_logprobs") is not None or bool(not chat and as_bool(values.get("echo")) and logprobs),
        wanted=wanted,
        headers=passed_headers(client, config),
        body=body,
        prompt=prompt,
        tokens=estimate.tokens(prompt),
    )


def passed_headers(client: Client, config: ProxyConfig) -> dict[str, str]:
    """What the nodes get of the client's headers; a key that opens the proxy is not theirs to see."""
    passed: dict[str, str] = {}
    for name, value in end_to_end(client.headers):
        if name not in _NOT_PASSED:
            passed[name] = f"{passed[name]}, {value}" if name in passed else value
    if config.api_key is not None:
        passed.pop("authorization", None)
    if config.node_key is not None:
        passed["authorization"] = f"Bearer {config.node_key}"
    passed["content-type"] = "application/json"
    return passed
