from typing import Any

import pytest

from isochunk.core.errors import ServerError
from isochunk.vllm.virtual.channel import Channel, tell


def test_what_is_told_is_answered_and_errors_come_back_as_text() -> None:
    def answer(data: dict[str, Any]) -> dict[str, Any]:
        if "wrong" in data:
            raise ValueError("that is wrong")
        return {"heard": data}

    channel = Channel("isochunk-test-channel", answer)
    try:
        assert tell("isochunk-test-channel", {"a": 1}) == {"heard": {"a": 1}}
        assert tell("isochunk-test-channel", {"wrong": 1}) == {"error": "that is wrong"}
        assert tell("isochunk-test-channel", {}) == {"heard": {}}
    finally:
        channel.close()
    with pytest.raises(ServerError, match="don't answer"):
        tell("isochunk-test-channel", {})
