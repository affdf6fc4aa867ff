"""What a request has been through, and whether it may go on."""

from __future__ import annotations

from isochunk.proxy.errors import NodeFailedError, NodeRefusedError, NodeUnreachableError
from isochunk.proxy.health import Budget
from isochunk.proxy.nodes import Node, Pool

__all__ = ["Trail"]

_RESTARTS = 16  # prefills of one request
_KILLS = 2  # nodes whose connection may break on one request: it may be the request that kills them


class Trail:
    """The tries of one request.

    A node that refuses or fails at once has cost little, so all others may be tried; one that took its time, or broke,
    counts against ``attempts``.

    Attributes:
        tried: names of nodes that have failed or refused it.
        failed_decode: a D node has failed it after its prefill.
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
        self.failed_decode = False
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
        self._refused.append(node)
        node.health.refused()
        return pool.fresh(self.tried) and self._budget.spend()

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
