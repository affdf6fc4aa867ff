"""What the proxy is told: nodes, limits, time-outs."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from isochunk.core.errors import ConfigError
from isochunk.proxy.limits import Limits

__all__ = ["NodeSpec", "Nodes", "ProxyConfig", "Role", "Timeouts", "load_nodes", "parse_nodes", "read_yaml"]

INSTALL_HINT = "the proxy needs more packages: pip install 'isochunk[proxy]'"


class Role(StrEnum):
    """What a node does."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """A node to send requests to.

    Attributes:
        host: name or IP address.
        port: of its HTTP server.
        bootstrap: URL of its Mooncake bootstrap server; None when it hands over KV parameters itself
            (NIXL, and the Ascend plugin's Mooncake connector).
        kv_tokens: tokens that its KV cache holds, for estimating prefix hits.
    """

    host: str
    port: int
    bootstrap: str | None = None
    kv_tokens: int = 4_000_000

    def __post_init__(self) -> None:
        if not self.host or not 1 <= self.port <= 65535:
            raise ConfigError(f"node {self.host!r}, port {self.port}: give a host and a port from 1 to 65535")
        if self.bootstrap is not None and not self.bootstrap.startswith(("http://", "https://")):
            raise ConfigError(
                f"node {self.name}: bootstrap = {self.bootstrap!r} must be a URL such as http://host:8998"
            )
        if self.kv_tokens < 1:
            raise ConfigError(f"node {self.name}: kv_tokens = {self.kv_tokens} must be at least 1")

    @property
    def name(self) -> str:
        """``host:port``, with an IPv6 address in brackets."""
        try:
            v6 = ipaddress.ip_address(self.host).version == 6
        except ValueError:
            v6 = False
        return f"[{self.host}]:{self.port}" if v6 else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> NodeSpec:
        """From ``host:port`` or ``[v6]:port``."""
        host, colon, port = text.strip().removeprefix("http://").rstrip("/").rpartition(":")
        if not colon or not port.isdigit():
            raise ConfigError(f"node {text!r} must be host:port")
        return cls(host.strip("[]"), int(port))


Nodes = dict[Role, tuple[NodeSpec, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """Seconds after which something counts as failed.

    Attributes:
        connect_s: until a node has accepted a connection.
        prefill_s: until a P node has answered; the longest prompt on a full queue must fit.
        first_s: until a D node has sent the first piece of a stream. A D node that registers for KV whose
            lease has run out never answers, so this must end the wait.
        silence_s: between two pieces of a stream.
        answer_s: until a D node has answered a request that is not streamed.
        client_s: until a client takes more bytes.
        lame_duck_s: after SIGTERM, in which all is served and health is refused, so that balancers look elsewhere.
        drain_s: until the requests in flight are done after that.
        probe_s: between two looks at a healthy node.
        probe_answer_s: until a node has answered such a look.
    """

    connect_s: float = 5.0
    prefill_s: float = 1800.0
    first_s: float = 120.0
    silence_s: float = 120.0
    answer_s: float = 3600.0
    client_s: float = 120.0
    lame_duck_s: float = 2.0
    drain_s: float = 600.0
    probe_s: float = 5.0
    probe_answer_s: float = 10.0

    def __post_init__(self) -> None:
        for item in fields(self):
            if not getattr(self, item.name) > 0:
                raise ConfigError(f"{item.name} = {getattr(self, item.name)} must be above 0 seconds")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProxyConfig:
    """Everything the proxy is told at start.

    Attributes:
        nodes: P and D nodes.
        nodes_file: YAML file they came from, read again on SIGHUP.
        attempts: times that a request is computed before the client gets an error.
        retry_delay_s: before it is computed again.
        deadline_s: refuse a request with 429 when its predicted TTFT is longer.
        api_key: required on every route when set.
        admin_key: opens ``/instances/*``; those routes are off without it.
        node_key: sent to the nodes in place of the client's key.
        access_log: write a line for each request.
        limits: see `Limits`.
        timeouts: see `Timeouts`.
    """

    nodes: Nodes = field(default_factory=dict)
    nodes_file: Path | None = None
    attempts: int = 3
    retry_delay_s: float = 0.001
    deadline_s: float | None = None
    api_key: str | None = None
    admin_key: str | None = None
    node_key: str | None = None
    access_log: bool = True
    limits: Limits = field(default_factory=Limits)
    timeouts: Timeouts = field(default_factory=Timeouts)

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ConfigError(f"attempts = {self.attempts} must be at least 1")
        if self.deadline_s is not None and not self.deadline_s > 0:
            raise ConfigError(f"deadline = {self.deadline_s} must be above 0 seconds")


def read_yaml(path: Path, what: str = "") -> Any:
    """What a YAML file holds; ``what`` names it in the error.

    Raises:
        ConfigError: it can't be read, or PyYAML is not installed.
    """
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(INSTALL_HINT) from error
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"can't read {what}{path}: {error}") from error
    return data


def load_nodes(path: Path) -> Nodes:
    """Nodes from a YAML file.

    Raises:
        ConfigError: the file can't be read or says something else than nodes.
    """
    data = read_yaml(path, "the nodes in ")
    try:
        return parse_nodes(data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_nodes(data: Any) -> Nodes:
    """Nodes from ``{"prefill": [...], "decode": [...]}``, each ``host:port`` or a mapping of `NodeSpec`'s fields."""
    if not isinstance(data, Mapping) or not set(data) <= {str(role) for role in Role}:
        raise ConfigError("expected the lists 'prefill' and 'decode' and nothing else")
    nodes: Nodes = {}
    for role in Role:
        entries = data.get(role) or []
        if not isinstance(entries, list):
            raise ConfigError(f"{role!s} must be a list of nodes")
        nodes[role] = tuple(_node(entry) for entry in entries)
    return nodes


def _node(entry: Any) -> NodeSpec:
    if isinstance(entry, str):
        return NodeSpec.parse(entry)
    if not isinstance(entry, Mapping):
        raise ConfigError(f"node {entry!r} must be host:port or a mapping with host and port")
    known = [item.name for item in fields(NodeSpec)]
    for key in entry:
        if key not in known:
            raise ConfigError(f"node {dict(entry)!r}: unknown key {key!r}; known are {', '.join(known)}")
    if not {"host", "port"} <= set(entry) or not isinstance(entry["port"], int):
        raise ConfigError(f"node {dict(entry)!r} needs a host and a whole number as port")
    return NodeSpec(**entry)
