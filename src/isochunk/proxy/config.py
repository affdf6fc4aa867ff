"""What the proxy is told: nodes, limits, time-outs."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from isochunk.core.errors import ConfigError
from isochunk.proxy.limits import Limits
from isochunk.proxy.specs import Nodes, NodeSpec, Role, check_nodes, parse_nodes

__all__ = ["NodeSpec", "Nodes", "ProxyConfig", "Role", "Timeouts", "load_nodes", "parse_nodes", "read_yaml"]

INSTALL_HINT = "the proxy needs more packages: pip install 'isochunk[proxy]'"


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
        skip_prefill: tokens that a D node may compute itself so that P is left out; ``auto`` for as many as P's model
            says, None for none.
        give_up_s: remove a node that was added while serving and did not come up in this time; None keeps it.
        node_ca: certificates by which nodes that speak HTTPS are known; None for the system's.
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
    skip_prefill: int | str | None = None
    give_up_s: float | None = None
    node_ca: Path | None = None
    deadline_s: float | None = None
    api_key: str | None = None
    admin_key: str | None = None
    node_key: str | None = None
    access_log: bool = True
    limits: Limits = field(default_factory=Limits)
    timeouts: Timeouts = field(default_factory=Timeouts)

    def __post_init__(self) -> None:
        check_nodes(self.nodes)
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
