"""A client's request, read and understood."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from isochunk.proxy.body import Body, parse_body
from isochunk.proxy.client import Client
from isochunk.proxy.config import ProxyConfig
from isochunk.proxy.errors import ProxyError
from isochunk.proxy.prompt import Prompt, TokenEstimate, read_prompt
from isochunk.proxy.upstream import end_to_end

__all__ = ["ProxyRequest", "read_request"]

_NOT_PASSED = frozenset({"host", "content-length", "content-type", "accept-encoding", "expect", "x-request-id"})
_LONGEST_ID = 64


@dataclass(frozen=True, slots=True)
class ProxyRequest:
    """A request that makes sense, and what the proxy knows of it."""

    id: str
    path: str
    chat: bool
    stream: bool
    headers: Mapping[str, str]
    body: Body
    prompt: Prompt
    tokens: int


async def read_request(
    client: Client, path: str, headers: list[tuple[str, str]], config: ProxyConfig, estimate: TokenEstimate
) -> ProxyRequest:
    """Read a request.

    Raises:
        ProxyError: 400 or 413, it can't be served.
        ClientGoneError: it did not come to its end.
    """
    chat = path.endswith("/chat/completions")
    body = await parse_body(await client.read(config.max_body))
    for name in ("n", "best_of"):
        if body.values.get(name) not in (None, 1):
            message = f"{name} = {body.values[name]!r}: KV is handed over for one answer; send several requests"
            raise ProxyError(400, "invalid_request_error", message)
    prompt = await read_prompt(body, chat=chat)
    given = dict(headers).get("x-request-id", "")[:_LONGEST_ID]
    return ProxyRequest(
        # Unique even when clients repeat theirs: the connectors match P's and D's requests by it.
        id=f"{given}-{uuid.uuid4().hex[:12]}" if given else uuid.uuid4().hex,
        path=path,
        chat=chat,
        stream=body.values.get("stream") is True,
        headers=_passed(headers, config),
        body=body,
        prompt=prompt,
        tokens=estimate.tokens(prompt),
    )


def _passed(headers: list[tuple[str, str]], config: ProxyConfig) -> dict[str, str]:
    """What the nodes get of the client's headers; a key that opens the proxy is not theirs to see."""
    passed = {name: value for name, value in end_to_end(headers) if name not in _NOT_PASSED}
    if config.api_key is not None:
        passed.pop("authorization", None)
    if config.node_key is not None:
        passed["authorization"] = f"Bearer {config.node_key}"
    passed["content-type"] = "application/json"
    return passed
