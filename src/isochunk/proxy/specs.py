"""Nodes as they are written down: their addresses, checked before anything is done with them."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

from isochunk.core.errors import ConfigError

__all__ = ["NodeSpec", "Nodes", "Role", "check_nodes", "is_here", "parse_nodes"]

_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?")
_SCHEMES = {"http": False, "https": True}


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
        tls: it speaks HTTPS.
    """

    host: str
    port: int
    bootstrap: str | None = None
    kv_tokens: int = 4_000_000
    tls: bool = False

    def __post_init__(self) -> None:
        for name, kind in (("host", str), ("port", int), ("kv_tokens", int), ("tls", bool)):
            value = getattr(self, name)
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                raise ConfigError(f"node {self.host!r}: {name} = {value!r} must be {_KINDS[kind]}")
        if not (_is_address(self.host) or _HOST.fullmatch(self.host)) or not 1 <= self.port <= 65535:
            raise ConfigError(
                f"node {self.host!r}, port {self.port}: give a host name or an address, and a port from 1 to 65535"
            )
        if self.bootstrap is not None and not _is_plain_url(self.bootstrap):
            raise ConfigError(
                f"node {self.name}: bootstrap = {self.bootstrap!r} must be a URL such as http://host:8998"
            )
        if self.kv_tokens < 1:
            raise ConfigError(f"node {self.name}: kv_tokens = {self.kv_tokens} must be at least 1")

    @property
    def name(self) -> str:
        """``host:port``, with an IPv6 address in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """Where requests go."""
        return f"{'https' if self.tls else 'http'}://{self.name}"

    @classmethod
    def parse(cls, text: str) -> NodeSpec:
        """From ``host:port`` or ``[v6]:port``, with ``http://`` or ``https://`` before it or without."""
        if not isinstance(text, str):
            raise ConfigError(f"node {text!r} must be host:port")
        scheme, _, rest = text.strip().rpartition("://")
        rest = rest.removesuffix("/") if scheme else rest
        if scheme and scheme.lower() not in _SCHEMES:
            raise ConfigError(f"node {text!r}: {scheme}:// is not spoken; use http:// or https://")
        host, colon, port = rest.rpartition(":")
        if not colon or not (port.isascii() and port.isdigit()) or len(port) > 5:
            raise ConfigError(f"node {text!r} must be host:port, without a user, a path or a query")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            raise ConfigError(f"node {text!r}: write an IPv6 address in brackets, and no user")
        return cls(host, int(port), tls=_SCHEMES.get(scheme.lower(), False))


_KINDS: dict[type, str] = {str: "text", int: "a whole number", bool: "true or false"}
Nodes = dict[Role, tuple[NodeSpec, ...]]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_plain_url(text: Any) -> bool:
    try:
        url = urlsplit(text)
        NodeSpec.parse(f"{url.scheme}://{url.netloc}")
    except (ConfigError, ValueError, AttributeError, TypeError):
        return False
    return not (url.path.strip("/") or url.query or url.fragment)


def check_nodes(nodes: Nodes) -> None:
    """Refuse a node that stands there twice.

    Raises:
        ConfigError: one does.
    """
    seen: dict[str, Role] = {}
    for role, specs in nodes.items():
        for spec in specs:
            if (before := seen.get(spec.name.lower())) is not None:
                raise ConfigError(f"node {spec.name} stands there twice: as {before} and as {role}")
            seen[spec.name.lower()] = role


def is_here(spec: NodeSpec, host: str, port: int) -> bool:
    """Whether a node is the server that listens on this host and port: a proxy that asks itself never ends."""
    if spec.port != port:
        return False
    own, found = _addresses(host), _addresses(spec.host)
    everywhere = any(ipaddress.ip_address(one).is_unspecified for one in own)
    return bool(found & own) or (everywhere and any(_is_local(one) for one in found))


def _addresses(host: str) -> set[str]:
    try:
        return {str(entry[4][0]).partition("%")[0] for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return set()


def _is_local(address: str) -> bool:
    """Only addresses of this machine can be bound."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


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
    check_nodes(nodes)
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
    if not {"host", "port"} <= set(entry):
        raise ConfigError(f"node {dict(entry)!r} needs a host and a port")
    return NodeSpec(**entry)
