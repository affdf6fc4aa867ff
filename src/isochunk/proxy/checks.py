"""What D would refuse, found before P computes: P sees one token's worth of a request, so not the faults of the rest.

The rules are vLLM's (``sampling_params.py`` and the request classes of 0.32). All other members go to P as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isochunk.proxy.errors import ProxyError

__all__ = ["as_bool", "as_int", "check", "check_length", "wanted_tokens"]

_TRUE = frozenset({"1", "on", "t", "true", "y", "yes"})
_FALSE = frozenset({"0", "off", "f", "false", "n", "no"})


def as_bool(value: Any) -> bool | None:
    """What vLLM takes for a boolean; None for anything else."""
    if isinstance(value, str):
        lower = value.lower()
        return True if lower in _TRUE else False if lower in _FALSE else None
    if isinstance(value, (bool, int, float)) and value in (0, 1):
        return bool(value)
    return None


def as_int(value: Any) -> int | None:
    """What vLLM takes for a whole number; None for anything else."""
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            return None
    if isinstance(value, float) and not value.is_integer():
        return None
    return int(value) if isinstance(value, (int, float)) else None


def wanted_tokens(values: Mapping[str, Any], *, chat: bool) -> int | None:
    """The most tokens the answer may have; None when the request does not say."""
    if chat and values.get("max_completion_tokens") is not None:
        return as_int(values["max_completion_tokens"])
    return as_int(values.get("max_tokens"))


def check(values: Mapping[str, Any], *, chat: bool) -> None:
    """Refuse what D would.

    Raises:
        ProxyError: 400.
    """
    given = {name: value for name, value in values.items() if value is not None}
    for name in ("n", "best_of"):
        if name in given and as_int(given[name]) != 1:
            raise _bad(name, given[name], "KV is handed over for one answer; send several requests")
    if as_bool(given.get("use_beam_search")):
        raise _bad("use_beam_search", True, "KV is handed over for one answer")
    for name in ("stream", "ignore_eos", "echo"):
        if name in given and as_bool(given[name]) is None:
            raise _bad(name, given[name], "it must be true or false")
    streams = as_bool(given.get("stream")) or False
    if "stream_options" in given:
        if not streams:
            raise _bad("stream_options", given["stream_options"], "it goes with 'stream': true only")
        if not isinstance(given["stream_options"], dict):
            raise _bad("stream_options", given["stream_options"], "it must be an object")
    _check_lengths(given, chat=chat)
    _check_stops(given)
    if "prompt_logprobs" in given:
        count = given["prompt_logprobs"]
        if not isinstance(count, int) or isinstance(count, bool) or count < -1:
            raise _bad("prompt_logprobs", count, "it must be a whole number of at least -1")
        if streams and count != 0:
            raise _bad("prompt_logprobs", count, "they are not available in a stream")


def _check_stops(given: Mapping[str, Any]) -> None:
    stop = given.get("stop", [])
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops):
        raise _bad("stop", stop, "it must be a string or strings, none of them empty")
    ids = given.get("stop_token_ids", [])
    if not isinstance(ids, list) or any(as_int(one) is None for one in ids):
        raise _bad("stop_token_ids", ids, "it must hold whole numbers")


def _check_lengths(given: Mapping[str, Any], *, chat: bool) -> None:
    least = 0 if as_bool(given.get("echo")) else 1
    for name in ("max_tokens", *(("max_completion_tokens",) if chat else ())):
        if name in given:
            count = as_int(given[name])
            if count is None or count < least:
                raise _bad(name, given[name], f"it must be a whole number of at least {least}")
    if "min_tokens" in given:
        fewest, most = as_int(given["min_tokens"]), wanted_tokens(given, chat=chat)
        if fewest is None or fewest < 0:
            raise _bad("min_tokens", given["min_tokens"], "it must be a whole number of at least 0")
        if most is not None and fewest > most:
            raise _bad("min_tokens", fewest, f"it must not be above max_tokens = {most}")


def check_length(longest: int | None, ids: int | None, wanted: int | None) -> None:
    """Refuse what is longer than the model takes, as far as that is known without tokenising.

    Args:
        ids: tokens of the prompt, when it came as token ids.

    Raises:
        ProxyError: 400.
    """
    if longest is None or (ids or 1) + (wanted or 0) <= longest:
        return
    prompt = "prompt" if ids is None else f"{ids} tokens of prompt"
    message = f"the {prompt} and max_tokens = {wanted} are more than the model's {longest} tokens"
    raise ProxyError(400, "invalid_request_error", message)


def _bad(name: str, value: Any, what: str) -> ProxyError:
    return ProxyError(400, "invalid_request_error", f"{name} = {str(value)[:80]}: {what}")
