"""Schedulers by role: what vLLM-Ascend allows on P, on D, and on neither."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from isochunk.deployment.node import Node
from isochunk.deployment.rules.rule import Faults, error, of_nodes, warning

__all__: list[str] = []


def _on(node: Node, key: str) -> bool:
    """Whether a scheduler is on that `scheduler_config` names, or the top of `additional_config`, as before 0.25."""
    return any(
        value is True or (isinstance(value, Mapping) and value.get("enabled") is True) for value in _values(node, key)
    )


def _values(node: Node, key: str) -> Iterator[object]:
    additional = node.get("additional_config")
    if isinstance(additional, Mapping):
        section = additional.get("scheduler_config")
        yield from (place.get(key) for place in (additional, section) if isinstance(place, Mapping))


@of_nodes("balance-scheduling")
def _balance(node: Node) -> Faults:
    """Balance scheduling is for nodes that are P and D at once, and not beside isochunk."""
    on = _on(node, "enable_balance_scheduling") or node.env.get("VLLM_ASCEND_BALANCE_SCHEDULING") == "1"
    if not on:
        return
    if node.plans:
        yield error(
            node,
            "--additional-config",
            "enable_balance_scheduling and isochunk exclude each other",
            "both decide the chunks, and isochunk refuses to start",
            "drop one of them",
        )
    elif node.kv.get("kv_role") in ("kv_producer", "kv_consumer"):
        yield error(
            node,
            "--additional-config",
            f"enable_balance_scheduling with kv_role {node.kv['kv_role']}",
            "vLLM-Ascend refuses it where P and D are apart",
            "drop it",
        )


@of_nodes("d-schedulers")
def _decode(node: Node) -> Faults:
    """vLLM-Ascend's recompute and DyntraLB schedulers are for D, short-request-first is for P."""
    if node.role == "decode":
        if _on(node, "short_request_first_config"):
            yield error(
                node,
                "--additional-config",
                "short_request_first_config on a D node",
                "vLLM-Ascend refuses it there: D has no prompts to order",
                "enable it on P only",
            )
    elif node.role == "prefill":
        if _on(node, "dyntra_lb_config"):
            yield error(
                node,
                "--additional-config",
                "dyntra_lb_config on a P node",
                "vLLM-Ascend refuses it there",
                "enable it on D only",
            )
        if _on(node, "recompute_scheduler_enable"):
            yield warning(
                node,
                "--additional-config",
                "recompute_scheduler_enable on a P node",
                "vLLM-Ascend ignores it there, and versions before 0.25 did not",
                "keep it on D only",
            )
