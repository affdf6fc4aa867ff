"""Ports and addresses of one machine: of the API, of side channels, and of each rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from isochunk.deployment.command import is_unknown
from isochunk.deployment.front import LOOPBACK
from isochunk.deployment.kinds import ASCEND, NIXL, mode
from isochunk.deployment.machines import local_ranks, machine, needed_devices, shown_devices
from isochunk.deployment.node import Connector, Deployment, Node
from isochunk.deployment.rules.rule import Faults, error, of_deployment, of_nodes, warning

__all__: list[str] = []

NIXL_HOST, NIXL_PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"
BOOTSTRAP = "VLLM_MOONCAKE_BOOTSTRAP_PORT"
_NIXL_DEFAULT, _BOOTSTRAP_DEFAULT = 5600, 8998
_RESERVED_FROM, _RESERVED_EACH = 20_000, 1_000


@dataclass(frozen=True, slots=True)
class _Claim:
    """Ports that a node takes on its machine, and the option that says so."""

    node: Node
    option: str
    ports: range
    what: str


def _claims(node: Node) -> Iterator[_Claim]:
    if node.port is not None and "port" not in node.unknown and node.get("uds") is None:
        yield _Claim(node, "--port", range(node.port, node.port + 1), "its API")
    for connector in node.connectors:
        yield from _side_channels(node, connector)


def _side_channels(node: Node, connector: Connector) -> Iterator[_Claim]:
    ranks = local_ranks(node)
    if ranks is None:
        return
    if connector.name in NIXL and (base := node.env_number(NIXL_PORT, _NIXL_DEFAULT)) is not None:
        yield _Claim(
            node,
            NIXL_PORT,
            range(base + ranks.start, base + ranks.stop),
            "NIXL's side channel, one port a data-parallel rank",
        )
    if connector.name == "MooncakeConnector" and node.role == "prefill" and ranks.start == 0 and not node.headless:
        base = node.env_number(BOOTSTRAP, _BOOTSTRAP_DEFAULT)
        if base is not None:
            yield _Claim(node, BOOTSTRAP, range(base, base + 1), "Mooncake's bootstrap server")
    if connector.name in ASCEND and (claimed := _kv_ports(node, connector)) is not None:
        yield _Claim(node, "--kv-transfer-config", claimed, "kv_port, one port a rank")


def _kv_ports(node: Node, connector: Connector) -> range | None:
    """Ports of vLLM-Ascend's connectors: from ``kv_port`` on, one for each rank of the node."""
    ranks, sizes = local_ranks(node), [node.size("tensor"), node.size("pipeline")]
    base = connector.config.get("kv_port", 14_579)
    base = int(base) if isinstance(base, str) and base.isdigit() else base
    if ranks is None or None in sizes or not isinstance(base, int):
        return None
    each = (sizes[0] or 1) * (sizes[1] or 1) * (node.number("prefill_context_parallel_size") or 1)
    return range(base + ranks.start * each, base + ranks.stop * each)


@of_deployment("ports-apart")
def _apart(deployment: Deployment) -> Faults:
    """Nodes on one machine share no port: API, NIXL's (base + rank), bootstrap, `kv_port` + ranks."""
    claims = [claim for node in deployment.nodes for claim in _claims(node)]
    told: set[tuple[str, str]] = set()
    for index, claim in enumerate(claims):
        for other in claims[:index]:
            first, end = max(claim.ports.start, other.ports.start), min(claim.ports.stop, other.ports.stop)
            same = claim.node is other.node
            if not same and other.node.foreground and not deployment.fronts and not (claim.node.role or claim.node.kv):
                continue  # a guide's alternatives, one after the other
            if first >= end or machine(claim.node) != machine(other.node) or (claim.node.name, claim.option) in told:
                continue
            if same and claim.option == other.option:
                continue
            told.add((claim.node.name, claim.option))
            whose = "it" if same else other.node.name
            used = f"{other.option} of {whose}" if other.option != claim.option or not same else whose
            yield error(
                claim.node,
                claim.option,
                f"{_named(claim)} {_ports(claim)}: {first} is taken by {used} ({_ports(other)}, {other.what})",
                "the second to start stops, or answers for the first",
                f"give it ports of its own, such as {_free(claims, claim)}",
            )


def _named(claim: _Claim) -> str:
    return "kv_port" if claim.option == "--kv-transfer-config" else claim.option


def _ports(claim: _Claim) -> str:
    last = claim.ports.stop - 1
    return str(claim.ports.start) if last == claim.ports.start else f"{claim.ports.start} to {last}"


def _free(claims: list[_Claim], claim: _Claim) -> str:
    taken = [other.ports for other in claims if machine(other.node) == machine(claim.node)]
    base = claim.ports.start
    while any(base < ports.stop and ports.start < base + len(claim.ports) for ports in taken):
        base += max(len(claim.ports), 1)
    return str(base)


