"""How vLLM lets its options be spelled: underscores, dotted keys, ``-O3``, ``128k``, ``--config FILE``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["from_file", "human_int", "spelled_out"]

_FACTORS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def human_int(text: str) -> int:
    """``32k`` is 32000, ``32K`` is 32768, ``25.6k`` is 25600.

    Raises:
        ValueError: it is none of these.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT])", text.strip())
    if not found:
        return int(text.strip())
    if found[2].isupper():
        return int(found[1]) * _FACTORS[found[2]]
    return int(float(found[1]) * _FACTORS[found[2]])


def spelled_out(words: Sequence[str], flags: Sequence[str]) -> list[str]:
    """The words as argparse takes them: dashes for underscores, dotted keys merged into JSON.

    Args:
        flags: all options that there are, for those of a file's switches that have a ``--no-`` form.
    """
    dashed = list(_dashed(words))
    kept: list[str] = []
    merged: dict[str, dict[str, Any]] = {}
    at = 0
    while at < len(dashed):
        word = dashed[at]
        at += 1
        name, equals, value = word.partition("=")
        if not (word.startswith("-") and "." in name) or re.fullmatch(r"-\.?\d.*", word):
            kept.append(word)
            continue
        if not equals:
            value = dashed[at] if at < len(dashed) else ""
            at += 1
        option, *keys = name.removesuffix("+").split(".")
        _merge(merged.setdefault(option, {}), keys, _value(value, listed=name.endswith("+")))
    for option, made in merged.items():
        kept += [option, json.dumps(made)]
    return kept


def _dashed(words: Sequence[str]) -> Iterator[str]:
    for index, word in enumerate(words):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            head, dot, tail = name.partition(".")
            yield "--" + head[2:].replace("_", "-") + dot + tail + equals + value
        elif word.startswith("-O") and word != "-O":
            yield from ("--optimization-level", word[3:] if word[2] == "=" else word[2:])
        elif word == "-O" and words[index + 1 : index + 2] and words[index + 1] in ("0", "1", "2", "3"):
            yield "--optimization-level"
        else:
            yield word


def _value(text: str, *, listed: bool) -> Any:
    if listed:
        return text.split(",")
    for read in (json.loads, human_int):
        try:
            return read(text)
        except (ValueError, RecursionError):
            continue
    return text


def _merge(place: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    """Put a value at a path; objects are merged and lists joined, as vLLM does."""
    for key in keys[:-1]:
        below = place.get(key)
        if not isinstance(below, dict):
            below = place[key] = {}
        place = below
    last = keys[-1] if keys else ""
    before = place.get(last)
    if isinstance(before, dict) and isinstance(value, dict):
        for key, each in value.items():
            _merge(before, [key], each)
    elif isinstance(before, list) and isinstance(value, list):
        before += value
    else:
        place[last] = value


def from_file(options: Mapping[str, Any], flags: Sequence[str]) -> list[str]:
    """The words that a ``--config`` file stands for."""
    words: list[str] = []
    for key, value in options.items():
        option = f"--{key}"
        if value is True:
            words.append(option)
        elif value is False:
            words += [f"--no-{key}"] if f"--no-{key}" in flags else []
        elif isinstance(value, list):
            words += [option, *map(str, value)] if value else []
        elif isinstance(value, Mapping):
            words += [option, json.dumps(value)]
        else:
            words += [option, str(value)]
    return words
