"""KV connectors: there, known, in the right role, and fit for stages."""

from __future__ import annotations

import difflib

from isochunk.deployment.kinds import ASCEND, KEEPS, all_connectors, handing_over, is_ascend, mode
from isochunk.deployment.node import Connector, Deployment, Node
from isochunk.deployment.option_table import table
from isochunk.deployment.rules.rule import Faults, error, of_deployment, of_nodes, warning

__all__: list[str] = []

_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
_GONE = {
    "SharedStorageConnector": "ExampleConnector",
    "P2pNcclConnector": "NixlConnector",
    "PyNcclConnector": "NixlConnector",
    "LMCacheConnector": "LMCacheConnectorV1",
    "MooncakeStoreConnectorV1": "MooncakeStoreConnector",
}
_STAGES = {
    "NixlConnector": "it pulls, and fails every request when P has stages (number of KV layers must match)",
    "NixlPullConnector": "it pulls, and fails every request when P has stages (number of KV layers must match)",
    "LMCacheConnectorV1": "it computes the prompt again on D without a word where it can't transfer",
}
_FIRST_CHUNK = frozenset(("ExampleConnector", "SharedStorageConnector"))
_FIT = ("NixlPushConnector", "MooncakeConnector", *sorted(ASCEND))


def _hidden(node: Node) -> bool:
    """Whether nobody can see a node's connector here."""
    return "kv_transfer_config" in node.unknown or not node.whole


@of_nodes("connector-there")
def _there(node: Node) -> Faults:
    """P and D name a KV connector."""
    if node.role and not node.kv and not _hidden(node):
        yield error(
            node,
            "--kv-transfer-config",
            "no --kv-transfer-config",
            "its KV goes nowhere, and none comes",
            f'add one with "kv_role": "{_ROLES[node.role]}"',
        )
    elif node.kv and not node.kv.get("kv_connector") and not _hidden(node):
        yield error(
            node,
            "--kv-transfer-config",
            "kv_connector is missing",
            "no connector is made, and KV goes nowhere",
            "name one, such as NixlPushConnector",
        )


@of_nodes("connector-known")
def _known(node: Node) -> Faults:
    """vLLM or a plugin knows the connector by that name."""
    for connector in node.connectors:
        name = connector.name
        if "kv_connector_module_path" in connector.config or name == "None":
            continue
        if name in _GONE and name not in table()["connectors"] and not is_ascend(node):
            yield error(
                node,
                "--kv-transfer-config",
                f"{name} is not in vLLM {table()['vllm']} any more",
                "vLLM stops",
                f"use {_GONE[name]}",
            )
        elif name not in all_connectors():
            near = difflib.get_close_matches(name, all_connectors(), n=1, cutoff=0.75)
            level = error if near else warning
            yield level(
                node,
                "--kv-transfer-config",
                f"connector {name!r} is not known",
                "vLLM stops, unless a plugin has it",
                f"did you mean {near[0]}?"
                if near
                else f"known to take a P with stages and a D without: {', '.join(_FIT)}",
            )
        elif name in ASCEND and _not_ascend(node):
            yield error(
                node,
                "--kv-transfer-config",
                f"{name} is vLLM-Ascend's connector",
                "vLLM on GPUs does not have it",
                "use MooncakeConnector",
            )


def _not_ascend(node: Node) -> bool:
    return any(name in node.env for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")) and not any(
        name.startswith(("ASCEND", "HCCL")) for name in node.env
    )


@of_nodes("connector-role")
def _role(node: Node) -> Faults:
    """A connector's `kv_role` is the node's: producer on P, consumer on D, or both."""
    for connector in ((Connector(str(node.kv.get("kv_connector")), node.kv),) if node.kv else ()) + (
        node.connectors if node.kv.get("kv_connector") == "MultiConnector" else ()
    ):
        said = connector.config.get("kv_role")
        if not node.role or (said is None and not connector.inner):
            continue
        if said is None:
            yield error(
                node,
                "--kv-transfer-config",
                f"{connector.name} inside the MultiConnector has no kv_role",
                "vLLM stops",
                f'add "kv_role": "{_ROLES[node.role]}"',
            )
        elif said not in (_ROLES[node.role], "kv_both") and connector.name not in KEEPS:
            yield error(
                node,
                "--kv-transfer-config",
                f"kv_role is {said!r} on a {node.role} node",
                "it would wait for KV that never comes, or keep what nobody fetches",
                f"use {_ROLES[node.role]!r}",
            )