@of_deployment("published-ports-apart")
def _published(deployment: Deployment) -> Faults:
    """Containers publish different ports of their host, and the port on which vLLM listens."""
    owner: dict[int, Node] = {}
    for node in deployment.nodes:
        for outside, _ in node.published:
            if outside in owner and owner[outside] is not node:
                yield error(
                    node,
                    "--publish",
                    f"port {outside} is published by {owner[outside].name} too",
                    "the second container does not start",
                    "publish another port of the host",
                )
            owner.setdefault(outside, node)
        inside = {inner for _, inner in node.published}
        if node.published and node.port is not None and node.port not in inside:
            yield error(
                node,
                "--port",
                f"the container publishes port {min(inside)}, and vLLM listens on {node.port}",
                "nothing outside reaches it",
                f"publish {node.port}, or use --port {min(inside)}",
            )


@of_nodes("kv-port-not-reserved")
def _reserved(node: Node) -> Faults:
    """vLLM-Ascend's `kv_port` is not in 20000 to 27999 (with 16 NPUs 35999), Mooncake's own."""
    for connector in node.connectors:
        ports = _kv_ports(node, connector) if connector.name in ASCEND else None
        if ports is None or "kv_port" not in connector.config:
            continue
        end = _RESERVED_FROM + 8 * _RESERVED_EACH
        wide = _RESERVED_FROM + 16 * _RESERVED_EACH
        if ports.start < end and ports.stop > _RESERVED_FROM:
            yield error(
                node,
                "--kv-transfer-config",
                f"kv_port {ports.start} lies in {_RESERVED_FROM} to {end - 1}",
                "Mooncake's Ascend transport takes ports there at random: 'address already in use' now and then",
                f"use {end} or more with 8 NPUs, {wide} or more with 16",
            )
        elif ports.start < wide and ports.stop > _RESERVED_FROM and _many(node) > 8:
            yield warning(
                node,
                "--kv-transfer-config",
                f"kv_port {ports.start} lies in {_RESERVED_FROM} to {wide - 1}",
                "with 16 NPUs Mooncake's Ascend transport takes ports there at random: 'address already in use' "
                "now and then",
                f"use {wide} or more",
            )


def _many(node: Node) -> int:
    shown = shown_devices(node)
    highest = max((int(name) + 1 for name in shown or () if name.isdigit()), default=0)
    return max(highest, needed_devices(node) or 0, node.devices or 0)


@of_deployment("engine-ids-apart")
def _engines(deployment: Deployment) -> Faults:
    """No two nodes have one `engine_id`."""
    owner: dict[str, Node] = {}
    for node in deployment.nodes:
        name = node.kv.get("engine_id")
        if not isinstance(name, str) or node.headless:
            continue
        name = f"{name}, rank {node.get('data_parallel_rank')}" if node.get("data_parallel_rank") is not None else name
        if name in owner and not _one_group(node, owner[name]):
            yield error(
                node,
                "--kv-transfer-config",
                f"engine_id {name} is that of {owner[name].name} too",
                "KV is looked for on the wrong node",
                "give each node an engine_id of its own",
            )
        owner.setdefault(name, node)


def _one_group(node: Node, other: Node) -> bool:
    """Whether two commands are parts of one server over several machines."""
    return all(
        (each.number("nnodes") or 1) > 1 or each.get("data_parallel_start_rank") is not None for each in (node, other)
    )


@of_deployment("side-channel-host")
def _side_channel(deployment: Deployment) -> Faults:
    """Where P and D are on different machines, NIXL's side channel has an address they reach."""
    for node in deployment.nodes:
        if not node.role or mode(node) is None or (node.role == "decode" and mode(node) == "pull"):
            continue
        away = next(
            (peer for peer in deployment.nodes if peer.role and peer.role != node.role and _elsewhere(node, peer)), None
        )
        host = node.env.get(NIXL_HOST, "localhost")
        everywhere = host in ("0.0.0.0", "::")  # some gateways put the pod's address in its place
        if away is None or is_unknown(host) or not (host in LOOPBACK or everywhere or not host):
            continue
        if everywhere and not deployment.fronts:
            continue
        yield error(
            node,
            NIXL_HOST,
            f"{NIXL_HOST} is {host if NIXL_HOST in node.env else 'not set: localhost'}",
            f"{away.name} runs elsewhere and looks for this node at that address, so it finds itself",
            f"set {NIXL_HOST} to this machine's address{_like(node)}",
        )


def _elsewhere(node: Node, peer: Node) -> bool:
    """Whether two nodes are on different machines for certain: two files may be of one."""
    one, other = machine(node), machine(peer)
    return (
        one is not None and other is not None and one != other and not any(m.startswith("file ") for m in (one, other))
    )


def _like(node: Node) -> str:
    host = node.get("host")
    return f" ({host})" if isinstance(host, str) and host not in LOOPBACK and host != "::" else ""


@of_nodes("ports-valid")
def _valid(node: Node) -> Faults:
    """Ports are numbers from 1 to 65535, with those of all ranks."""
    for variable in (NIXL_PORT, BOOTSTRAP):
        text = node.env.get(variable)
        if text is not None and not is_unknown(text) and not text.strip().isdigit():
            yield error(node, variable, f"{variable}={text} is no port", "vLLM stops", "write a number")
    for claim in _claims(node):
        if claim.ports.start < 1 or claim.ports.stop > 65_536:
            yield error(
                node,
                claim.option,
                f"{_named(claim)} {_ports(claim)} is no port",
                "ports end at 65535",
                "use a port from 1024 to 65535",
            )
