"""Which prompts a P node has probably in its prefix cache, from what it was sent."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["PIECE", "PrefixIndex", "fingerprint"]

PIECE = 2048  # bytes of a request's JSON: some hundred tokens
BYTES_A_TOKEN = 4  # only for turning a node's KV capacity into pieces


def fingerprint(before: int, piece: bytes) -> int:
    """Identity of a prefix that ends with ``piece``, given the identity of what stands before it."""
    return hash((before, piece))


class PrefixIndex:
    """The pieces of prompts that a node was sent last, as many as its KV cache may hold.

    Args:
        kv_tokens: tokens that the node's KV cache holds.
    """

    def __init__(self, kv_tokens: int) -> None:
        self._pieces: OrderedDict[int, None] = OrderedDict()
        self.resize(kv_tokens)

    def resize(self, kv_tokens: int) -> None:
        """The node's KV cache holds so many tokens."""
        self._most = max(kv_tokens * BYTES_A_TOKEN // PIECE, 1)
        self._trim()

    def __len__(self) -> int:
        return len(self._pieces)

    def hit(self, prints: Sequence[int]) -> int:
        """Leading pieces of a prompt that the node has had.

        Found by bisection: a prefix outlives its continuation, because `add` makes it the more recent one.
        """
        low, high = 0, len(prints)
        while low < high:
            middle = (low + high) // 2
            if prints[middle] in self._pieces:
                low = middle + 1
            else:
                high = middle
        return low

    def add(self, prints: Sequence[int]) -> None:
        """The node is sent a prompt with these pieces."""
        for one in reversed(prints):
            self._pieces[one] = None
            self._pieces.move_to_end(one)
        self._trim()

    def _trim(self) -> None:
        while len(self._pieces) > self._most:
            self._pieces.popitem(last=False)

    def forget(self, prints: Sequence[int]) -> None:
        """The node turned out not to have these pieces."""
        for one in prints:
            self._pieces.pop(one, None)

    def clear(self) -> None:
        """The node was restarted."""
        self._pieces.clear()
