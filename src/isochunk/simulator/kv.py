"""An instance's KV cache: vLLM's block pool, with runs of blocks in place of single ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["Holding", "KVCache", "Piece"]


class Node:
    """What some blocks of prompts hold: all tokens up to their end are the same in each prompt that passes here.

    Attributes:
        children: what follows, by its hash id.
        copies: runs of blocks in the cache that hold it, in the order in which they were cached.
    """

    __slots__ = ("children", "copies")

    def __init__(self) -> None:
        self.children: dict[int, Node] = {}
        self.copies: list[Run] = []


class Run:
    """Blocks ``low`` to ``high`` of a node, which were cached together, with so many users.

    Without users it stands in the queue of those to be evicted (``before`` and ``behind``), its last block first. What
    was split off behind it while it was used is its ``rest``.
    """

    __slots__ = ("before", "behind", "high", "low", "node", "rest", "users")

    def __init__(self, node: Node, low: int, high: int, users: int = 1) -> None:
        self.node, self.low, self.high, self.users = node, low, high, users
        self.before = self.behind = self
        self.rest: Run | None = None


Content = Sequence[tuple[Node, float]]  # what a prompt holds: nodes, each with the block behind its last
Piece = tuple[Run, int, int]  # blocks low to high of a run


class Holding:
    """The blocks of a request: ``runs``, with the number of blocks in each, are cached, the rest are not."""

    __slots__ = ("blocks", "cached", "content", "runs")

    def __init__(self, content: Content) -> None:
        self.content = content
        self.runs: list[tuple[Run, int]] = []
        self.cached = 0
        self.blocks = 0


class KVCache:
    """Blocks that are free or used, and which of them hold what. Equal to vLLM's block pool, block for block:

    * Blocks are cached when the step that computes them is scheduled; two requests that compute the same keep two
      copies, and the older is found.
    * A request's blocks are freed from its end to its beginning, behind those freed before, and reused in that order:
      continuations go before their beginnings. Blocks that hold nothing to be found are reused first.
    * A look-up changes nothing; blocks leave the queue when they serve a request.

    (A block without a hash is as good as any other and stands before all that have one, so those are only counted.)

    Args:
        block: tokens of a block.
        blocks: how many there are; None for no limit.
    """

    def __init__(self, block: int, blocks: int | None = None) -> None:
        self.block = block
        self._bounded = blocks is not None
        self._blank: float = math.inf if blocks is None else blocks
        self.free: float = self._blank
        self._root = Node()
        self._queue = Run(self._root, 0, 0)  # its `behind` is evicted first

    def content(self, hashes: Sequence[int], unit: int, tokens: int) -> Content:
        """What a prompt of ``tokens`` tokens will hold, with a hash for each ``unit``; the last node is its own."""
        content: list[tuple[Node, float]] = []
        node, full = self._root, tokens // self.block
        for depth, number in enumerate(hashes, 1):
            node = node.children.setdefault(number, Node())
            end = depth * unit // self.block
            content.append((node, min(end, full)))
            if full < end:
                break  # what follows in this unit are the prompt's own tokens
        content.append((Node(), math.inf))
        return content

    def look_up(self, content: Content, most: int) -> list[Piece]:
        """The cached blocks at the start of a prompt, ``most`` at most."""
        found: list[Piece] = []
        at = 0
        for node, last in content:
            end = min(last, most)
            while at < end:
                piece = _copy(node, at, int(end))
                if piece is None:
                    return found
                found.append(piece)
                at = piece[2]
        return found

    def needed(self, holding: Holding, tokens: int, pieces: Sequence[Piece] = ()) -> int:
        """Free blocks that it takes to hold so many tokens, of which the pieces are cached."""
        found = sum(high - low for _, low, high in pieces)
        unused = sum(high - low for run, low, high in pieces if not run.users)
        return max(-(-tokens // self.block) - holding.blocks - found, 0) + unused

    def grow(self, holding: Holding, tokens: int, pieces: Sequence[Piece] = ()) -> None:
        """Take the pieces, and new blocks until ``tokens`` tokens have room; there must be as many as are `needed`."""
        for run, low, high in pieces:
            taken = self._use(run, low, high)
            holding.runs.append((taken, high - low))
            holding.cached += high - low
            holding.blocks += high - low
        more = -(-tokens // self.block) - holding.blocks
        if more > 0:
            self._take(more)
            holding.blocks += more

    def keep(self, holding: Holding, tokens: int) -> None:
        """The first ``tokens`` tokens can be found from now on, in whole blocks."""
        full = tokens // self.block
        if full <= holding.cached:
            return
        for node, last in holding.content:
            if last > holding.cached:
                end = int(min(last, full))
                self._insert(holding, node, end)
                if end == full:
                    return

    def release(self, holding: Holding) -> None:
        """The request is done or preempted: its blocks are free, and those that are cached can still be found."""
        blank = holding.blocks - holding.cached
        self._blank += blank
        self.free += blank
        for run, blocks in reversed(holding.runs):
            for part in reversed(_parts(run, blocks)):
                part.users -= 1
                if not part.users:
                    self.free += part.high - part.low
                    if self._bounded:
                        _link(part, self._queue.before)
        holding.runs = []
        holding.cached = holding.blocks = 0

    def _insert(self, holding: Holding, node: Node, end: int) -> None:
        start, holding.cached = holding.cached, end
        if holding.runs:
            run, blocks = holding.runs[-1]
            alone = run.users == 1 and run.rest is None and run.high - run.low == blocks
            if alone and run.node is node and run.high == start and node.copies[-1] is run:
                run.high = end
                holding.runs[-1] = (run, end - run.low)
                return
        run = Run(node, start, end)
        node.copies.append(run)
        holding.runs.append((run, end - start))

    def _take(self, blocks: int) -> None:
        """Reuse free blocks, those that hold nothing first; what the others hold is forgotten."""
        self.free -= blocks
        blank = min(self._blank, blocks)
        self._blank -= blank
        left = blocks - int(blank)
        while left:
            run = self._queue.behind
            size = run.high - run.low
            if size > left:
                run.high -= left
                return
            left -= size
            _unlink(run)
            run.node.copies.remove(run)

    def _use(self, run: Run, low: int, high: int) -> Run:
        """One more user of blocks ``low`` to ``high`` of this run or what was split off it; returns their run."""
        while low >= run.high:
            assert run.rest is not None
            run = run.rest
        if run.users:
            if low > run.low:
                run = _split(run, low)
            if high < run.high:
                _split(run, high)
            run.users += 1
            return run
        self.free -= high - low
        return self._carve(run, low, high)

    def _carve(self, run: Run, low: int, high: int) -> Run:
        """Take blocks out of a run in the queue; what is left of it keeps its place."""
        copies = run.node.copies
        if (low, high) == (run.low, run.high):
            if self._bounded:
                _unlink(run)
            run.users, run.rest = 1, None
            return run
        taken = Run(run.node, low, high)
        at = copies.index(run)
        if high == run.high:
            run.high = low
            copies.insert(at + 1, taken)
            return taken
        copies.insert(at, taken)
        if low > run.low:
            lower = Run(run.node, run.low, low, users=0)
            copies.insert(at, lower)
            if self._bounded:
                _link(lower, run)
        run.low = high
        return taken


def _copy(node: Node, at: int, end: int) -> Piece | None:
    """The oldest copy of block ``at``, as far as it is the oldest of the blocks that follow."""
    for run in node.copies:
        if run.low <= at < run.high:
            return run, at, min(end, run.high)
        if run.low > at:
            end = min(end, run.low)
    return None


def _parts(run: Run, blocks: int) -> list[Run]:
    """The run and what was split off it, as far as the blocks reach."""
    parts = [run]
    left = blocks - (run.high - run.low)
    while left:
        assert run.rest is not None
        run = run.rest
        parts.append(run)
        left -= run.high - run.low
    return parts


def _split(run: Run, at: int) -> Run:
    """Cut a run that is used; returns its rest."""
    rest = Run(run.node, at, run.high, run.users)
    rest.rest, run.rest, run.high = run.rest, rest, at
    copies = run.node.copies
    copies.insert(copies.index(run) + 1, rest)
    return rest


def _link(run: Run, before: Run) -> None:
    run.before, run.behind = before, before.behind
    before.behind.before = run
    before.behind = run


def _unlink(run: Run) -> None:
    run.before.behind, run.behind.before = run.behind, run.before
    run.before = run.behind = run
