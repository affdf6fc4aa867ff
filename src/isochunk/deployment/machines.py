"""Which nodes share a machine, and which devices and ranks a node has there."""

from __future__ import annotations

import re

from isochunk.deployment.command import is_unknown
from isochunk.deployment.front import LOOPBACK
from isochunk.deployment.node import Node

__all__ = ["local_ranks", "machine", "needed_devices", "shown_devices", "together"]

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
            "ZE_AFFINITY_MASK", "NVIDIA_VISIBLE_DEVICES", "ASCEND_VISIBLE_DEVICES")  # fmt: skip
_ADDRESSES = ("VLLM_HOST_IP", "VLLM_NIXL_SIDE_CHANNEL_HOST", "HCCL_IF_IP")


def machine(node: Node) -> str | None:
    """What tells a node's machine apart; None when nothing does. Containers and pods are machines of their own."""
    if node.host is not None:
        return node.host
    told = node.get("host")
    for name in (told, *(node.env.get(variable) for variable in _ADDRESSES)):
        if is_unknown(name):
            return None
        if isinstance(name, str) and name not in LOOPBACK and name != "::" and name:
            return name
    return None


def together(one: Node, other: Node) -> bool:
    """Whether two nodes are on one machine, as far as is written: nodes that say nothing are."""
    return machine(one) == machine(other)


def local_ranks(node: Node) -> range | None:
    """Data-parallel ranks that a command starts; None when that is not written down."""
    if {"data_parallel_rank", "data_parallel_start_rank", "data_parallel_size_local"} & node.unknown:
        return None
    size = node.size("data")
    if size is None:
        return None
    rank = node.number("data_parallel_rank")
    if rank is not None:
        return range(rank, rank + 1)
    local = node.number("data_parallel_size_local")
    first = node.number("data_parallel_start_rank") or 0
    return range(first, first + (size if local is None else local))


def needed_devices(node: Node) -> int | None:
    """Devices that a command's sizes need on its machine; None when that is not written down, or Ray decides."""
    sizes = [node.size("tensor"), node.size("pipeline"), node.number("prefill_context_parallel_size") or 1]
    ranks, hosts = local_ranks(node), node.number("nnodes") or 1
    if None in sizes or ranks is None or node.clustered or node.get("distributed_executor_backend") == "ray":
        return None
    if node.get("data_parallel_backend") == "ray":
        return None
    tensor, stages, context = (size or 1 for size in sizes)
    whole = tensor * stages * context
    return whole * len(ranks) // hosts if hosts > 1 and whole * len(ranks) % hosts == 0 else whole * len(ranks)


def shown_devices(node: Node) -> tuple[str, ...] | None:
    """Names of the devices that a node is shown; None when nothing limits them or it can't be known."""
    chosen = node.get("device_ids")
    if isinstance(chosen, list):
        return tuple(map(str, chosen))
    for variable in _VISIBLE:
        text = node.env.get(variable)
        if text is None or is_unknown(text) or text.strip() in ("", "all", "void", "none"):
            continue
        parts = [part for part in re.split(r"[,\s]+", text.strip()) if part]
        return tuple(name for part in parts for name in _range(part))
    return None


def _range(part: str) -> list[str]:
    found = re.fullmatch(r"(\d{1,3})-(\d{1,3})", part)
    return [str(n) for n in range(int(found[1]), int(found[2]) + 1)] if found else [part]
