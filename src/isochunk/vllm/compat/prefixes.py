"""How much of a waiting prompt is in the local prefix cache, at a price that a step can pay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from isochunk.vllm.compat.patching import need

__all__ = ["PATIENCE", "Hit", "PrefixHits"]

PATIENCE = 8  # steps after which a prompt that is not the next is looked up again
_PAID = 64  # blocks that a step pays for where vLLM's own look-up is needed


class PrefixHits:
    """Cached tokens of waiting prompts, remembered from step to step.

    Why: vLLM's own look-up walks every block from the first on: 7,000 of them, and 5 ms, for a prompt of 115k tokens.
    Blocks are hashed in a chain and evicted from their end, so where the cached ones end is found by bisection, and
    whether that moved by looking at two blocks. Where groups of layers differ (sliding windows, Mamba), full
    attention gives what there is at most, and vLLM's own look-up is made as often as `_PAID` blocks a step pay for.
    None of these look-ups touches statistics, events or the order of eviction.
    Goes when: vLLM knows prefix hits before it schedules.

    Args:
        scheduler: vLLM's.
    """

    def __init__(self, scheduler: Any) -> None:
        self._manager = scheduler.kv_cache_manager
        coordinator = self._manager.coordinator
        self._lookup: Callable[..., Any] = need(coordinator, "find_longest_cache_hit")
        self._groups, self._block, self._scale, self._exact = _full_attention(coordinator, scheduler)
        managers = coordinator.single_type_managers
        self._dropped = int(self._exact and bool(getattr(managers[0], "use_eagle", False)))
        self._known: dict[str, Hit] = {}
        self._debt = self._firsts = 0

    def of(self, request: Any, step: int, *, following: bool = False) -> int:
        """Tokens of a waiting request that need not be computed; the last one always is, as vLLM does.

        Args:
            request: vLLM's.
            step: counts up; in the same step the answer is the same.
            following: it may be served next, so look anew: the prompt before it may just have filled the cache.
        """
        if request.num_computed_tokens:
            return int(min(request.num_computed_tokens, request.num_tokens - 1))
        if not request.block_hashes or not self._manager.enable_caching or request.skip_reading_prefix_cache:
            return 0
        hit = self._known.get(request.request_id)
        if hit is None or hit.hashes is not request.block_hashes:
            hit = self._known[request.request_id] = Hit(request.block_hashes)
            self._look(request, hit)
            self._firsts += 1
            hit.at = step - self._firsts % PATIENCE  # so that not all are looked up again in the same step
        elif step != hit.at and (following or step - hit.at >= PATIENCE):
            hit.at = step
            self._look(request, hit)
        return hit.tokens

    def known(self, request: Any) -> Hit | None:
        """What was found when this request, which waits, was looked up last; None where there is nothing to look up."""
        return None if request.num_computed_tokens else self._known.get(request.request_id)

    def paid(self) -> None:
        """A step goes by."""
        self._debt = max(self._debt - _PAID, 0)

    def forget(self, gone: Iterable[str]) -> None:
        """These requests are no more."""
        for key in gone:
            self._known.pop(key, None)

    def _look(self, request: Any, hit: Hit) -> None:
        most = request.num_tokens - 1
        if self._groups:
            blocks = min(most // self._block, len(hit.hashes) // self._scale)
            found = self._end(hit.hashes, blocks, hit.blocks)
            moved, hit.blocks = found != hit.blocks, found
            if self._exact or not found:
                hit.tokens = max(found - self._dropped, 0) * self._block
                return
            if not moved and hit.sure:
                return
            hit.tokens, hit.sure = found * self._block, False
        if self._debt:
            return
        hit.tokens = int(self._lookup(request.block_hashes, most)[1])  # 0.23 to 0.25 return two items, others three
        hit.sure = True
        self._debt = 1 + max(hit.tokens // self._block, hit.blocks)

    def _end(self, hashes: Sequence[Any], blocks: int, last: int) -> int:
        """How many of the first ``blocks`` blocks are cached, looked for near ``last``."""
        low, high = 0, blocks  # those below low are cached, the one at high is not or is none
        at, stride = min(last, blocks), 1
        if at and not self._cached(hashes, at - 1):
            high = at - 1
        else:
            low = at
            while low < high and self._cached(hashes, min(low + stride, high) - 1):
                low = min(low + stride, high)
                stride *= 8
            high = min(low + stride, high) - 1 if low < high else high
        while low < high:
            middle = (low + high) // 2
            if self._cached(hashes, middle):
                low = middle + 1
            else:
                high = middle
        return low

    def _cached(self, hashes: Sequence[Any], block: int) -> bool:
        pool = self._manager.block_pool
        return bool(pool.get_cached_block(hashes[(block + 1) * self._scale - 1], self._groups))


class Hit:
    """What is known of one prompt since step ``at``: ``tokens`` need not be computed, ``blocks`` of full attention are
    cached."""

    __slots__ = ("at", "blocks", "hashes", "sure", "tokens")

    def __init__(self, hashes: Sequence[Any]) -> None:
        self.hashes = hashes
        self.at = self.tokens = self.blocks = 0
        self.sure = False


def _full_attention(coordinator: Any, scheduler: Any) -> tuple[list[int], int, int, bool]:
    """(groups of full attention, tokens of their blocks, hashes a block, whether there is nothing else)."""
    managers = coordinator.single_type_managers
    hashed = int(getattr(coordinator.block_pool, "hash_block_size", scheduler.block_size))
    full = [at for at, manager in enumerate(managers) if type(manager).__name__ == "FullAttentionManager"]
    if not full:
        return [], int(scheduler.block_size), 1, False
    block = int(managers[full[0]].block_size)
    alike = [at for at in full if int(managers[at].block_size) == block]
    if block % hashed:
        return [], block, 1, False
    return alike, block, block // hashed, len(alike) == len(managers) == 1
