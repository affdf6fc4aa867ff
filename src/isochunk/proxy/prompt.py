"""What the proxy knows of a prompt: its length in tokens, and the prefixes it shares with others."""

from __future__ import annotations

import asyncio
import math
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
_SCAN = 1 << 20
# Members that stand in the prompt beside the messages, and those that only change how it is made.
_SCHEMAS = frozenset({"response_format", "structured_outputs", "guided_json"})  # in the prompt of some models
_COUNTED = frozenset({"tools", "functions", "documents"}) | _SCHEMAS
_BESIDE = (
    "model", "cache_salt", "tools", "functions", "documents", "response_format", "structured_outputs", "guided_json",
    "chat_template", "chat_template_kwargs", "reasoning_effort", "mm_processor_kwargs", "add_special_tokens",
    "truncate_prompt_tokens",
)  # fmt: skip
_MEDIA = {b'"image_url"': 1024, b'"input_image"': 1024, b'"input_audio"': 1500, b'"audio_url"': 1500,
          b'"video_url"': 8192}  # fmt: skip
_INLINE = re.compile(rb'"data(?::|"\s*+:\s*+")[^"]*+"')


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's measures.

    Attributes:
        kind: token ids, plain text, or chat messages.
        size: bytes of its JSON.
        ids: exact tokens, when it came as token ids.
        prints: fingerprints of its prefixes, one every `PIECE` bytes.
        media: tokens of its images and the like, a constant for each: their bytes say nothing.
        plain: it is text and nothing else, so that its length can be learnt from.
    """

    kind: Kind
    size: int
    ids: int | None
    prints: tuple[int, ...]
    media: int = 0
    plain: bool = True


class TokenEstimate:
    """Bytes a token, learnt from what the nodes count; the proxy never tokenises.

    One ratio a kind of prompt. Each prompt moves it a small part of the way, however far off it is.
    """

    _START = math.log(4.0)
    _STEP, _FIRST_STEP = 0.05, 0.2
    _FARTHEST = 0.3  # of a logarithm, that one prompt may pull
    _LEAST_BYTES = 256  # the frame of a shorter prompt is more than its text

    def __init__(self) -> None:
        self._ratios: dict[Kind, tuple[float, int]] = {}

    def tokens(self, prompt: Prompt) -> int:
        """Tokens of the prompt, at least 1."""
        if prompt.ids is not None:
            return max(prompt.ids, 1)
        ratio, _ = self._ratios.get(prompt.kind, (self._START, 0))
        return max(round(prompt.size / math.exp(ratio)) + prompt.media, 1)

    def learn(self, prompt: Prompt, tokens: int) -> None:
        """A node counted ``tokens`` in this prompt."""
        if prompt.ids is not None or not prompt.plain or tokens < 1 or prompt.size < self._LEAST_BYTES:
            return
        ratio, seen = self._ratios.get(prompt.kind, (self._START, 0))
        off = math.log(prompt.size / tokens) - ratio
        step = max(self._STEP, self._FIRST_STEP / (1 + seen / 4))
        ratio += step * min(max(off, -self._FARTHEST), self._FARTHEST)
        self._ratios[prompt.kind] = (ratio, seen + 1)


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
    beside = [found for key in _BESIDE if (found := body.find(key)) is not None]
    size = sum(one.end - one.value for one in (member, *(m for m in beside if m.key in _COUNTED)))
    media, media_bytes = await _media(body.data, member) if chat else (0, 0)
    prints = await _fingerprints(body, member, beside, chat)
    plain = not media and not any(one.key in _COUNTED for one in beside)
    return Prompt(kind, max(size - media_bytes, 1), ids, prints, media, plain)


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


async def _media(data: bytes | bytearray, member: Member) -> tuple[int, int]:
    """Tokens that images and the like are taken for, and the bytes in which they lie in the request."""
    tokens = hidden = 0
    for at in range(member.value, member.end, _SCAN):
        for mark, each in _MEDIA.items():
            # Twice a part: as its type and as its key. A mark inside a string would have its quotes escaped.
            count = data.count(mark, at, min(at + _SCAN + len(mark) - 1, member.end))
            tokens += each * ((count + 1) // 2)
        await asyncio.sleep(0)
    at = member.value if tokens else member.end
    while (at := data.find(b'"data', at, member.end)) >= 0:
        found = _INLINE.match(data, at, member.end) if data[at - 1 : at] != b"\\" else None
        hidden += found.end() - at if found else 0
        at = found.end() if found else at + 1
        await asyncio.sleep(0)
    return tokens, hidden


async def _fingerprints(body: Body, member: Member, beside: list[Member], chat: bool) -> tuple[int, ...]:
    """What vLLM keys its blocks by stands before the first: another model, LoRA, salt or tools share nothing."""
    last = hash((chat, *((m.key, bytes(body.data[m.value : m.end])) for m in beside if m.key not in _SCHEMAS)))
    prints = []
    for index, at in enumerate(range(member.value, member.end - PIECE + 1, PIECE)):
        last = fingerprint(last, bytes(body.data[at : at + PIECE]))
        prints.append(last)
        if index % _PIECES_A_TURN == _PIECES_A_TURN - 1:
            await asyncio.sleep(0)
    return tuple(prints)
