"""Reads a PD deployment from YAML."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isochunk.cli.command_line import parse_server
from isochunk.cli.deployment import Deployment, Server
from isochunk.core.errors import ConfigError
from isochunk.proxy.config import read_yaml

__all__ = ["load_deployment"]


def load_deployment(path: Path) -> Deployment:
    """Read a YAML file with the lists ``prefill`` and ``decode`` and the command ``proxy``.

    A node is a command, or a mapping with ``command`` and optionally ``env``, ``host``, ``device_gib`` and
    ``model_config``.

    Raises:
        ConfigError: the file can't be read or is of another form.
    """
    data = read_yaml(path)
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
