"""What mock nodes read from a request and answer to it."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

__all__ = ["Knobs", "answer", "continues", "is_true", "prompt", "stopped", "tokens", "usage", "words"]

_BEGUN = re.compile(r'([0-9a-f]{8})-(\d+) ["}\]]*$')


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
        die_on: end the process on a request that holds this text.
        error_event: words of a stream before an event that is an error of status ``error_code``; -1 for none.
        error_code: see ``error_event``.
        half_event: break off in the middle of this word's event; 0 for never.
        recompute_after: give each request up after so many words, once; 0 for never.
        cached: prefix hit that P tells; -1 for none.
        slow_s: seconds before anything is answered.
        share: of the requests, the part that ``status`` is for.
    """

    hang: bool = False
    hang_health: bool = False
    status: int = 0
    die: str = ""
    stall_after: int = 0
    cut_after: int = 0
    empty: bool = False
    die_on: str = ""
    error_event: int = -1
    error_code: int = 500
    half_event: int = 0
    recompute_after: int = 0
    cached: int = -1
    slow_s: float = 0.0
    share: float = 1.0


def prompt(request: dict[str, Any]) -> Any:
    """The prompt, or the messages of a chat."""
    return request["messages"] if "messages" in request else request.get("prompt", "")


def is_true(value: Any) -> bool:
    """Whether a field is true, as vLLM reads it."""
    return value == 1 or str(value).lower() == "true"


def tokens(request: dict[str, Any]) -> int:
    """Tokens of the prompt: exact for ids, a guess for text."""
    given = prompt(request)
    if isinstance(given, list) and given and isinstance(given[0], int):
        return len(given)
    return max(len(json.dumps(given)) // 4, 1)


def continues(request: dict[str, Any]) -> tuple[str, int] | None:
    """The answer that a prompt breaks off in: its digest, and how many words of it are there."""
    found = _BEGUN.search(json.dumps(prompt(request)))
    return (found[1], int(found[2]) + 1) if found else None


def words(request: dict[str, Any]) -> list[str]:
    """The answer depends on the whole prompt, so that a mixed-up one is noticed."""
    count = int(request.get("max_completion_tokens") or request.get("max_tokens") or 16)
    digest = hashlib.sha256(json.dumps(prompt(request)).encode()).hexdigest()[:8]
    digest, start = continues(request) or (digest, 0)
    return [f"{digest}-{index} " for index in range(start, start + count)]


def answer(request: dict[str, Any], parts: list[str]) -> dict[str, Any]:
    """An answer, or an event of a streamed one."""
    text = "".join(parts)
    if request.get("echo") and "prompt" in request:
        text = str(request["prompt"]) + text
    chat = "messages" in request
    choice: dict[str, Any] = {"index": 0, "finish_reason": None}
    if chat:
        choice["delta" if is_true(request.get("stream")) else "message"] = {"role": "assistant", "content": text}
    else:
        choice["text"] = text
    if request.get("prompt_logprobs") is not None:
        choice["prompt_logprobs"] = [None]
    return {"id": "mock", "object": "chat.completion" if chat else "text_completion", "choices": [choice]}


def stopped(request: dict[str, Any], reason: str) -> dict[str, Any]:
    """An answer, or an event, that ends for a reason of the node's own."""
    value = answer(request, [])
    value["choices"][0] |= {"stop_reason": reason, "finish_reason": "stop"}
    return value


def usage(request: dict[str, Any], completion: int, cached: int) -> dict[str, Any]:
    """Token counts; ``cached`` of -1 is not told."""
    count = tokens(request)
    told: dict[str, Any] = {"prompt_tokens": count, "completion_tokens": completion, "total_tokens": count + completion}
    if cached >= 0:
        told["prompt_tokens_details"] = {"cached_tokens": cached}
    return {"usage": told}
