"""What can be wrong with a PD deployment as a whole, one rule a function; and the check of everything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from isochunk.cli.deployment import Deployment, Server
from isochunk.cli.finding import Finding, Findings, error, warning
from isochunk.cli.node_rules import NODE_RULES

__all__ = ["check"]

_SAME = ("dtype", "kv-cache-dtype", "block-size", "quantization", "hf-overrides")
_SIZES = (("pipeline", "pp_size"), ("tensor", "tp_size"), ("data", "dp_size"))
_SIDE_CHANNEL = ("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600")
_BOOTSTRAP = ("VLLM_MOONCAKE_BOOTSTRAP_PORT", "8998")


def check(deployment: Deployment) -> list[Finding]:
    """All findings, errors first."""
    found = [f for server in deployment.servers for rule in NODE_RULES for f in rule(server)]
    found += [f for rule in _DEPLOYMENT_RULES for f in rule(deployment)]
    return sorted(found, key=lambda f: f.level)


def _sizes(server: Server, prefill: Server, decode: Server) -> Findings:
    """What the Ascend connector is told of both sides is what they are."""
    for side, other in (("prefill", prefill), ("decode", decode)):
        told = server.extra.get(side)
        if not isinstance(told, dict):
            yield error(
                server,
                f"{server.connector} needs kv_connector_extra_config.{side} with the parallel sizes",
                f'add "{side}": {{"tp_size": {other.size("tensor")}, "dp_size": {other.size("data")}, '
                f'"pp_size": {other.size("pipeline")}}}',
            )
            continue
        for kind, key in _SIZES:
            if told.get(key, 1) != other.size(kind):
                yield error(
                    server,
                    f"kv_connector_extra_config.{side}.{key} is {told.get(key, 'missing')}, and {other.name} has "
                    f"--{kind}-parallel-size {other.size(kind)}",
                    f"set it to {other.size(kind)} on every node",
                )


def _ascend_sizes(deployment: Deployment) -> Findings:
    prefill, decode = deployment.role("prefill"), deployment.role("decode")
    for server in deployment.servers:
        if server.connector in ("MooncakeConnectorV1", "MooncakeLayerwiseConnector") and prefill and decode:
            own_p = server if server.role == "prefill" else prefill[0]
            own_d = server if server.role == "decode" else decode[0]
            yield from _sizes(server, own_p, own_d)


def _same_everywhere(deployment: Deployment) -> Findings:
    """KV of one node means the same to the other."""
    if not deployment.servers:
        return
    first = deployment.servers[0]
    for server in deployment.servers[1:]:
        if server.model.rstrip("/").rsplit("/", 1)[-1] != first.model.rstrip("/").rsplit("/", 1)[-1]:
            yield error(server, f"serves {server.model}, and {first.name} {first.model}", "serve one model")
        for option in _SAME:
            if server.options.get(option) != first.options.get(option):
                yield error(
                    server,
                    f"--{option} is {server.options.get(option)}, and {first.options.get(option)} on {first.name}: "
                    "their KV does not mean the same",
                    "use the same value on all nodes",
                )
        if server.connector != first.connector:
            yield error(server, f"connector {server.connector}, and {first.connector} on {first.name}", "use one")


def _lengths(deployment: Deployment) -> Findings:
    for p in deployment.role("prefill"):
        for d in deployment.role("decode"):
            of_p, of_d = p.number("max-model-len"), d.number("max-model-len")
            if of_p and of_d and of_d < of_p:
                yield warning(
                    d,
                    f"--max-model-len {of_d} is below the {of_p} of {p.name}: longer prompts are computed and then "
                    "refused",
                    f"use {of_p} or more",
                )


def _unique(deployment: Deployment) -> Findings:
    """Ports on one host, and engine ids everywhere, are not shared."""
    places: Counter[tuple[str, str, str]] = Counter()
    owners: dict[tuple[str, str, str], Server] = {}
    for server in deployment.servers:
        for what, value in _claims(server):
            host = "" if what == "engine_id" else server.host
            places[(host, what, value)] += 1
            owners[(host, what, value)] = server
    for (host, what, value), count in places.items():
        if count > 1:
            where = f" on {host}" if host else ""
            yield error(owners[(host, what, value)], f"{what} {value} is used {count} times{where}", "use another one")


def _claims(server: Server) -> Iterator[tuple[str, str]]:
    yield "--port", str(server.options.get("port", 8000))
    for key in ("kv_port", "engine_id"):
        if key in server.kv:
            yield key, str(server.kv[key])
    if "Nixl" in str(server.connector):
        yield _SIDE_CHANNEL[0], server.env.get(*_SIDE_CHANNEL)
    if server.connector == "MooncakeConnector" and server.role == "prefill":
        yield _BOOTSTRAP[0], server.env.get(*_BOOTSTRAP)


def _both_roles(deployment: Deployment) -> Findings:
    if len(deployment.servers) < 2:
        return
    for role in ("prefill", "decode"):
        if not deployment.role(role):
            yield error("deployment", f"no {role} node", f"add one under {role!r}")


def _proxy(deployment: Deployment) -> Findings:
    """The proxy knows all nodes, and no others."""
    if not deployment.proxy:
        return
    options = _lists(deployment.proxy)
    for role, option in (("prefill", "prefiller-port"), ("decode", "decoder-port")):
        told = Counter(options.get(option, []))
        real = Counter(str(server.options.get("port", 8000)) for server in deployment.role(role))
        if "nodes" not in options and told != real:
            yield error(
                "proxy",
                f"--{option}s {' '.join(told.elements()) or 'is missing'}, and the {role} nodes listen on "
                f"{' '.join(real.elements())}",
                "name each node's --port, in the order of its host",
            )
    boots = any(s.connector == "MooncakeConnector" for s in deployment.role("prefill"))
    if boots and "nodes" not in options and "prefiller-bootstrap-port" not in options:
        yield error(
            "proxy",
            "MooncakeConnector's D nodes must be told the P nodes' bootstrap servers",
            f"add --prefiller-bootstrap-ports with each P node's {_BOOTSTRAP[0]}",
        )


def _lists(words: tuple[str, ...]) -> dict[str, list[str]]:
    """Options with all their values, in the singular as both forms are accepted."""
    options: dict[str, list[str]] = {}
    values: list[str] = []
    for word in words:
        if word.startswith("--"):
            key, _, value = word[2:].partition("=")
            values = options.setdefault(key.removesuffix("s") if key != "nodes" else key, [])
            values.extend([value] if value else [])
        else:
            values.append(word)
    return options


_DEPLOYMENT_RULES: tuple[Callable[[Deployment], Findings], ...] = (
    _both_roles,
    _ascend_sizes,
    _same_everywhere,
    _lengths,
    _unique,
    _proxy,
)
