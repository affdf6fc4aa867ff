"""Accelerators: enough for the sizes, and each for one node."""

from __future__ import annotations

from isochunk.deployment.machines import needed_devices, shown_devices, together
from isochunk.deployment.node import Deployment, Node
from isochunk.deployment.rules.rule import Faults, error, of_deployment, of_nodes

__all__: list[str] = []


@of_nodes("enough-devices")
def _enough(node: Node) -> Faults:
    """A node is shown as many devices as its parallel sizes need."""
    need, shown = needed_devices(node), shown_devices(node)
    many = len(shown) if shown is not None else node.devices
    if need is None or many is None or many >= need:
        return
    yield error(
        node,
        _variable(node),
        f"{many} devices are shown to it, and its sizes need {need}",
        f"vLLM stops: {_product(node)}",
        f"show it {need} devices, or lower a size",
    )


def _variable(node: Node) -> str | None:
    return next((name for name in node.env if name.endswith("VISIBLE_DEVICES")), None)


def _product(node: Node) -> str:
    kinds = [f"{node.size(kind)} {kind}" for kind in ("tensor", "pipeline", "data") if (node.size(kind) or 1) > 1]
    return "it takes " + " times ".join(kinds) if kinds else "it takes one"


@of_nodes("devices-once")
def _repeated(node: Node) -> Faults:
    """No device is named twice to a node."""
    shown = shown_devices(node) or ()
    twice = sorted({name for name in shown if shown.count(name) > 1})
    if twice:
        yield error(
            node,
            _variable(node),
            f"device {twice[0]} is named twice",
            "two ranks would share it",
            "name each device once",
        )


@of_deployment("devices-apart")
def _apart(deployment: Deployment) -> Faults:
    """Two nodes on one machine are shown different devices, unless their memory shares fit together."""
    for index, node in enumerate(deployment.nodes):
        for other in deployment.nodes[:index]:
            near = together(node, other) or (node.contained and other.contained)
            shared = _taken(node, other) & _taken(other, node) if near else frozenset()
            if shared and _share(node) + _share(other) > 1.0:
                yield error(
                    node,
                    _variable(node),
                    f"device {min(shared, key=_as_number)} is used by {other.name} too",
                    f"each takes {_share(node):g} of its memory, so the second does not start",
                    "show each node devices of its own",
                )


def _taken(node: Node, other: Node) -> frozenset[str]:
    """The devices of a node; where only the other's are named, it takes the first ones."""
    shown, need = shown_devices(node), needed_devices(node)
    of_machine = node.env.get("NVIDIA_VISIBLE_DEVICES", "")
    if node.contained and of_machine not in ("", "all"):
        return frozenset(of_machine.split(","))  # the container counts its own from 0
    if shown is not None:
        return frozenset(shown)
    if shown_devices(other) is None or need is None or node.devices is not None or not _on_devices(node, other):
        return frozenset()
    return frozenset(map(str, range(need)))


def _on_devices(node: Node, other: Node) -> bool:
    """Whether nothing hides that a node names no devices, such as a variable set elsewhere."""
    variables = [name for name in other.env if name.endswith("VISIBLE_DEVICES")]
    return not any(name in node.env for name in variables) and node.whole


def _share(node: Node) -> float:
    value = node.get("gpu_memory_utilization")
    return float(value) if isinstance(value, (int, float)) else 0.9


def _as_number(name: str) -> tuple[int, str]:
    return (int(name), "") if name.isdigit() else (1 << 30, name)
