"""A vLLM deployment as its operator wrote it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from isochunk.core.errors import ConfigError

__all__ = ["Deployment", "Server"]


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

    def __post_init__(self) -> None:
        memory = self.device_gib
        if memory is not None and not (isinstance(memory, (int, float)) and 0 < memory < float("inf")):
            raise ConfigError(f"{self.name}: device_gib = {memory!r} must be the GiB of one device, above 0")

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