@of_deployment("connector-hands-over")
def _hands_over(deployment: Deployment) -> Faults:
    """P and D have a connector that brings KV to another node; inside a MultiConnector too."""
    if len(deployment.nodes) > 1 or deployment.fronts:
        for node in deployment.nodes:
            yield from _keeps(node)


def _keeps(node: Node) -> Faults:
    if not node.role or not node.kv.get("kv_connector") or _hidden(node):
        return
    if node.kv["kv_connector"] == "MultiConnector" and not node.connectors:
        yield error(
            node,
            "--kv-transfer-config",
            "the MultiConnector has no connectors",
            "vLLM stops",
            'list them in kv_connector_extra_config: {"connectors": [...]}',
        )
    elif not handing_over(node):
        names = ", ".join(sorted(connector.name for connector in node.connectors))
        yield error(
            node,
            "--kv-transfer-config",
            f"{names} keeps KV for its own node and hands none over",
            "D computes every prompt again",
            f"use one of {', '.join(_FIT[:3])}",
        )


@of_deployment("connector-takes-stages")
def _stages(deployment: Deployment) -> Faults:
    """Where P has stages the connector takes a P with them and a D without."""
    for node in deployment.nodes:
        for connector in node.connectors:
            if connector.name in _FIRST_CHUNK and node.role:
                yield error(
                    node,
                    "--kv-transfer-config",
                    f"{connector.name} stores the first chunk of a prompt only",
                    "a longer prompt ends the D node",
                    f"use one of {', '.join(_FIT[:3])}",
                )
            elif connector.name in _STAGES and _with_stages(deployment, node):
                yield error(
                    node,
                    "--kv-transfer-config",
                    f"{connector.name} with pipeline stages on P",
                    _STAGES[connector.name],
                    f"use one of {', '.join(_FIT[:3])}",
                )


def _with_stages(deployment: Deployment, node: Node) -> bool:
    """Whether a P node has stages, or a D node's P by the same connector."""
    peers = (node,) if node.role == "prefill" else deployment.role("prefill") if node.role else ()
    return any((peer.size("pipeline") or 1) > 1 and handing_over(peer) & handing_over(node) for peer in peers)


@of_deployment("one-connector")
def _one(deployment: Deployment) -> Faults:
    """P and D hand over by the same connector, and NIXL pushes on both or pulls on both."""
    for prefill, decode in deployment.pairs():
        of_p, of_d = handing_over(prefill), handing_over(decode)
        if not of_p or not of_d or _hidden(prefill) or _hidden(decode) or of_p & of_d:
            continue
        both = {mode(prefill), mode(decode)} == {"push", "pull"}
        why = (
            "one pushes and the other pulls, and NIXL refuses the handshake"
            if both
            else "they don't understand each other"
        )
        yield error(
            decode,
            "--kv-transfer-config",
            f"connector {', '.join(sorted(of_d))}, and {', '.join(sorted(of_p))} on {prefill.name}",
            why,
            "use one connector on P and D",
        )


@of_nodes("mooncake-tcp-queues")
def _tcp(node: Node) -> Faults:
    """Mooncake over TCP has queues long enough for long prompts."""
    for connector in node.connectors:
        if connector.name != "MooncakeConnector" or connector.extra.get("mooncake_protocol") != "tcp":
            continue
        for variable in ("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER"):
            if variable not in node.env:
                yield warning(
                    node,
                    variable,
                    f"{variable} is not set",
                    "Mooncake over TCP refuses transfers of more than about 2048 pieces",
                    f"set {variable}=65535",
                )
