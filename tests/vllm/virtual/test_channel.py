import secrets
from typing import Any

import pytest

from isochunk.core.errors import ServerError
from isochunk.vllm.virtual.channel import Channel, tell

NAME = f"isochunk-test-{secrets.token_hex(8)}"


def test_what_is_told_is_answered_and_errors_come_back_as_text() -> None:
    def answer(data: dict[str, Any]) -> dict[str, Any]:
        if "wrong" in data:
            raise ValueError("that is wrong")
        return {"heard": data}

    channel = Channel(NAME, answer)
    try:
        assert tell(NAME, {"a": 1}) == {"heard": {"a": 1}}
        assert tell(NAME, {"wrong": 1}) == {"error": "that is wrong"}
        assert tell(NAME, {}) == {"heard": {}}
    finally:
        channel.close()
    with pytest.raises(ServerError, match="don't answer"):
        tell(NAME, {})
