"""Which option each word of a command belongs to, by vLLM's names; abbreviations and underscores are understood."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from isochunk.deployment.option_table import table

__all__ = ["GivenOption", "all_flags", "is_json", "keys_of", "name_of", "options_of"]


@dataclass(frozen=True, slots=True)
class GivenOption:
    """Where an option stands among the words: its flag at ``begin``, its values up to ``end``."""

    dest: str
    begin: int
    end: int


@functools.cache
def all_flags() -> dict[str, str]:
    """Every spelling of an option, and vLLM's name of it."""
    return {string: str(row["dest"]) for row in table()["options"] for string in row["strings"]}


@functools.cache
def _rows() -> dict[str, dict[str, Any]]:
    return {row["dest"]: row for row in table()["options"]}


def options_of(words: Sequence[str]) -> list[GivenOption]:
    """Every option among the words; a value may begin with a dash when it is a number."""
    begins = [i for i, word in enumerate(words) if word.startswith("-") and not re.fullmatch(r"-\d+(\.\d+)?", word)]
    found = []
    for begin, end in zip(begins, [*begins[1:], len(words)], strict=False):
        flag, equals, _ = words[begin].partition("=")
        dest = name_of(flag)
        row = _rows().get(dest.partition(".")[0], {})
        if equals or row.get("action") in ("BooleanOptionalAction", "StoreTrueAction"):
            last = begin + 1
        else:
            last = end if row.get("nargs") in ("+", "*") else min(end, begin + 2)
        found.append(GivenOption(dest, begin, last))
    return found


def name_of(flag: str) -> str:
    """vLLM's name of an option, also of an abbreviated one; the flag itself when there is none."""
    head, dot, tail = flag.partition(".")
    head = "--" + head[2:].replace("_", "-") if head.startswith("--") else head
    if head in all_flags():
        return all_flags()[head] + dot + tail
    near = {dest for string, dest in all_flags().items() if head.startswith("--") and string.startswith(head)}
    return (near.pop() if len(near) == 1 else head) + dot + tail


def is_json(dest: str) -> bool:
    """Whether an option takes JSON."""
    kind = _rows().get(dest.partition(".")[0], {}).get("type")
    return kind in ("loads", "union_dict_and_str") or kind in table()["configs"]


def keys_of(dest: str) -> list[str]:
    """Keys that an option's JSON may have, where vLLM says them."""
    kind = _rows().get(dest, {}).get("type")
    return list(table()["configs"].get(kind, {}).get("properties", {}))
