"""Mooncake's open trace format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from isochunk.core.errors import WorkloadError
from isochunk.simulator.workload import Request

__all__ = ["BLOCK", "read_trace"]

BLOCK = 512  # tokens behind one hash id, as the format's authors state
_REQUIRED = ("timestamp", "input_length")
_KNOWN = (*_REQUIRED, "output_length", "hash_ids")
_MOST_TOKENS = 10**8  # more is a wrong column
_LATEST_MS = 10**15  # far behind any clock in milliseconds, and times still differ by less than a millisecond


def read_trace(path: Path, *, block: int = BLOCK, max_tokens: int | None = None, decode: bool = False) -> list[Request]:
    """Requests of a trace file: one JSON object a line with ``timestamp`` (ms), ``input_length``, ``hash_ids``.

    The first timestamp is second 0. Lines need not be in order of time.

    Args:
        block: tokens behind one hash id.
        max_tokens: the longest prompt the deployment takes (``max_model_len``).
        decode: the instances also answer, ``output_length`` tokens; else one.

    Raises:
        WorkloadError: names the line that can't be used.
    """
    if block < 1:
        raise WorkloadError(f"trace block = {block} must be at least 1 token a hash id")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"can't read the trace {path}: {error}") from error
    rows = {n: _checked(f"{path}, line {n}", line, max_tokens) for n, line in enumerate(lines, 1) if line.strip()}
    if not rows:
        raise WorkloadError(f"{path} holds no requests")
    for number, row in rows.items():
        hashes, tokens = row.get("hash_ids"), row["input_length"]
        if hashes and len(hashes) != -(-tokens // block):
            raise WorkloadError(
                f"{path}, line {number}: {len(hashes)} hash_ids don't fit input_length = {tokens}: "
                f"blocks of {block} tokens need {-(-tokens // block)}; {_advice(list(rows.values()), row)}"
            )
    first = min(row["timestamp"] for row in rows.values())
    return [
        Request(
            key=f"line{number}",
            tokens=row["input_length"],
            arrival=(row["timestamp"] - first) / 1000,
            blocks=tuple(row.get("hash_ids", ())),
            unit=block,
            output=max(row.get("output_length", 1), 1) if decode else 1,
        )
        for number, row in rows.items()
    ]


def _advice(rows: list[dict[str, Any]], row: dict[str, Any]) -> str:
    """Which block size fits all lines, or else this one."""
    for some, what in ((rows, "the whole trace"), ([row], "this line")):
        spans = [_fitting(row["input_length"], len(row["hash_ids"])) for row in some if row.get("hash_ids")]
        low, high = max(low for low, _ in spans), min(high for _, high in spans)
        if low <= high:
            return f"a block of {_roundest(low, high)} tokens would fit {what}"
    return "no block size fits it"


def _fitting(tokens: int, hashes: int) -> tuple[int, int]:
    """Least and largest block of which ``tokens`` tokens have so many; in the wrong order when there is none."""
    return -(-tokens // hashes), (tokens - 1) // (hashes - 1) if hashes > 1 else 2 * _MOST_TOKENS


def _roundest(low: int, high: int) -> int:
    """The number from low to high that most powers of two divide: block sizes are such numbers."""
    power = 1 << (low - 1).bit_length()
    while -(-low // power) * power > high:
        power //= 2
    return -(-low // power) * power


def _checked(where: str, line: str, max_tokens: int | None) -> dict[str, Any]:
    row = _row(where, line)
    tokens = _whole(where, "input_length", row["input_length"], 1)
    if max_tokens is not None and tokens > max_tokens:
        raise WorkloadError(f"{where}: input_length = {tokens} is above the limit of {max_tokens} tokens")
    hashes = row.get("hash_ids", [])
    if not isinstance(hashes, list) or not all(type(number) is int for number in hashes):
        raise WorkloadError(f"{where}: hash_ids must be a list of whole numbers")
    time = row["timestamp"]
    if isinstance(time, bool) or not isinstance(time, (int, float)) or not 0 <= time <= _LATEST_MS:
        raise WorkloadError(f"{where}: timestamp = {_short(time)} must be milliseconds, from 0 to {_LATEST_MS:.0e}")
    if "output_length" in row:
        _whole(where, "output_length", row["output_length"], 0)
    return row


def _row(where: str, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise WorkloadError(f"{where}: not JSON ({error})") from error
    if not isinstance(row, dict):
        raise WorkloadError(f"{where}: a {type(row).__name__}, expected an object")
    for name in row:
        if name not in _KNOWN:
            raise WorkloadError(f"{where}: unknown column {_short(name)}; known are {', '.join(_KNOWN)}")
    for name in _REQUIRED:
        if name not in row:
            raise WorkloadError(f"{where}: column {name!r} is missing")
    return row


def _whole(where: str, name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST_TOKENS:
        raise WorkloadError(f"{where}: {name} = {_short(value)} must be a whole number from {least} to {_MOST_TOKENS}")
    return value


def _short(value: Any) -> str:
    """The value, or its beginning when it is very long."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
