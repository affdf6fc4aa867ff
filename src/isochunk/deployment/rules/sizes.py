"""Parallel sizes: that they divide the model, fit each other, and are what connectors are told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from isochunk.deployment.kinds import ASCEND, NIXL, handing_over
from isochunk.deployment.node import Connector, Deployment, Node
from isochunk.deployment.rules.rule import Faults, error, of_deployment, of_nodes

__all__: list[str] = []

_SIZES = (("pipeline", "pp_size"), ("tensor", "tp_size"), ("data", "dp_size"))


@of_nodes("tensor-divides-heads")
def _heads(node: Node) -> Faults:
    """The tensor size divides the attention heads, and divides the KV heads or is a multiple."""
    tensor, shape = node.size("tensor"), node.shape
    if tensor is None or shape.heads is None:
        return
    if shape.heads % tensor:
        yield error(
            node,
            "--tensor-parallel-size",
            f"--tensor-parallel-size {tensor} does not divide the {shape.heads} attention heads of {node.model}",
            "vLLM stops",
            f"use one of {_divisors(shape.heads)}",
        )
    elif not shape.latent and shape.kv_heads and shape.kv_heads % tensor and tensor % shape.kv_heads:
        yield error(
            node,
            "--tensor-parallel-size",
            f"--tensor-parallel-size {tensor} and {shape.kv_heads} KV heads of {node.model}: neither divides the other",
            "vLLM stops",
            f"use one of {_divisors(shape.heads)}",
        )


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in (1, 2, 4, 8, 16, 32) if number % n == 0)


@of_nodes("stages-have-layers")
def _layers(node: Node) -> Faults:
    """There are at least as many layers as pipeline stages."""
    stages, layers = node.size("pipeline"), node.shape.layers
    if stages and layers and stages > layers:
        yield error(
            node,
            "--pipeline-parallel-size",
            f"{stages} stages for {layers} layers",
            "a stage would be empty",
            f"use at most {layers}",
        )


@of_nodes("no-stages-on-d")
def _decode_stages(node: Node) -> Faults:
    """D has no pipeline stages."""
    stages = node.size("pipeline")
    if node.role == "decode" and stages and stages > 1:
        yield error(
            node,
            "--pipeline-parallel-size",
            f"a D node with --pipeline-parallel-size {stages}",
            "connectors refuse it, and it slows each token",
            "drop the option; use tensor or data parallelism on D",
        )


@of_nodes("stages-or-context")
def _context(node: Node) -> Faults:
    """With vLLM-Ascend's connectors a node has stages or a parallel prefill context, not both."""
    stages, context = node.size("pipeline"), node.number("prefill_context_parallel_size")
    if handing_over(node) & ASCEND and stages and context and stages > 1 and context > 1:
        yield error(
            node,
            "--prefill-context-parallel-size",
            "pipeline stages and a parallel prefill context",
            "the connector takes one of them",
            "keep the stages",
        )


@of_deployment("tensor-sizes-fit")
def _both(deployment: Deployment) -> Faults:
    """The tensor sizes of P and D divide one another; on Ascend P's is not below D's."""
    for prefill, decode in deployment.pairs():
        p, d = prefill.size("tensor"), decode.size("tensor")
        if p is None or d is None:
            continue
        names = handing_over(prefill) & handing_over(decode)
        if names & (NIXL | ASCEND | {"MooncakeConnector"}) and p % d and d % p:
            yield error(
                decode,
                "--tensor-parallel-size",
                f"--tensor-parallel-size {d}, and {p} on {prefill.name}: neither divides the other",
                "the ranks' parts of the KV heads don't fit together",
                f"use a divisor or multiple of {p}",
            )
        elif names & ASCEND and p < d:
            yield error(
                decode,
                "--tensor-parallel-size",
                f"--tensor-parallel-size {d} is above the {p} of {prefill.name}",
                "vLLM-Ascend's connectors need P's tensor size to be at least D's",
                f"use at most {p} on D",
            )
        elif names & NIXL and p > d and _replicated(prefill, p):
            yield error(
                decode,
                "--tensor-parallel-size",
                f"--tensor-parallel-size {p} on {prefill.name} repeats its {prefill.shape.kv_heads} KV heads, and "
                f"D has only {d}",
                "NIXL refuses P with repeated KV heads before a smaller D",
                f"use at most {prefill.shape.kv_heads} on P, or {p} on D",
            )


def _replicated(node: Node, tensor: int) -> bool:
    return not node.shape.latent and node.shape.kv_heads is not None and tensor > node.shape.kv_heads


@of_deployment("told-sizes")
def _told(deployment: Deployment) -> Faults:
    """vLLM-Ascend's connectors are told the parallel sizes of both sides, as the nodes have them."""
    for node in deployment.nodes:
        for connector in node.connectors:
            if connector.name in ASCEND and "kv_transfer_config" not in node.unknown:
                yield from _sides(deployment, node, connector)


def _sides(deployment: Deployment, node: Node, connector: Connector) -> Faults:
    prefill, decode = deployment.role("prefill"), deployment.role("decode")
    for side, others in (("prefill", prefill), ("decode", decode)):
        peers = (node,) if node.role == side else others
        told = connector.extra.get(side)
        if not isinstance(told, Mapping):
            size = _example(peers)
            yield error(
                node,
                "--kv-transfer-config",
                f"{connector.name} needs kv_connector_extra_config.{side} with the parallel sizes",
                "the node stops, or takes KV from the wrong rank",
                f'add "{side}": {size}',
            )
            continue
        missing = [key for key in ("tp_size", "dp_size") if key not in told]
        if missing and connector.name != "MooncakeLayerwiseConnector":
            yield error(
                node,
                "--kv-transfer-config",
                f"kv_connector_extra_config.{side} has no {missing[0]}",
                "the connector stops without it",
                f'add "{side}": {_example(peers)}',
            )
        if side == "decode" and told.get("pp_size", 1) not in (1, None):
            yield error(
                node,
                "--kv-transfer-config",
                f"kv_connector_extra_config.decode.pp_size is {told['pp_size']}",
                "the connector refuses a D with stages",
                "set it to 1, or leave it out",
            )
            continue
        if peers and not any(_agrees(told, peer) for peer in peers):
            yield from _differs(node, side, told, peers[0])


def _agrees(told: Mapping[str, object], peer: Node) -> bool:
    return not any(True for _ in _differences(told, peer))


def _differences(told: Mapping[str, object], peer: Node) -> Iterator[tuple[str, str, object, int]]:
    for kind, key in _SIZES:
        real, said = peer.size(kind), told.get(key, 1)
        if real is not None and said is not None and said != real:
            yield kind, key, told.get(key, "missing"), real


def _differs(node: Node, side: str, told: Mapping[str, object], peer: Node) -> Faults:
    for kind, key, said, real in _differences(told, peer):
        yield error(
            node,
            "--kv-transfer-config",
            f"kv_connector_extra_config.{side}.{key} is {said}, and {peer.name} has --{kind}-parallel-size {real}",
            "KV is mapped to the wrong rank",
            f"set it to {real} on every node",
        )


def _example(peers: tuple[Node, ...]) -> str:
    sizes = {key: (peers[0].size(kind) if peers else None) or 1 for kind, key in _SIZES}
    return f'{{"tp_size": {sizes["tp_size"]}, "dp_size": {sizes["dp_size"]}, "pp_size": {sizes["pp_size"]}}}'
