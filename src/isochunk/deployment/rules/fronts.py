"""The proxy: it knows all nodes and no others, and speaks their connector's language."""

from __future__ import annotations

import re

from isochunk.deployment.command import is_unknown
from isochunk.deployment.front import LOOPBACK, Address, api_ports, reaches
from isochunk.deployment.kinds import ASCEND, NIXL, handing_over
from isochunk.deployment.machines import machine
from isochunk.deployment.node import Deployment, Front, Node
from isochunk.deployment.rules.rule import Faults, error, of_deployment
from isochunk.deployment.rules.same import api_keys

__all__: list[str] = []

# Proxies by their names, and the connectors whose requests they can make. Others are not judged.
_LAYERWISE = frozenset(("MooncakeLayerwiseConnector",))
_ANSWERED = NIXL | (ASCEND - _LAYERWISE) | {"LMCacheConnectorV1"}
_SPEAKS: tuple[tuple[str, frozenset[str], str], ...] = (
    (r"isochunk|proxy", NIXL | (ASCEND - _LAYERWISE) | {"MooncakeConnector"}, "isochunk proxy"),
    (r".*load_balance_proxy_layerwise\w*\.py", _LAYERWISE, "vLLM-Ascend's layerwise proxy"),
    (r".*load_balance_proxy_server\w*\.py", NIXL | (ASCEND - _LAYERWISE), "vLLM-Ascend's proxy"),
    (r"toy_proxy_server\.py", _ANSWERED, "NIXL's toy proxy"),
    (r".*mooncake_(connector_)?proxy\.py", frozenset(("MooncakeConnector",)), "Mooncake's proxy"),
    (r".*disagg_proxy_p2p_nccl_xpyd\.py", frozenset(("P2pNcclConnector",)), "P2pNccl's proxy"),
    (r".*moriio_toy_proxy\w*\.py", frozenset(("MoRIIOConnector",)), "MoRIIO's proxy"),
)
_NEEDS = {
    "MooncakeLayerwiseConnector": "vLLM-Ascend's load_balance_proxy_layerwise_server_example.py, which asks D first",
    "MooncakeConnector": "isochunk proxy with --prefiller-bootstrap-ports, or vLLM's mooncake_connector_proxy.py",
    "P2pNcclConnector": "vLLM's disagg_proxy_p2p_nccl_xpyd.py, which puts addresses into request ids",
    "MoRIIOConnector": "vLLM's moriio_toy_proxy_server.py",
    "LMCacheConnectorV1": "LMCache's disagg_proxy_server.py",
    "ExampleConnector": "a proxy that sends the same prompt to P and then to D",
}


@of_deployment("both-roles")
def _both(deployment: Deployment) -> Faults:
    """A deployment has P nodes and D nodes."""
    if len([node for node in deployment.nodes if not node.headless]) < 2 and not deployment.fronts:
        return
    known = {node.role for node in deployment.nodes}
    for role in ("prefill", "decode"):
        if role not in known and None not in known:
            yield error(
                "deployment", None, f"no {role} node", "nobody hands over, or nobody takes", f"add one under {role!r}"
            )


@of_deployment("proxy-knows-nodes")
def _knows(deployment: Deployment) -> Faults:
    """The proxy is told the host and port of every node, and of no other."""
    for front in deployment.fronts:
        for role, told in (("prefill", front.prefill), ("decode", front.decode)):
            nodes = deployment.role(role)
            if told is None or not nodes:
                continue
            yield from _compared(front, role, told, nodes)


def _compared(front: Front, role: str, told: tuple[Address, ...], nodes: tuple[Node, ...]) -> Faults:
    kind = {"prefill": "prefiller", "decode": "decoder"}[role]
    option = next((f"--{name}" for name in front.options if name.startswith(kind[:6]) and "port" in name), None)
    option = option or next((f"--{name}" for name in front.options if name.startswith(kind[:6])), f"--{kind}-ports")
    strange = [address for address in told if not any(reaches(address, node) for node in nodes)]
    forgotten = [node for node in nodes if not any(reaches(address, node) for address in told)]
    listening = ", ".join(f"{node.name} listens on {_address(node)}" for node in forgotten or nodes)
    if strange:
        host, port = strange[0]
        yield error(
            front,
            option,
            f"{option} names {host}:{port}, and {listening}",
            f"no {role} node answers there",
            "name each node's host and --port, in the same order",
        )
    elif forgotten:
        yield error(
            front,
            option,
            f"{option} does not name a {role} node: {listening}",
            "it gets no requests",
            "name each node's host and --port",
        )
    elif len(told) < len([node for node in nodes if node.port is not None and not _ranks(node)]):
        yield error(
            front,
            option,
            f"{option} names {len(told)} of {len(nodes)} {role} nodes",
            "the others get no requests",
            "name each node's host and --port",
        )


def _ranks(node: Node) -> bool:
    """Whether a command is one of many that a launcher starts from it."""
    return "port" in node.unknown


def _address(node: Node) -> str:
    ports = list(api_ports(node))
    host = node.host or node.get("host") or "its machine"
    return f"{host}:{ports[0]}" if ports else str(host)


@of_deployment("proxy-lists-match")
def _lists(deployment: Deployment) -> Faults:
    """The proxy is told as many hosts as ports, or one host."""
    for front in deployment.fronts:
        for kind in ("prefiller", "decoder"):
            hosts, ports = (
                front.options.get(f"{kind}-{what}", front.options.get(f"{kind}-{what[:-1]}", ()))
                for what in ("hosts", "ports")
            )
            if len(hosts) > 1 and ports and len(hosts) != len(ports):
                yield error(
                    front,
                    f"--{kind}-ports",
                    f"{len(hosts)} {kind} hosts and {len(ports)} ports",
                    "the proxy stops, or pairs them wrongly",
                    "give one port for each host",
                )


