"""Which nodes there are, and whether they are well: one watcher a node."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from isochunk.core.errors import ModelError
from isochunk.proxy.config import Nodes, NodeSpec, Role, Timeouts
from isochunk.proxy.errors import ExhaustedError
from isochunk.proxy.nodes import Node, Pool
from isochunk.proxy.price import read_status
from isochunk.proxy.upstream import Upstream

__all__ = ["Fleet"]

log = logging.getLogger("isochunk.proxy")

_MISSES = 3  # probes without an answer after which a node that accepts connections counts as lost
_AGAIN_S = 1.0  # between two looks at a node that is down
_LEAST_S = 0.1  # between two looks at any node, however many requests complain
_SWEEP_S = 0.2


class Fleet:
    """The nodes of both roles.

    Args:
        headers: what probes carry, such as the nodes' API key.
    """

    def __init__(self, upstream: Upstream, timeouts: Timeouts, headers: Mapping[str, str]) -> None:
        self.pools = {role: Pool(role) for role in Role}
        self._upstream = upstream
        self._timeouts = timeouts
        self._headers = headers
        self._watchers: dict[Node, asyncio.Task[None]] = {}

    async def close(self) -> None:
        """Stop watching."""
        tasks = list(self._watchers.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def add(self, role: Role, spec: NodeSpec, *, give_up_s: float | None = None) -> Node | None:
        """Add a node and look at it once; None when it was there.

        One that is down is used once it is up; with ``give_up_s`` it is removed if it is not by then.
        """
        node = self.pools[role].add(spec)
        if node is None:
            return None
        await self._look(node)
        self._watchers[node] = asyncio.create_task(self._watch(node))
        if give_up_s is not None and not node.alive:
            asyncio.get_running_loop().call_later(give_up_s, self._give_up, node)
        return node

    def _give_up(self, node: Node) -> None:
        if not node.alive and self.pools[node.role].holds(node):
            log.warning("%s node %s did not come up and is removed", node.role, node.name)
            self.pools[node.role].drain(node.name)
            node.look_now.set()

    def drain(self, role: Role, name: str) -> Node | None:
        """Let a node finish what it has and then go; None when there is no such node."""
        return self.pools[role].drain(name)

    async def set(self, nodes: Nodes) -> None:
        """Make the fleet consist of these nodes: add what is new, drain what is not named."""
        for role, pool in self.pools.items():
            wanted = {spec.name for spec in nodes.get(role, ())}
            for node in pool:
                if node.name not in wanted:
                    pool.drain(node.name)
        await asyncio.gather(*(self.add(role, spec) for role, specs in nodes.items() for spec in specs))

    def longest(self) -> dict[str, int]:
        """What each model takes, by the D node that takes most: what none would accept can be refused."""
        most: dict[str, int] = {}
        for node in self.pools[Role.DECODE]:
            for name, tokens in node.longest.items():
                most[name] = max(tokens, most.get(name, 0))
        return most

    async def _watch(self, node: Node) -> None:
        pool = self.pools[node.role]
        misses = 0
        while pool.holds(node):
            await self._pause(node)
            if node.draining:
                pool.sweep()
                continue
            try:
                well = await self._look(node)
            except Exception:  # whatever a node says, it is asked again
                log.exception("%s node %s: looking at it failed", node.role, node.name)
                well = False
            misses = 0 if well else misses + 1
            if misses >= _MISSES:
                node.lost()
        self._watchers.pop(node, None)

    async def _pause(self, node: Node) -> None:
        await asyncio.sleep(_LEAST_S)
        seconds = _SWEEP_S if node.draining else self._timeouts.probe_s if node.alive else _AGAIN_S
        try:
            async with asyncio.timeout(min(seconds, self._timeouts.probe_s)):
                await node.look_now.wait()
        except TimeoutError:
            pass
        node.look_now.clear()

    async def _look(self, node: Node) -> bool:
        """Ask the node how it is. One that does not answer in time stays in use until it counts as lost."""
        try:
            status, _ = await self._get(node.url + "/health")
            if status >= 500:
                raise OSError(f"/health answered {status}")
            if node.role is Role.PREFILL:
                await self._learn(node)
            elif not node.alive:
                with suppress(OSError, ValueError):  # it can serve without
                    node.longest = read_lengths(await self._get(node.url + "/v1/models"))
        except ExhaustedError:
            return node.alive  # nothing is known of it
        except TimeoutError:
            return False
        except (OSError, ValueError) as error:
            if node.alive:
                log.warning("%s node %s is down: %s", node.role, node.name, error)
            node.alive = False
            return False
        if not node.alive:
            log.info("%s node %s is up%s", node.role, node.name, "" if node.model is None else ", with a cost model")
            node.prefix.clear()  # it may be a new process
            node.health.renewed()
        node.alive = True
        return True

    async def _learn(self, node: Node) -> None:
        """Fetch the cost model, and for Mooncake the engine ids."""
        if node.spec.bootstrap is not None:
            _, engines = await self._get(node.spec.bootstrap + "/query")
            node.engines = _engines(node.spec.bootstrap, engines)
        try:
            status, answer = await self._get(node.url + "/isochunk/status")
            model = read_status(answer) if status == 200 else None
            known = node.model if node.alive else None  # one that was down may be a new process
            if known and model and isinstance(answer, dict) and answer.get("source") == "guard":
                return  # an alarm, which its next refit confirms or takes back
            node.model = known.followed_by(model) if known and model else model
        except TimeoutError:
            pass  # the engine answers between two steps; what is known of it stays
        except (ModelError, ArithmeticError) as error:
            log.warning("node %s: %s", node.name, error)
            node.model = None

    async def _get(self, url: str) -> tuple[int, Any]:
        return await self._upstream.get(url, self._headers, self._timeouts.probe_answer_s)


def read_lengths(told: tuple[int, Any]) -> dict[str, int]:
    """What each model takes, from the answer of ``/v1/models``; nothing of what it does not tell."""
    status, answer = told
    entries = answer.get("data") if status == 200 and isinstance(answer, dict) else None
    lengths = {}
    for entry in entries if isinstance(entries, list) else ():
        most = entry.get("max_model_len") if isinstance(entry, dict) else None
        if isinstance(most, int) and not isinstance(most, bool) and most > 0:
            lengths[str(entry.get("id"))] = most
    return lengths


def _engines(url: str, answer: Any) -> dict[int, str]:
    """Engine id of each data-parallel rank, from a Mooncake bootstrap server's answer."""
    try:
        engines = {int(rank): str(entry["engine_id"]) for rank, entry in answer.items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{url}/query is no Mooncake bootstrap server: {answer!r}") from error
    if not engines:
        raise ValueError(f"{url}/query knows no engine yet")
    return engines
