"""What the proxy knows of a prompt: its length in tokens, and the prefixes it shares with others."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import Literal

from isochunk.proxy.body import SLICE, Body, Member
from isochunk.proxy.errors import ProxyError
from isochunk.proxy.prefix import PIECE, fingerprint

__all__ = ["Prompt", "TokenEstimate", "read_prompt"]

Kind = Literal["ids", "text", "messages"]

_OPEN = re.compile(rb"\[\s*+")
_ONE_STRING = re.compile(rb'\[\s*+"(?:[^"\\]++|\\.)*+"\s*+\]', re.DOTALL)
_CLOSE_TWO = re.compile(rb"\]\s*+\]$")
_TAIL = 256  # bytes in which an array of one array has its two closing brackets
_PIECES_A_TURN = 256


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's measures.

    Attributes:
        kind: token ids, plain text, or chat messages.
        size: bytes of its JSON.
        ids: exact tokens, when it came as token ids.
        prints: fingerprints of its prefixes, one every `PIECE` bytes.
    """

    kind: Kind
    size: int
    ids: int | None
    prints: tuple[int, ...]


class TokenEstimate:
    """Bytes a token, learnt from what the nodes count; the proxy never tokenises.

    One ratio a kind of prompt, the more recent the heavier.
    """

    _START_BYTES, _START_TOKENS = 4000.0, 1000.0
    _FADE = 0.98

    def __init__(self) -> None:
        self._sums: dict[Kind, tuple[float, float]] = {}

    def tokens(self, prompt: Prompt) -> int:
        """Tokens of the prompt, at least 1."""
        if prompt.ids is not None:
            return max(prompt.ids, 1)
        size, tokens = self._sums.get(prompt.kind, (self._START_BYTES, self._START_TOKENS))
        return max(round(prompt.size * tokens / size), 1)

    def learn(self, prompt: Prompt, tokens: int) -> None:
        """A node counted ``tokens`` in this prompt."""
        if prompt.ids is None and tokens > 0:
            size, total = self._sums.get(prompt.kind, (self._START_BYTES, self._START_TOKENS))
            self._sums[prompt.kind] = (size * self._FADE + prompt.size, total * self._FADE + tokens)


async def read_prompt(body: Body, *, chat: bool) -> Prompt:
    """Measure the prompt of a request.

    Raises:
        ProxyError: 400, there is none, or there are several: KV is handed over for one prompt a request.
    """
    name = "messages" if chat else "prompt"
    member = body.find(name)
    if member is None:
        raise ProxyError(400, "invalid_request_error", f"{name!r} is missing")
    kind: Kind = "messages" if chat else "text"
    ids = None
    if not chat and _OPEN.match(body.data, member.value, member.end):
        if _is_one(body.data, member):
            ids = await _count_ids(body.data, member)
            kind = "text" if ids is None else "ids"
        else:
            raise ProxyError(
                400, "invalid_request_error", "'prompt' holds several prompts; send one request for each of them"
            )
    prints = await _fingerprints(body, member)
    return Prompt(kind, member.end - member.value, ids, prints)


def _is_one(data: bytes | bytearray, member: Member) -> bool:
    """Whether an array is one prompt: token ids, one string, or one array of token ids."""
    opening = _OPEN.match(data, member.value, member.end)
    assert opening is not None
    first = data[opening.end() : opening.end() + 1]
    if first == b'"':
        only = _ONE_STRING.match(data, member.value, member.end)
        return only is not None and only.end() == member.end
    if first != b"[":
        return True
    inner_only = data.find(b"[", opening.end() + 1, member.end) < 0
    return inner_only and _CLOSE_TWO.search(data, max(member.end - _TAIL, member.value), member.end) is not None


async def _count_ids(data: bytes | bytearray, member: Member) -> int | None:
    if data.find(b'"', member.value, member.end) >= 0:
        return None
    commas = 0
    for at in range(member.value, member.end, SLICE * 4):
        commas += data.count(b",", at, min(at + SLICE * 4, member.end))
        if at > member.value:
            await asyncio.sleep(0)
    return commas + 1


async def _fingerprints(body: Body, member: Member) -> tuple[int, ...]:
    last = hash(str(body.values.get("model")))
    prints = []
    for index, at in enumerate(range(member.value, member.end - PIECE + 1, PIECE)):
        last = fingerprint(last, bytes(body.data[at : at + PIECE]))
        prints.append(last)
        if index % _PIECES_A_TURN == _PIECES_A_TURN - 1:
            await asyncio.sleep(0)
    return tuple(prints)
