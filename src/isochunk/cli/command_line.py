"""Reads a vLLM server's command line, or a shell script that ends in one."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isochunk.cli.deployment import Server
from isochunk.core.errors import ConfigError

__all__ = ["parse_server"]

_ALIASES = {
    "-pp": "pipeline-parallel-size",
    "-tp": "tensor-parallel-size",
    "-dp": "data-parallel-size",
    "-n": "nnodes",
    "-r": "node-rank",
}
_JSON = frozenset({"kv-transfer-config", "additional-config", "hf-overrides", "compilation-config"})
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_SWITCHES = frozenset(
    {"enable-chunked-prefill", "async-scheduling", "enable-prefix-caching", "enforce-eager", "trust-remote-code",
     "enable-expert-parallel", "headless"}
)  # fmt: skip


def parse_server(
    command: str,
    *,
    name: str = "the command",
    role: str | None = None,
    env: Mapping[str, str] | None = None,
    host: str = "localhost",
    device_gib: float | None = None,
    model_config: Path | None = None,
) -> Server:
    """Read a command line, or a shell script that ends in one; variables are not expanded.

    Raises:
        ConfigError: there is no vLLM command in it, or a JSON option is not JSON.
    """
    words = _words(command, name)
    program, start = _program(words, name)
    variables = {k: v for k, _, v in (w.partition("=") for w in words[:start] if _ASSIGNMENT.match(w))}
    model, options = _options(words[start:], name)
    model = str(options.get("model", model))
    options = {key: _json(name, key, value) if key in _JSON else value for key, value in options.items()}
    _merge_dotted(options)
    kv_role = (options.get("kv-transfer-config") or {}).get("kv_role")
    guessed = {"kv_producer": "prefill", "kv_consumer": "decode"}.get(str(kv_role))
    return Server(
        name=name,
        role=role or guessed,
        program=program,
        model=model,
        options=options,
        env={**variables, **{k: str(v) for k, v in (env or {}).items()}},
        host=host,
        device_gib=device_gib,
        model_config=_model_config(model_config or Path(model) / "config.json", needed=model_config is not None),
    )


def _words(command: str, name: str) -> list[str]:
    lines = [line for line in command.replace("\\\n", " ").splitlines() if not line.lstrip().startswith("#!")]
    try:
        return shlex.split("\n".join(lines), comments=True)
    except ValueError as error:
        raise ConfigError(f"{name} can't be read as a command line: {error}; check the quotes") from error


def _program(words: list[str], name: str) -> tuple[str, int]:
    """The program, and where its arguments begin."""
    for index, word in enumerate(words):
        base = word.rsplit("/", 1)[-1]
        if base in ("vllm", "isochunk") and words[index + 1 : index + 2] == ["serve"]:
            return base, index + 2
        if word == "vllm.entrypoints.openai.api_server":
            return "vllm", index + 1
    raise ConfigError(f"{name}: no 'vllm serve MODEL', 'isochunk serve MODEL' or 'vllm.entrypoints.openai.api_server'")


def _options(words: list[str], name: str) -> tuple[str, dict[str, Any]]:
    model = ""
    options: dict[str, Any] = {}
    index = 0
    while index < len(words):
        word, value, inline = words[index], None, False
        index += 1
        if not word.startswith("-"):
            model = model or word
            continue
        word, equals, text = word.partition("=")
        key, dot, rest = _ALIASES.get(word, word.lstrip("-")).partition(".")
        key = key.replace("_", "-") + dot + rest
        inline = bool(equals)
        if inline:
            value = text
        elif index < len(words) and not _is_option(words[index]) and not _is_switch(key):
            value = words[index]
            index += 1
        options.update([_value(key, value)])
    if not model and "model" not in options:
        raise ConfigError(f"{name} names no model")
    return model, options


def _is_option(word: str) -> bool:
    return word.startswith("-") and not re.fullmatch(r"-\d+(\.\d+)?", word)


def _is_switch(key: str) -> bool:
    return key.removeprefix("no-") in _SWITCHES


def _value(key: str, value: str | None) -> tuple[str, Any]:
    if value is None or (_is_switch(key) and value.lower() in ("true", "false")):
        on = value is None or value.lower() == "true"
        return (key[3:], not on) if key.startswith("no-") else (key, on)
    return key, value


def _json(name: str, key: str, value: Any) -> Any:
    try:
        return json.loads(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}: --{key} {value} is not JSON ({error}); quote it in '...'") from error


def _merge_dotted(options: dict[str, Any]) -> None:
    """``--kv-transfer-config.kv_role X`` says the same as JSON with that key."""
    for key in [k for k in options if "." in k]:
        *parents, last = key.split(".")
        value = options.pop(key)
        if parents[0] not in _JSON:
            continue
        place = options.setdefault(parents[0], {})
        for parent in parents[1:]:
            place = place.setdefault(parent, {})
        try:
            place[last] = json.loads(value)
        except (TypeError, ValueError):
            place[last] = value


def _model_config(path: Path, *, needed: bool) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        if needed:
            raise ConfigError(f"can't read the model's configuration {path}: {error}") from error
        return {}
    return data if isinstance(data, dict) else {}
