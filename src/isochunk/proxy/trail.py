"""What a request has been through, and whether it may go on."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from isochunk.proxy.config import Role
from isochunk.proxy.errors import NodeFailedError, NodeRefusedError, NodeUnreachableError
from isochunk.proxy.health import Budget
from isochunk.proxy.metrics import Metrics
from isochunk.proxy.nodes import Node, Pool

__all__ = ["Judge", "Trail"]

log = logging.getLogger("isochunk.proxy")

_RESTARTS = 16  # prefills of one request
_KILLS = 2  # nodes whose connection may break on one request: it may be the request that kills them


class Trail:
    """The tries of one request.

    A node that refuses or fails at once has cost little, so all others may be tried; one that took its time, or broke,
    counts against ``attempts``.

    Attributes:
        tried: names of nodes that have failed or refused it.
        failed_decode: a D node has failed it; the next one should be a proved one.
        lenient: who refuses it may be right, though another accepts it.
        again: the last failure allows to compute it anew.
    """

    def __init__(self, id: str, attempts: int, budget: Budget) -> None:
        self._id = id
        self._attempts = attempts
        self._budget = budget
        self._costly = 0
        self._broken = 0
        self._numbers = 0
        self._refused: list[Node] = []
        self.tried: set[str] = set()
        self.failed_decode = self.again = self.lenient = False
        budget.earn()

    def next_id(self) -> str:
        """An id that no other try has: the connectors match P's and D's requests by it."""
        self._numbers += 1
        return f"{self._id}-{self._numbers}"

    def refused(self, node: Node, error: NodeRefusedError, pool: Pool) -> bool:
        """A node refused it; whether to ask another."""
        if not error.elsewhere:
            return False
        self.tried.add(node.name)
        if not self.lenient:
            self._refused.append(node)
            node.health.refused()
        return pool.fresh(self.tried)  # costs nothing, and clients with wrong keys must not use the others' tries up

    def accepted(self) -> list[Node]:
        """A node has accepted it: those that refused it before were wrong."""
        wrong, self._refused = self._refused, []
        return wrong

    def failed(self, node: Node, error: NodeFailedError, pool: Pool) -> bool:
        """A node failed it; whether to try again."""
        fresh_before = pool.fresh(self.tried | {node.name})
        self.tried.add(node.name)
        if isinstance(error, NodeUnreachableError) and fresh_before:
            return True
        self._broken += error.broke
        cheap = error.answered and fresh_before and self._attempts > 1
        self._costly += not cheap
        if self._costly >= self._attempts or self._broken >= _KILLS:
            return False
        return self._budget.spend()

    def may_restart(self) -> bool:
        """Whether it may be computed again, after a node gave it up."""
        return self._numbers < _RESTARTS


class Judge:
    """Keeps account of what nodes do to requests, and says which requests may go on."""

    def __init__(self, pools: Mapping[Role, Pool], metrics: Metrics, attempts: int) -> None:
        self._pools = pools
        self._metrics = metrics
        self._attempts = attempts
        self._budget = Budget()

    def trail(self, id: str) -> Trail:
        """Of a new request."""
        return Trail(id, self._attempts, self._budget)

    def began(self, node: Node, trail: Trail) -> None:
        """A node answers as it should so far; those of its role that refused the request before were wrong."""
        node.health.began()
        self._accepted(node, trail)

    def well(self, node: Node, trail: Trail) -> None:
        """A node has answered as it should, to the end."""
        node.health.well()
        self._accepted(node, trail)

    def _accepted(self, node: Node, trail: Trail) -> None:
        for wrong in trail.accepted():
            if wrong.role is node.role:
                self._blame(wrong)
        self._pools[node.role].news.tell()

    def goes_on(
        self, node: Node, error: NodeRefusedError | NodeFailedError, trail: Trail, *, midway: bool = False
    ) -> bool:
        """Take note of what a node did, ``midway`` in its answer or before; whether another one may be tried."""
        pool = self._pools[node.role]
        if isinstance(error, NodeRefusedError):
            pool.news.tell()
            return trail.refused(node, error, pool)
        self._blame(node, midway=midway)
        return trail.failed(node, error, pool)

    def _blame(self, node: Node, *, midway: bool = False) -> None:
        before = node.health.ejections
        node.health.failed(midway=midway)
        self._metrics.failed(node.name)
        if node.health.ejections > before:
            log.warning("%s node %s is left out for a while: it fails too often", node.role, node.name)
        self._pools[node.role].news.tell()
