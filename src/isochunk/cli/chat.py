"""One question to a running server, answered as a stream."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
from httpx_sse import EventSource

__all__ = ["ask"]


def ask(
    url: str, model: str, question: str, *, salt: str | None = None, piece: Callable[[str], None] = lambda text: None
) -> str:
    """A chat, streamed; ``piece`` gets the answer as it comes."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 32,
        "temperature": 0,
        "stream": True,
    }
    if salt is not None:
        body["cache_salt"] = salt
    answer = ""
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=300, trust_env=False) as response:
        if response.status_code != 200:
            response.read()
        response.raise_for_status()
        for event in EventSource(response).iter_sse():
            if event.data == "[DONE]":
                continue
            text = json.loads(event.data)["choices"][0]["delta"].get("content") or ""
            answer += text
            piece(text)
    return answer
