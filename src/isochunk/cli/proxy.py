"""``isochunk proxy``: P and D nodes behind one address."""

from __future__ import annotations

import argparse
import logging
import os
import ssl
from collections.abc import Callable
from pathlib import Path

import typer

from isochunk.core.errors import ConfigError
from isochunk.proxy.config import INSTALL_HINT, Nodes, NodeSpec, ProxyConfig, Role, Timeouts, load_nodes
from isochunk.proxy.detour import read_skip
from isochunk.proxy.limits import Limits

__all__ = ["proxy_command", "read_arguments"]

# Options of the published example proxy that have no meaning here; a start script with them must still work.
_OBSOLETE = {
    "--workers": "one process serves, so that all requests share one view of the nodes. For more than a core can do "
    "run several proxies behind a balancer; they share no queues, no ejections and no prefix index",
}


PASS_ALL = {"allow_extra_args": True, "ignore_unknown_options": True}


def proxy_command(context: typer.Context) -> None:
    """Serve P and D nodes behind one address; see 'isochunk proxy --help'."""
    config, given = read_arguments(context.args)
    try:
        from isochunk.proxy.server import serve
    except ImportError as error:
        raise ConfigError(f"{INSTALL_HINT} ({error})") from error
    serve(config, host=given.host, port=given.port, log_level=given.log_level, tls=_tls(given))


def _tls(given: argparse.Namespace) -> ssl.SSLContext | None:
    if given.ssl_certfile is None:
        if given.ssl_keyfile is not None:
            raise ConfigError("--ssl-keyfile goes with --ssl-certfile")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(given.ssl_certfile, given.ssl_keyfile)
    except OSError as error:
        raise ConfigError(f"--ssl-certfile {given.ssl_certfile}: {error}") from error
    return context


def read_arguments(arguments: list[str]) -> tuple[ProxyConfig, argparse.Namespace]:
    """The configuration that the command line describes.

    Parsed by argparse, as by the published example proxy: lists after one option, and abbreviated options.

    Raises:
        ConfigError: hosts and ports don't pair up, or a value is out of its range.
    """
    given = _parser().parse_args(arguments)
    for option, why in _OBSOLETE.items():
        if getattr(given, option[2:].replace("-", "_")) not in (None, "1"):
            logging.getLogger("isochunk.proxy").warning("%s is accepted and has no effect: %s", option, why)
    waits = (given.max_waiting_retries, given.waiting_retry_interval)
    give_up_s = None if waits == (None, None) else (waits[0] or 3) * (waits[1] or 10.0)
    nodes = load_nodes(given.nodes) if given.nodes else _nodes(given)
    for role, kind in ((Role.PREFILL, "prefiller"), (Role.DECODE, "decoder")):
        if not nodes.get(role) and not given.nodes and not (given.admin_key or given.api_key):
            raise ConfigError(f"no {role} nodes: give --{kind}-hosts and --{kind}-ports, or --nodes FILE")
    timeouts = Timeouts(
        prefill_s=given.prefill_timeout,
        first_s=given.first_token_timeout,
        silence_s=given.silence_timeout,
        lame_duck_s=given.lame_duck,
        drain_s=given.drain_timeout,
        probe_s=given.probe_interval,
        probe_answer_s=given.probe_timeout,
    )
    config = ProxyConfig(
        nodes=nodes,
        nodes_file=given.nodes,
        attempts=given.max_retries,
        retry_delay_s=given.retry_delay,
        skip_prefill=read_skip(given.skip_prefill),
        give_up_s=give_up_s,
        node_ca=given.node_ca_file,
        deadline_s=given.deadline,
        api_key=given.api_key,
        admin_key=given.admin_key or given.api_key,
        node_key=given.node_api_key,
        access_log=given.access_log,
        limits=Limits(
            connections=given.max_connections,
            connections_each=given.max_connections_per_client,
            head_bytes=given.max_header_kib << 10,
            headers=given.max_headers,
            head_s=given.header_timeout,
            body_bytes=given.max_body_mib << 20,
            bodies_bytes=given.max_bodies_mib << 20,
            body_s=given.body_timeout,
            idle_s=given.idle_timeout,
        ),
        timeouts=timeouts,
    )
    return config, given


def _add_limits(add: Callable[..., object]) -> None:
    known = Limits()
    add("--max-connections", type=int, default=known.connections, metavar="N",
        help="of all clients; also bounded by the limit of open files (%(default)s)")  # fmt: skip
    add("--max-connections-per-client", type=int, default=known.connections_each, metavar="N",
        help="of one address; as many as in all behind another proxy (%(default)s)")  # fmt: skip
    add("--max-header-kib", type=int, default=known.head_bytes >> 10, metavar="KIB", help="of a request (%(default)s)")
    add("--max-headers", type=int, default=known.headers, metavar="N", help="of a request (%(default)s)")
    add("--max-body-mib", type=int, default=known.body_bytes >> 20, metavar="MIB", help="of a request (%(default)s)")
    add("--max-bodies-mib", type=int, default=known.bodies_bytes >> 20, metavar="MIB",
        help="of all requests in flight, one client having half of it (%(default)s)")  # fmt: skip
    add("--header-timeout", type=float, default=known.head_s, metavar="S", help="for a request's head (%(default)s)")
    add("--body-timeout", type=float, default=known.body_s, metavar="S",
        help="for a request's body, and a second more for each 64 KiB (%(default)s)")  # fmt: skip
    add("--idle-timeout", type=float, default=known.idle_s, metavar="S", help="between two requests (%(default)s)")


