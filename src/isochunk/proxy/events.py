"""Server-sent events of an answer: cut out whole, looked at, changed where they must be."""

from __future__ import annotations

import json
from typing import Any

from isochunk.proxy.errors import StreamError

__all__ = ["Cutter", "Transcript", "data_of", "encoded", "error_of", "payload", "split"]

_LONGEST = 4 << 20  # bytes of one event
_RAW = 64 << 10  # bytes of events kept as they came
_TEXT = 4 << 20  # characters of an answer that can still be continued elsewhere


class Cutter:
    """Whole events out of pieces that end anywhere: what breaks off in the middle of one is never passed on."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> bytes:
        """The events that are complete with this piece, as they came.

        Raises:
            StreamError: an event has no end.
        """
        data = self._rest + piece if self._rest else piece
        if data.endswith(b"\n\n"):
            self._rest = b""
            return data
        end = max((data.rfind(mark) + len(mark) for mark in (b"\n\n", b"\r\n\r\n") if mark in data), default=0)
        self._rest = data[end:]
        if len(self._rest) > _LONGEST:
            raise StreamError("sent an event without an end")
        return data[:end]

    @property
    def rest(self) -> bytes:
        """The beginning of an event that is not complete."""
        return self._rest


def split(events: bytes) -> list[bytes]:
    """Single events of several whole ones, each with its end."""
    if b"\r" in events:
        events = events.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    return [part + b"\n\n" for part in events.split(b"\n\n") if part.strip()]


def data_of(event: bytes) -> bytes:
    """An event's data; empty for a comment."""
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)


def payload(event: bytes) -> dict[str, Any] | None:
    """The JSON object that an event carries; None for its end mark, comments and anything else."""
    data = data_of(event)
    if not data.startswith(b"{"):
        return None
    try:
        value = json.loads(data)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def encoded(value: dict[str, Any]) -> bytes:
    """An event that carries a JSON object."""
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def error_of(value: dict[str, Any] | None) -> dict[str, Any] | None:
    """The error that an answer or an event consists of."""
    if value is None:
        return None
    error = value.get("error")
    if error:
        return error if isinstance(error, dict) else {"message": str(error)}
    return value if value.get("object") == "error" else None


class Transcript:
    """What an answer has said so far, so that another node can continue it.

    Attributes:
        tokens: events with a choice, each of which is a token as the published proxy counts.
        whole: all of it is text, and short enough to be kept.
    """

    def __init__(self) -> None:
        self._raw = bytearray()
        self._parts: list[str] = []
        self._size = 0
        self.tokens = 0
        self.whole = True

    def add(self, events: bytes) -> None:
        """Events that were passed on."""
        if self.whole:
            self._raw += events
            if len(self._raw) > _RAW:
                self._read()

    def text(self) -> str:
        """All of it."""
        self._read()
        return "".join(self._parts)

    def add_choice(self, choice: dict[str, Any]) -> None:
        """A choice of an answer, or of an event."""
        said = choice.get("delta") or choice.get("message") or choice
        if any(said.get(name) for name in ("tool_calls", "reasoning", "reasoning_content", "function_call")):
            self.whole = False  # no prompt can be made of it
        text = said.get("content") or said.get("text") or ""
        self._parts.append(str(text))
        self._size += len(self._parts[-1])
        if self._size > _TEXT:
            self.whole = False
        if not self.whole:
            self._parts.clear()

    def _read(self) -> None:
        events, self._raw = bytes(self._raw), bytearray()
        for event in split(events):
            for choice in (payload(event) or {}).get("choices") or ():
                self.tokens += 1
                self.add_choice(choice)
