"""A request body, understood without parsing it.

A million-token prompt is megabytes of JSON. Parsing it would hold the event loop for tens of milliseconds and
writing it again as long, twice a request. So only the places of the top-level members are found, in slices
with other work in between; small members are parsed, and bodies for the nodes are put together from pieces.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

from isochunk.proxy.errors import ProxyError

__all__ = ["Body", "Member", "Pieces", "parse_body"]

Pieces = list[bytes | memoryview]

SLICE = 1 << 16  # bytes looked at before other work gets its turn: well under a millisecond
_STEPS = 1000  # structural characters looked at before other work gets its turn
_MOST_STEPS = 1_000_000
_DEEPEST = 200
_SMALL = 1 << 14  # members up to this size are parsed, so that their faults are found here

_SPACE = re.compile(rb"[ \t\r\n]*+")
_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_FLAT = re.compile(rb'(?:[^"\[\]{}]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)
_SCALAR = re.compile(rb"[^,}\]\s]++")


@dataclass(frozen=True, slots=True)
class Member:
    """Where a top-level member lies: ``start`` at its key, ``value`` at its value, both up to ``end``."""

    key: str
    start: int
    value: int
    end: int


@dataclass(frozen=True, slots=True)
class Body:
    """A JSON object: its bytes, where its members lie, and the values of the small ones."""

    data: bytes | bytearray
    members: tuple[Member, ...]
    values: dict[str, Any]

    def find(self, key: str) -> Member | None:
        """The member with this key; the last one when there are several, as JSON parsers take it."""
        return next((m for m in reversed(self.members) if m.key == key), None)

    def edited(self, drop: Container[str], extra: dict[str, Any]) -> Pieces:
        """The object without the members in ``drop`` and with ``extra``, as pieces to send one by one."""
        view = memoryview(self.data)
        pieces: Pieces = [b"{"]
        for member in self.members:
            if member.key not in drop and member.key not in extra:
                pieces += [view[member.start : member.end], b","]
        added = json.dumps(extra)[1:-1].encode()
        if not added and len(pieces) > 1:
            pieces.pop()
        return [*pieces, added, b"}"]


async def parse_body(data: bytes | bytearray) -> Body:
    """Find the members of a JSON object.

    Raises:
        ProxyError: 400, the bytes are no JSON object, as far as can be told without reading large members.
    """
    scan = _Scan(data)
    for _ in scan.run():
        await asyncio.sleep(0)
    return Body(data, tuple(scan.members), scan.values)


class _Scan:
    """One pass over the bytes; its iterators yield whenever other work should get a turn."""

    def __init__(self, data: bytes | bytearray) -> None:
        self.data = data
        self.at = 0
        self.steps = 0
        self._turned = 0
        self.members: list[Member] = []
        self.values: dict[str, Any] = {}

    def run(self) -> Iterator[None]:
        self._expect(b"{")
        if self._peek() == b"}":
            self.at += 1
        else:
            yield from self._members()
        if self._peek():
            raise self._bad("nothing may follow the object")

    def _members(self) -> Iterator[None]:
        while True:
            self._peek()
            start = self.at
            self._expect(b'"')
            yield from self._string()
            key = self._load(start, self.at)
            self._expect(b":")
            self._peek()
            value = self.at
            yield from self._value()
            self.members.append(Member(key, start, value, self.at))
            if self.at - value <= _SMALL:
                self.values[key] = self._load(value, self.at)
            else:
                self.values.pop(key, None)
            if self._peek() == b"}":
                self.at += 1
                return
            self._expect(b",")

    def _value(self) -> Iterator[None]:
        first = self._peek()
        if first == b'"':
            self.at += 1
            yield from self._string()
        elif first in (b"{", b"["):
            yield from self._nested()
        else:
            scalar = _SCALAR.match(self.data, self.at, self.at + _SMALL)
            if scalar is None:
                raise self._bad("a value is missing")
            self.at = scalar.end()

    def _string(self) -> Iterator[None]:
        """From inside a string to behind its closing quote."""
        while True:
            limit = self.at + SLICE
            self.at = self._match(_STRING, limit)
            if self.data[self.at : self.at + 1] == b'"':
                self.at += 1
                return
            if self.at < limit - 1:
                raise self._bad("a string has no end")
            yield

    def _nested(self) -> Iterator[None]:
        depth = 0
        while True:
            character = self.data[self.at : self.at + 1]
            self.at += 1
            if character == b'"':
                yield from self._string()
            elif character in (b"{", b"["):
                depth += 1
            elif character in (b"}", b"]"):
                depth -= 1
            elif not character:
                raise self._bad("an array or object has no end")
            else:
                self.at -= 1
            if depth == 0:
                return
            if depth > _DEEPEST:
                raise self._bad(f"it is nested deeper than {_DEEPEST}")
            yield from self._turn()
            self.at = self._match(_FLAT, self.at + SLICE)

    def _turn(self) -> Iterator[None]:
        self.steps += 1
        if self.steps > _MOST_STEPS:
            raise self._bad(f"it has more than {_MOST_STEPS} brackets")
        if self.steps % _STEPS == 0 or self.at - self._turned > SLICE // 2:
            self._turned = self.at
            yield

    def _match(self, pattern: re.Pattern[bytes], limit: int) -> int:
        found = pattern.match(self.data, self.at, limit)
        return found.end() if found else self.at

    def _peek(self) -> bytes:
        """The next character that is no space, or nothing at the end."""
        character = bytes(self.data[self.at : self.at + 1])
        if not character.isspace():
            return character
        self.at = self._match(_SPACE, len(self.data))
        return bytes(self.data[self.at : self.at + 1])

    def _expect(self, character: bytes) -> None:
        if self._peek() != character:
            raise self._bad(f"{character.decode()} expected")
        self.at += 1

    def _load(self, start: int, end: int) -> Any:
        try:
            return json.loads(str(self.data[start:end], "utf-8"))  # bytes with zeros json would take for UTF-16
        except (ValueError, RecursionError) as error:
            raise self._bad(str(error), start) from None

    def _bad(self, what: str, at: int | None = None) -> ProxyError:
        where = self.at if at is None else at
        return ProxyError(400, "invalid_request_error", f"the body is not a JSON object: byte {where}: {what}")
