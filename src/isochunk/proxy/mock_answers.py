"""What mock nodes read from a request and answer to it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

__all__ = ["Knobs", "answer", "prompt", "tokens", "words"]


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
    """

    hang: bool = False
    hang_health: bool = False
    status: int = 0
    die: str = ""
    stall_after: int = 0
    cut_after: int = 0
    empty: bool = False


def prompt(request: dict[str, Any]) -> Any:
    """The prompt, or the messages of a chat."""
    return request["messages"] if "messages" in request else request.get("prompt", "")


def tokens(request: dict[str, Any]) -> int:
    """Tokens of the prompt: exact for ids, a guess for text."""
    given = prompt(request)
    if isinstance(given, list) and given and isinstance(given[0], int):
        return len(given)
    return max(len(json.dumps(given)) // 4, 1)


def words(request: dict[str, Any]) -> list[str]:
    """The answer depends on the whole prompt, so that a mixed-up one is noticed."""
    count = int(request.get("max_completion_tokens") or request.get("max_tokens") or 16)
    digest = hashlib.sha256(json.dumps(prompt(request)).encode()).hexdigest()[:8]
    return [f"{digest}-{index} " for index in range(count)]


def answer(request: dict[str, Any], parts: list[str]) -> dict[str, Any]:
    """An answer, or an event of a streamed one."""
    text = "".join(parts)
    chat = "messages" in request
    choice: dict[str, Any] = {"index": 0, "finish_reason": None}
    if chat:
        choice["delta" if request.get("stream") else "message"] = {"role": "assistant", "content": text}
    else:
        choice["text"] = text
    return {"id": "mock", "object": "chat.completion" if chat else "text_completion", "choices": [choice]}
