"""The nodes behind the proxy: what each is doing now, and whether it can take more."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from isochunk.proxy.config import NodeSpec, Role
from isochunk.proxy.health import Health
from isochunk.proxy.prefix import PrefixIndex
from isochunk.proxy.price import NodeModel

__all__ = ["Load", "Node", "Pool"]


@dataclass(slots=True, eq=False)
class _Job:
    tokens: int
    busy_s: float


class Load:
    """What a node has been given and has not finished, in tokens and in predicted seconds.

    Args:
        clock: tells the time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._jobs: OrderedDict[int, _Job] = OrderedDict()
        self._head_since = 0.0
        self.tokens = 0
        self.busy_s = 0.0

    def __len__(self) -> int:
        return len(self._jobs)

    def backlog_s(self) -> float:
        """Predicted seconds until the node is idle; what its oldest request has had is taken off."""
        if not self._jobs:
            return 0.0
        head = next(iter(self._jobs.values()))
        return self.busy_s - min(self._clock() - self._head_since, head.busy_s)

    @contextmanager
    def job(self, tokens: int, busy_s: float = 0.0) -> Iterator[None]:
        """The node works on a request for as long as the context lasts, however it ends."""
        job = _Job(tokens, busy_s)
        self._add(job)
        try:
            yield
        finally:
            self._remove(job)

    def _add(self, job: _Job) -> None:
        if not self._jobs:
            self._head_since = self._clock()
        self._jobs[id(job)] = job
        self.tokens += job.tokens
        self.busy_s += job.busy_s

    def _remove(self, job: _Job) -> None:
        if next(iter(self._jobs)) == id(job):
            self._head_since = self._clock()
        del self._jobs[id(job)]
        self.tokens -= job.tokens
        # An empty queue is exactly 0: rounding errors must not add up over months.
        self.busy_s = self.busy_s - job.busy_s if self._jobs else 0.0


class Node:
    """One P or D node.

    Attributes:
        spec: where it is.
        alive: it answered the last time it was asked for something.
        draining: it gets no new request and leaves when the last one is done.
        model: its cost model, when it has one.
        engines: engine id of each data-parallel rank, for Mooncake.
        longest: tokens of prompt and answer together that each of its models takes.
        health: how it answered.
        load: requests it works on.
        holding: prompts whose KV it keeps for a D node.
    """

    def __init__(self, spec: NodeSpec, role: Role, clock: Callable[[], float] = time.monotonic) -> None:
        self.spec = spec
        self.role = role
        self.alive = False
        self.draining = False
        self.model: NodeModel | None = None
        self.engines: dict[int, str] = {}
        self.longest: dict[str, int] = {}
        self.prefix = PrefixIndex(spec.kv_tokens)
        self.health = Health(clock)
        self.load = Load(clock)
        self.holding = 0
        self.look_now = asyncio.Event()
        self._waits: set[asyncio.Timeout] = set()

    @property
    def name(self) -> str:
        """``host:port``."""
        return self.spec.name

    @property
    def url(self) -> str:
        """Where its requests go."""
        return self.spec.url

    def follow(self, spec: NodeSpec) -> None:
        """The same node is described anew; what it works on stays."""
        self.spec = spec
        self.prefix.resize(spec.kv_tokens)
        self.look_now.set()

    @property
    def idle(self) -> bool:
        """Nothing would be lost if it went away now."""
        return len(self.load) == 0 and self.holding == 0

    @contextmanager
    def hold(self) -> Iterator[None]:
        """The node keeps a prompt's KV for as long as the context lasts."""
        self.holding += 1
        try:
            yield
        finally:
            self.holding -= 1

    @contextmanager
    def wait(self, timeout: asyncio.Timeout) -> Iterator[None]:
        """Somebody waits for the node under ``timeout``, which `lost` ends at once."""
        self._waits.add(timeout)
        try:
            yield
        finally:
            self._waits.discard(timeout)

    def suspect(self) -> None:
        """It could not be connected to: no request until it answers a probe, which is due now."""
        self.alive = False
        self.look_now.set()

    def lost(self) -> None:
        """It does not answer any more: end all waits for it."""
        self.alive = False
        now = asyncio.get_running_loop().time()
        for timeout in self._waits:
            timeout.reschedule(now)


class News:
    """Wakes all who wait for something to change."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    def tell(self) -> None:
        """Something has changed."""
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def wait(self, seconds: float) -> None:
        """Until the next news, so long at most."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await future


class Pool:
    """The nodes of one role.

    Attributes:
        news: told of each answer of a node, good or bad.
    """

    def __init__(self, role: Role) -> None:
        self.role = role
        self.news = News()
        self._nodes: dict[str, Node] = {}
        self._turn = 0

    def __iter__(self) -> Iterator[Node]:
        return iter(list(self._nodes.values()))

    def __len__(self) -> int:
        return len(self._nodes)

    def add(self, spec: NodeSpec, clock: Callable[[], float] = time.monotonic) -> Node | None:
        """The new node; None when it was there already, which then no longer drains and is as ``spec`` says."""
        known = self._nodes.get(spec.name)
        if known is not None:
            known.draining = False
            if known.spec != spec:
                known.follow(spec)
            return None
        node = Node(spec, self.role, clock)
        self._nodes[spec.name] = node
        return node

    def drain(self, name: str) -> Node | None:
        """Give a node no more requests; it leaves once it is idle (`sweep`)."""
        node = self._nodes.get(name)
        if node is not None:
            node.draining = True
        return node

    def sweep(self) -> None:
        """Drop drained nodes."""
        for node in self:
            if node.draining and node.idle:
                del self._nodes[node.name]

    def holds(self, node: Node) -> bool:
        """Whether the node is still part of the pool."""
        return self._nodes.get(node.name) is node

    def fresh(self, without: Container[str]) -> bool:
        """Whether there is a usable node beside these."""
        return any(n.alive and not n.draining and n.name not in without for n in self._nodes.values())

    def candidates(self, without: Container[str] = frozenset()) -> list[Node]:
        """Nodes that can take a request, beginning with another one each time, so that ties go round.

        Nodes that are ejected, or have just refused something, only when there are no others: the last one is used
        whatever it did.
        """
        usable = [n for n in self._nodes.values() if n.alive and not n.draining]
        fresh = [n for n in usable if n.name not in without] or usable
        taking = [n for n in fresh if n.health.takes] or fresh
        willing = [n for n in taking if not n.health.shy] or taking
        self._turn += 1
        start = self._turn % len(willing) if willing else 0
        return willing[start:] + willing[:start]
