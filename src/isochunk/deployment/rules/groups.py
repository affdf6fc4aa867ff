"""Servers over several machines: all their commands are there, and agree."""

from __future__ import annotations

from collections.abc import Iterator

from isochunk.deployment.front import LOOPBACK
from isochunk.deployment.machines import local_ranks, machine
from isochunk.deployment.node import Deployment, Node
from isochunk.deployment.rules.rule import Faults, error, of_deployment

__all__: list[str] = []

_SIZES = ("pipeline_parallel_size", "tensor_parallel_size", "nnodes")


def _stage_groups(deployment: Deployment) -> Iterator[list[Node]]:
    """Commands with ``--nnodes`` of one master."""
    groups: dict[object, list[Node]] = {}
    for node in deployment.nodes:
        if (node.number("nnodes") or 1) > 1:
            groups.setdefault((node.role, node.get("master_addr"), node.get("master_port")), []).append(node)
    yield from groups.values()


@of_deployment("machines-complete")
def _complete(deployment: Deployment) -> Faults:
    """With `--nnodes N` each rank from 0 to N - 1 has one command, and all but 0 are headless."""
    for group in _stage_groups(deployment):
        many = group[0].number("nnodes") or 1
        ranks = [node.number("node_rank") for node in group]
        if None in ranks or any("node_rank" in node.unknown for node in group) or len(group) == 1:
            continue
        missing, twice = (
            sorted(set(range(many)) - set(ranks)),
            sorted({r for r in ranks if ranks.count(r) > 1 and r is not None}),
        )
        if twice:
            yield error(
                group[-1],
                "--node-rank",
                f"--node-rank {twice[0]} is that of two commands",
                "one waits for ever",
                f"give them the ranks 0 to {many - 1}",
            )
        elif missing and len(group) > 1:
            yield error(
                group[0],
                "--nnodes",
                f"--nnodes {many}, and no command has --node-rank {missing[0]}",
                "the others wait for it",
                "add it, or lower --nnodes",
            )
        for node in group:
            if node.number("node_rank") and not node.headless and not node.module:
                yield error(
                    node,
                    "--headless",
                    f"--node-rank {node.number('node_rank')} without --headless",
                    "it would open an API of its own, and vLLM stops",
                    "add --headless",
                )


@of_deployment("machines-agree")
def _agree(deployment: Deployment) -> Faults:
    """Commands of one server over several machines have the same sizes, and a master that all reach."""
    for group in _stage_groups(deployment):
        for node in group[1:]:
            for name in _SIZES:
                if node.get(name) != group[0].get(name) and name not in node.unknown | group[0].unknown:
                    option = "--" + name.replace("_", "-")
                    yield error(
                        node,
                        option,
                        f"{option} is {node.get(name)}, and {group[0].get(name)} on {group[0].name}",
                        "they are parts of one server",
                        f"use {option} {group[0].get(name)}",
                    )
        apart = len({machine(node) for node in group} - {None}) > 1
        if apart and group[0].get("master_addr") in LOOPBACK:
            yield error(
                group[-1],
                "--master-addr",
                f"--master-addr is {group[0].get('master_addr')}",
                "each machine would look for the master on itself",
                "give the address of rank 0's machine",
            )


@of_deployment("masters-apart")
def _masters(deployment: Deployment) -> Faults:
    """P and D don't use one master, or one data-parallel address, with one port."""
    for address, port in (("master_addr", "master_port"), ("data_parallel_address", "data_parallel_rpc_port")):
        owner: dict[object, Node] = {}
        for node in deployment.nodes:
            key = (node.given.get(address), node.get(port))
            if None in key or not node.role or {address, port} & node.unknown:
                continue
            other = owner.setdefault(key, node)
            if other.role != node.role:
                option = "--" + port.replace("_", "-")
                yield error(
                    node,
                    option,
                    f"{option} {key[1]} at {key[0]} is that of {other.name} too",
                    "P's and D's ranks would join one group",
                    "use another port",
                )


@of_deployment("data-ranks-complete")
def _data(deployment: Deployment) -> Faults:
    """The data-parallel ranks that commands start cover `--data-parallel-size`, each once."""
    groups: dict[object, list[Node]] = {}
    for node in deployment.nodes:
        parted = any(
            node.get(n) is not None
            for n in ("data_parallel_rank", "data_parallel_start_rank", "data_parallel_size_local")
        )
        if parted and node.get("data_parallel_address") is not None:
            key = (node.role, node.get("data_parallel_address"), node.get("data_parallel_rpc_port"))
            groups.setdefault(key, []).append(node)
    for group in groups.values():
        ranges = [local_ranks(node) for node in group]
        sizes = {node.size("data") for node in group}
        if None in ranges or None in sizes or len(group) < 2:
            continue
        if len(sizes) > 1:
            yield error(
                group[-1],
                "--data-parallel-size",
                f"--data-parallel-size {group[-1].size('data')}, and {group[0].size('data')} on {group[0].name}",
                "they are parts of one group",
                "use one size",
            )
            continue
        ranks = [rank for each in ranges if each is not None for rank in each]
        size = group[0].size("data") or 1
        if sorted(ranks) != list(range(size)):
            yield error(
                group[-1],
                "--data-parallel-size-local",
                f"the commands start the ranks {', '.join(map(str, sorted(ranks)))} of {size}",
                "a rank that is missing or there twice keeps all waiting",
                f"let them start each of 0 to {size - 1} once",
            )