def _nodes(given: argparse.Namespace) -> Nodes:
    bootstraps = given.prefiller_bootstrap_ports
    prefill = _paired("prefiller", given.prefiller_hosts, given.prefiller_ports)
    if bootstraps and len(bootstraps) != len(prefill):
        raise ConfigError(
            f"{len(bootstraps)} --prefiller-bootstrap-ports for {len(prefill)} P nodes: give one for each"
        )
    if bootstraps:
        prefill = tuple(
            NodeSpec(spec.host, spec.port, bootstrap=f"http://{NodeSpec(spec.host, port).name}")
            for spec, port in zip(prefill, bootstraps, strict=True)
        )
    return {Role.PREFILL: prefill, Role.DECODE: _paired("decoder", given.decoder_hosts, given.decoder_ports)}


def _paired(kind: str, hosts: list[str], ports: list[int]) -> tuple[NodeSpec, ...]:
    if len(hosts) == 1:
        hosts = hosts * len(ports)
    if len(hosts) != len(ports):
        raise ConfigError(
            f"{len(hosts)} --{kind}-hosts do not fit {len(ports)} --{kind}-ports: give a port for each host"
        )
    return tuple(NodeSpec(host, port) for host, port in zip(hosts, ports, strict=True))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="isochunk proxy",
        description="Send each request to a P node for its prefill and then to a D node for its answer.",
    )
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: loopback only)")
    add("--port", type=int, default=8000, help="port to listen on; 0 for any free one")
    add("--prefiller-hosts", nargs="+", default=["localhost"], metavar="HOST", help="P nodes; one for all ports, too")
    add("--prefiller-ports", nargs="+", type=int, default=[], metavar="PORT", help="their ports, in the same order")
    add("--decoder-hosts", nargs="+", default=["localhost"], metavar="HOST", help="D nodes")
    add("--decoder-ports", nargs="+", type=int, default=[], metavar="PORT", help="their ports")
    add("--prefiller-bootstrap-ports", nargs="+", type=int, default=[], metavar="PORT",
        help="the P nodes' VLLM_MOONCAKE_BOOTSTRAP_PORT, for vLLM's MooncakeConnector only")  # fmt: skip
    add("--nodes", type=Path, metavar="FILE", help="nodes in YAML, in place of the lists; read again on SIGHUP")
    add("--deadline", type=float, metavar="S", help="answer 429 when the predicted TTFT is longer")
    add("--max-retries", type=int, default=3, metavar="N", help="attempts for a request (default: %(default)s)")
    add("--retry-delay", type=float, default=0.001, metavar="S",
        help="before a request is computed again (%(default)s)")  # fmt: skip
    add("--skip-prefill", default="off", metavar="N",
        help="leave P out for prompts of which a D node must compute at most N tokens; auto: as many as P's model "
        "and the hand-over say (%(default)s)")  # fmt: skip
    add("--max-waiting-retries", type=int, metavar="N",
        help="remove a node from /instances/add that is not up after N intervals (default: keep it)")  # fmt: skip
    add("--waiting-retry-interval", type=float, metavar="S", help="such an interval (10)")
    add("--ssl-certfile", type=Path, metavar="FILE", help="speak HTTPS to clients")
    add("--ssl-keyfile", type=Path, metavar="FILE", help="the certificate's key, if it is in a file of its own")
    add("--node-ca-file", type=Path, metavar="FILE", help="certificates of nodes that are given as https://host:port")
    add("--api-key", default=os.environ.get("ISOCHUNK_API_KEY"), metavar="KEY",
        help="required on every route; also from ISOCHUNK_API_KEY, where other users can't see it")  # fmt: skip
    add("--admin-key", default=os.environ.get("ISOCHUNK_ADMIN_KEY"), metavar="KEY",
        help="opens /instances/add and /remove; also from ISOCHUNK_ADMIN_KEY (default: the API key)")  # fmt: skip
    add("--node-api-key", default=os.environ.get("ISOCHUNK_NODE_API_KEY"), metavar="KEY",
        help="sent to the nodes; also from ISOCHUNK_NODE_API_KEY (default: what the client sends)")  # fmt: skip
    _add_limits(add)
    add("--prefill-timeout", type=float, default=1800.0, metavar="S", help="for a P node's answer (%(default)s)")
    add("--first-token-timeout", type=float, default=120.0, metavar="S", help="for a stream's first byte (%(default)s)")
    add("--silence-timeout", type=float, default=120.0, metavar="S", help="between a stream's pieces (%(default)s)")
    add(
        "--drain-timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="for requests in flight at SIGTERM (%(default)s)",
    )
    add("--lame-duck", type=float, default=2.0, metavar="S",
        help="after SIGTERM serve on so long while /health is refused (%(default)s)")  # fmt: skip
    add("--access-log", action=argparse.BooleanOptionalAction, default=True, help="a line for each request (on)")
    add("--probe-interval", type=float, default=5.0, metavar="S", help="between two looks at a node (%(default)s)")
    add("--probe-timeout", type=float, default=10.0, metavar="S", help="for a node's answer to a look (%(default)s)")
    add("--log-level", default="info", type=str.lower, choices=("debug", "info", "warning", "error", "critical"))
    for option in _OBSOLETE:
        add(option, help=argparse.SUPPRESS)
    return parser
