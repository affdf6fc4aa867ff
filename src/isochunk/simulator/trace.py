"""Mooncake's open trace format, and the prefix cache that gives its block hashes a meaning."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isochunk.core.errors import WorkloadError
from isochunk.simulator.workload import Request

__all__ = ["BLOCK", "PrefixCache", "read_trace"]

BLOCK = 512  # tokens behind one hash id, as the format's authors state
_REQUIRED = ("timestamp", "input_length")
_KNOWN = (*_REQUIRED, "output_length", "hash_ids")


class PrefixCache:
    """Which blocks an instance still holds; the least recently used go first.

    ``capacity`` is in blocks, None for no limit.
    """

    def __init__(self, capacity: int | None = None) -> None:
        if capacity is not None and capacity < 1:
            raise WorkloadError(f"prefix cache of {capacity} blocks must hold at least 1, or be left out")
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def hit(self, blocks: Sequence[int], tokens: int) -> int:
        """Tokens at the start of the prompt that are held; the last token is always computed again."""
        held = 0
        for block in blocks:
            if block not in self._blocks:
                break
            self._blocks.move_to_end(block)
            held += 1
        return min(held, (tokens - 1) // BLOCK) * BLOCK

    def store(self, blocks: Sequence[int]) -> None:
        """Keep the blocks of a prompt; the last first, so that a prefix outlives what follows it."""
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while self._capacity is not None and len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)


def read_trace(path: Path, *, max_tokens: int | None = None) -> list[Request]:
    """Requests of a trace file: one JSON object a line with ``timestamp`` (ms), ``input_length``, ``hash_ids``.

    ``max_tokens`` is the longest prompt the deployment takes (``max_model_len``).

    Raises:
        WorkloadError: names the line that can't be used.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"can't read the trace {path}: {error}") from error
    requests = [_request(f"{path}, line {n}", n, line, max_tokens) for n, line in enumerate(lines, 1) if line.strip()]
    if not requests:
        raise WorkloadError(f"{path} holds no requests")
    return requests


def _request(where: str, number: int, line: str, max_tokens: int | None) -> Request:
    row = _row(where, line)
    tokens = _whole(where, "input_length", row["input_length"], 1)
    if max_tokens is not None and tokens > max_tokens:
        raise WorkloadError(f"{where}: input_length = {tokens} is above the limit of {max_tokens} tokens")
    blocks = row.get("hash_ids", [])
    if not isinstance(blocks, list) or not all(isinstance(block, int) for block in blocks):
        raise WorkloadError(f"{where}: hash_ids must be a list of whole numbers")
    time = row["timestamp"]
    if isinstance(time, bool) or not isinstance(time, (int, float)) or not 0 <= time < float("inf"):
        raise WorkloadError(f"{where}: timestamp = {time!r} must be milliseconds, at least 0")
    if "output_length" in row:
        _whole(where, "output_length", row["output_length"], 0)
    return Request(key=f"line{number}", tokens=tokens, arrival=time / 1000, blocks=tuple(blocks))


def _row(where: str, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise WorkloadError(f"{where}: not JSON ({error})") from error
    if not isinstance(row, dict):
        raise WorkloadError(f"{where}: a {type(row).__name__}, expected an object")
    for name in row:
        if name not in _KNOWN:
            raise WorkloadError(f"{where}: unknown column {name!r}; known are {', '.join(_KNOWN)}")
    for name in _REQUIRED:
        if name not in row:
            raise WorkloadError(f"{where}: column {name!r} is missing")
    return row


def _whole(where: str, name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise WorkloadError(f"{where}: {name} = {value!r} must be a whole number, at least {least}")
    return value
