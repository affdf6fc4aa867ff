"""A vLLM deployment as its operator wrote it: command lines, and a YAML file of the whole."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isochunk.core.errors import ConfigError
from isochunk.proxy.config import INSTALL_HINT

__all__ = ["Deployment", "Server", "load_deployment", "parse_server"]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One vLLM server.

    Attributes:
        name: what messages call it.
        role: ``prefill``, ``decode``, or None when nothing says it.
        program: the command that starts it, such as ``vllm`` or ``isochunk``.
        model: the model it serves.
        options: its long options without dashes; JSON ones parsed; switches True or False.
        env: its environment variables.
        host: where it runs; servers on one host must not share ports.
        device_gib: memory of one of its devices; None when not told.
        model_config: the model's ``config.json``, when there is one to read.
    """

    name: str
    role: str | None
    program: str
    model: str
    options: dict[str, Any]
    env: dict[str, str] = field(default_factory=dict)
    host: str = "localhost"
    device_gib: float | None = None
    model_config: dict[str, Any] = field(default_factory=dict)

    @property
    def kv(self) -> dict[str, Any]:
        """Its ``--kv-transfer-config``."""
        value = self.options.get("kv-transfer-config")
        return value if isinstance(value, dict) else {}

    @property
    def extra(self) -> dict[str, Any]:
        """Its ``kv_connector_extra_config``."""
        value = self.kv.get("kv_connector_extra_config")
        return value if isinstance(value, dict) else {}

    @property
    def connector(self) -> str | None:
        """Name of its KV connector."""
        return self.kv.get("kv_connector")

    def size(self, kind: str) -> int:
        """Parallel size: ``pipeline``, ``tensor`` or ``data``."""
        return self.number(f"{kind}-parallel-size") or 1

    def number(self, option: str) -> int | None:
        """A whole number; suffixes as vLLM takes them (``32k`` is 32000, ``32K`` is 32768).

        Raises:
            ConfigError: it is none.
        """
        value = self.options.get(option)
        if value is None:
            return None
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)", str(value))
        if not found:
            raise ConfigError(f"{self.name}: --{option} {value} is not a whole number")
        factors = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
        return int(float(found[1]) * factors[found[2]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """P and D servers and the proxy's command line."""

    servers: tuple[Server, ...]
    proxy: tuple[str, ...] = ()

    def role(self, role: str) -> tuple[Server, ...]:
        """The servers of one role."""
        return tuple(server for server in self.servers if server.role == role)


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


def load_deployment(path: Path) -> Deployment:
    """Read a YAML file with the lists ``prefill`` and ``decode`` and the command ``proxy``.

    A node is a command, or a mapping with ``command`` and optionally ``env``, ``host``, ``device_gib`` and
    ``model_config``.

    Raises:
        ConfigError: the file can't be read or is of another form.
    """
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(INSTALL_HINT) from error
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"can't read {path}: {error}") from error
    if not isinstance(data, Mapping) or not set(data) <= {"prefill", "decode", "proxy"}:
        raise ConfigError(f"{path}: expected the lists 'prefill' and 'decode', the command 'proxy', and nothing else")
    servers = [
        _entry(entry, role, f"{role}[{index}]")
        for role in ("prefill", "decode")
        for index, entry in enumerate(_list(path, role, data.get(role)))
    ]
    return Deployment(servers=tuple(servers), proxy=tuple(shlex.split(str(data.get("proxy") or ""))))


def _list(path: Path, role: str, value: Any) -> list[Any]:
    if value is not None and not isinstance(value, list):
        raise ConfigError(f"{path}: {role!r} must be a list of nodes")
    return value or []


def _entry(entry: Any, role: str, name: str) -> Server:
    known = ("command", "env", "host", "device_gib", "model_config")
    if isinstance(entry, str):
        entry = {"command": entry}
    if not isinstance(entry, Mapping) or "command" not in entry or not set(entry) <= set(known):
        raise ConfigError(f"{name} must be a command, or a mapping with 'command' and maybe {', '.join(known[1:])}")
    rest = {key: value for key, value in entry.items() if key != "command"}
    if "model_config" in rest:
        rest["model_config"] = Path(rest["model_config"])
    return parse_server(str(entry["command"]), name=name, role=role, **rest)


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