@of_deployment("proxy-speaks-connector")
def _speaks(deployment: Deployment) -> Faults:
    """The proxy makes the requests that the connector needs."""
    names = frozenset(name for node in deployment.nodes if node.role for name in handing_over(node))
    for front in deployment.fronts:
        program = front.program.rsplit("/", 1)[-1]
        for pattern, speaks, called in _SPEAKS:
            if not re.fullmatch(pattern, program):
                continue
            strange = sorted(name for name in names if name in _NEEDS and name not in speaks)
            if not strange and names and speaks in (_LAYERWISE, frozenset(("MooncakeConnector",))):
                strange = sorted((names & (NIXL | ASCEND)) - speaks)
            if strange and not names & speaks:
                yield error(
                    front,
                    None,
                    f"{called} before nodes with {strange[0]}",
                    "its requests lack what the connector needs, and D gets no KV",
                    f"use {_NEEDS.get(strange[0], 'isochunk proxy')}",
                )
            break


@of_deployment("router-keeps-stages")
def _router(deployment: Deployment) -> Faults:
    """No `vllm-router` between NIXL nodes whose P has stages."""
    for front in deployment.fronts:
        staged = [node for node in deployment.role("prefill") if (node.size("pipeline") or 1) > 1]
        if "vllm-router" in front.program and staged and handing_over(staged[0]) & NIXL:
            yield error(
                front,
                None,
                f"vllm-router before {staged[0].name} with stages and NIXL",
                "it drops pp_size, so D waits for the first stage only and answers are silently wrong",
                "use isochunk proxy",
            )


@of_deployment("proxy-knows-bootstrap")
def _bootstrap(deployment: Deployment) -> Faults:
    """isochunk's proxy is told the bootstrap port of every P node with vLLM's MooncakeConnector."""
    boots = [node for node in deployment.role("prefill") if "MooncakeConnector" in handing_over(node)]
    for front in deployment.fronts:
        if front.program not in ("isochunk", "proxy") or not boots or "nodes" in front.options:
            continue
        told = front.options.get("prefiller-bootstrap-ports") or front.options.get("prefiller-bootstrap-port") or ()
        real = [node.env_number("VLLM_MOONCAKE_BOOTSTRAP_PORT", 8998) for node in boots]
        if not told:
            yield error(
                front,
                "--prefiller-bootstrap-ports",
                "no --prefiller-bootstrap-ports",
                "MooncakeConnector's D nodes must be told the P nodes' bootstrap servers",
                "add --prefiller-bootstrap-ports with each P node's VLLM_MOONCAKE_BOOTSTRAP_PORT",
            )
        elif None not in real and sorted(map(str, told)) != sorted(map(str, real)) and all(t.isdigit() for t in told):
            yield error(
                front,
                "--prefiller-bootstrap-ports",
                f"--prefiller-bootstrap-ports {' '.join(told)}, and the P nodes have {' '.join(map(str, real))}",
                "D asks for P's ranks where nobody answers",
                "name each P node's VLLM_MOONCAKE_BOOTSTRAP_PORT",
            )


@of_deployment("proxy-port-apart")
def _own_port(deployment: Deployment) -> Faults:
    """The proxy's own port is not that of a node on its machine."""
    for front in deployment.fronts:
        told = front.options.get("port", ())
        port = told[0] if told else "8000" if front.program == "isochunk" else ""
        for node in deployment.nodes:
            if node.host is None and machine(node) is None and port.isdigit() and node.port == int(port):
                yield error(
                    front,
                    "--port",
                    f"the proxy listens on {port}, and so does {node.name}",
                    "the second to start stops",
                    "give the proxy another --port",
                )


@of_deployment("api-reachable")
def _reachable(deployment: Deployment) -> Faults:
    """A node that a proxy reaches from another machine does not listen on loopback only."""
    for front in deployment.fronts:
        for role, told in (("prefill", front.prefill), ("decode", front.decode)):
            for node in deployment.role(role):
                if node.get("host") not in ("localhost", "127.0.0.1", "::1"):
                    continue
                away = [host for host, port in told or () if host not in LOOPBACK and port in (None, node.port)]
                if away and node.host is not None:
                    yield error(
                        node,
                        "--host",
                        f"--host {node.get('host')}, and the proxy looks for it at {away[0]}",
                        "it listens on its own loopback address only",
                        "use --host 0.0.0.0, or the machine's address",
                    )


@of_deployment("proxy-node-key")
def _node_key(deployment: Deployment) -> Faults:
    """isochunk's proxy sends the nodes a key that they take."""
    for front in deployment.fronts:
        if front.program != "isochunk":
            continue
        sent = front.options.get("node-api-key")
        for node in deployment.nodes:
            keys = api_keys(node) if node.role and not node.headless else None
            if not keys or (sent and (sent[0] in keys or is_unknown(sent[0]))) or any(map(is_unknown, keys)):
                continue
            if sent or "api-key" in front.options:
                yield error(
                    front,
                    "--node-api-key",
                    "--node-api-key is not the API key of " + node.name if sent else f"{node.name} wants an API key",
                    "the client's key is for the proxy and is not handed on, so the node answers 401",
                    "give the proxy --node-api-key with the nodes' key",
                )
