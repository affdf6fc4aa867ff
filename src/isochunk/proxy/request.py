"""A client's request, read and understood."""

from __future__ import annotations

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


async def read_request(client: Client, config: ProxyConfig, estimate: TokenEstimate) -> ProxyRequest:
    """Read a request.

    Raises:
        ProxyError: it can't be served.
    """
    chat = client.path.endswith("/chat/completions")
    body = await parse_body(await client.read())
    for name in ("n", "best_of"):
        if body.values.get(name) not in (None, 1):
            message = f"{name} = {body.values[name]!r}: KV is handed over for one answer; send several requests"
            raise ProxyError(400, "invalid_request_error", message)
    prompt = await read_prompt(body, chat=chat)
    return ProxyRequest(
        id=client.id,
        path=client.path,
        chat=chat,
        stream=body.values.get("stream") is True,
        headers=_passed(client.headers, config),
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
