"""P and D nodes and the proxy as child processes, on machines without accelerators."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, get_args

from isochunk.core.errors import ConfigError
from isochunk.deployment.launch import SHARED_CORES
from isochunk.deployment.server import free_port, running_process, running_server

__all__ = [
    "Connector",
    "Node",
    "Role",
    "need_connector",
    "node_environ",
    "node_options",
    "proxy_command",
    "running_node",
    "running_proxy",
]

Connector = Literal["nixl", "mooncake"]
Role = Literal["kv_producer", "kv_consumer"]

_HOST = "127.0.0.1"

_CONFIG = {
    "nixl": {
        "kv_connector": "NixlPushConnector",
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {"kv_lease_duration": 120, "num_threads": 0},
    },
    "mooncake": {
        "kv_connector": "MooncakeConnector",
        "kv_connector_extra_config": {"mooncake_protocol": "tcp", "num_workers": 2},
    },
}
_PACKAGES = {
    "nixl": ("nixl", "pip install --no-deps nixl-cu12 nixl"),
    "mooncake": (
        "mooncake",
        # In 0.3.13 TCP connections stall when they were idle: kvcache-ai/Mooncake#4209.
        "pip install mooncake-transfer-engine-non-cuda==0.3.12.post1, and install Debian's libibverbs1, libnl-3-200 "
        "and libnl-route-3-200 or what holds these libraries on your system",
    ),
}


def need_connector(connector: str) -> Connector:
    """The connector of that name, when what it needs is installed.

    Raises:
        ConfigError: there is none of that name, or its package or a library is missing.
    """
    if connector not in get_args(Connector):
        raise ConfigError(f"--connector {connector!r} must be one of {', '.join(get_args(Connector))}")
    package, remedy = _PACKAGES[connector]
    if find_spec(package) is None:
        raise ConfigError(f"--connector {connector} needs the package {package}: {remedy}")
    if connector == "mooncake":
        try:
            import mooncake.engine  # noqa: F401
        except ImportError as error:
            raise ConfigError(f"--connector mooncake: {error}; {remedy}") from error
        return "mooncake"
    return "nixl"


def node_options(connector: Connector, role: Role) -> list[str]:
    """vLLM's options for a node of that role."""
    return ["--kv-transfer-config", json.dumps({**_CONFIG[connector], "kv_role": role})]


def node_environ(connector: Connector, host: str, port: int, interface: str) -> dict[str, str]:
    """Environment for a node that its peers find at ``host``, from ``port`` on, through a network interface."""
    common = {"VLLM_HOST_IP": host}
    if connector == "nixl":
        return {
            **common,
            "UCX_TLS": "tcp,self",
            "UCX_NET_DEVICES": interface,
            "VLLM_NIXL_SIDE_CHANNEL_HOST": host,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
        }
    return {
        **common,
        "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(port),
        # Long prompts are thousands of pieces, and TCP refuses more than these at a time.
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
        "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
    }


@dataclass(frozen=True, slots=True)
class Node:
    """A node that runs: where its HTTP server listens, and the first port of its KV connector."""

    url: str
    side_port: int


@contextmanager
def running_node(
    model: Path,
    connector: Connector,
    role: Role,
    options: Sequence[str],
    *,
    log: Path,
    environ: dict[str, str],
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[Node]:
    """A node on this machine, beside others on the same cores; isochunk is enabled on P nodes only.

    Raises:
        ConfigError: it ended, or did not answer in time.
    """
    side_port = free_port()
    plugins = ["isochunk", SHARED_CORES] if role == "kv_producer" else [SHARED_CORES]
    environ = {**environ, **node_environ(connector, _HOST, side_port, "lo")}
    options = [*options, *node_options(connector, role)]
    with running_server(model, options, log=log, environ=environ, progress=progress, plugins=plugins) as url:
        yield Node(url, side_port)


def proxy_command(connector: Connector, prefill: Sequence[Node], decode: Sequence[Node], port: int) -> list[str]:
    """Arguments of ``isochunk proxy`` for these nodes."""

    def places(kind: str, nodes: Sequence[Node]) -> list[str]:
        addresses = [node.url.removeprefix("http://").split(":") for node in nodes]
        hosts, ports = zip(*addresses, strict=True)
        return [f"--{kind}-hosts", *hosts, f"--{kind}-ports", *ports]

    bootstraps = ["--prefiller-bootstrap-ports", *(str(node.side_port) for node in prefill)]
    return [
        *("--port", str(port), *places("prefiller", prefill), *places("decoder", decode)),
        *(bootstraps if connector == "mooncake" else []),
    ]


@contextmanager
def running_proxy(
    connector: Connector,
    prefill: Sequence[Node],
    decode: Sequence[Node],
    *,
    log: Path,
    program: Sequence[str] = ("-m", "isochunk", "proxy"),
    port: int | None = None,
) -> Iterator[str]:
    """``isochunk proxy`` in front of these nodes; yields its URL.

    Args:
        program: what Python runs, with the proxy's arguments behind it.
        port: where it listens; a free one when left out.

    Raises:
        ConfigError: it ended, or found no P or no D node that can be used.
    """
    port = port or free_port()
    url = f"http://{_HOST}:{port}"
    command = [sys.executable, *program, *proxy_command(connector, prefill, decode, port)]
    with running_process(command, dict(os.environ), health=f"{url}/healthcheck", log=log):
        yield url
