"""What a step reads of vLLM's scheduler and sets in it: queues, prefix hits, requests."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

from isochunk.vllm.compat.patching import need

__all__ = [
    "ExternalHits",
    "aborted_status",
    "alignment",
    "kv_cache_tokens",
    "most_active",
    "passed_over",
    "prefill_requests",
    "prefix_hit",
    "probe_request",
    "without_prefix_cache",
]

_ALIGNMENT = 16


def prefill_requests(scheduler: Any, most: int) -> tuple[list[Any], int]:
    """Up to ``most`` waiting requests in the order in which vLLM takes them, and how many are behind.

    Why: the queues are internals of `Scheduler`. Blocked requests (waiting for remote KV, a grammar) are
    left out, as vLLM skips them and notes them as deferred.
    """
    from vllm.v1.request import RequestStatus

    ready = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
    order: Iterator[Any]
    if hasattr(scheduler, "kv_holding_waiting"):
        queues = (scheduler.kv_holding_waiting, scheduler.waiting)
        blocked = len(scheduler.deferred_waiting)
        order = chain(*queues)
    else:  # form of 0.23 to 0.30: what was skipped has a queue of its own, and priorities decide between the two
        queues = (scheduler.skipped_waiting, scheduler.waiting)
        blocked = sum(request.status not in ready for request in scheduler.skipped_waiting)
        order = heapq.merge(*queues) if scheduler.policy.value == "priority" else chain(*queues)
    found = list(islice((request for request in islice(order, 4 * most) if request.status in ready), most))
    return found, max(sum(map(len, queues)) - blocked - len(found), 0)


def most_active(scheduler: Any) -> int:
    """How many requests vLLM lets run at once.

    Why: from 0.31 on it may be fewer than the model runner has room for.
    """
    return int(getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs))


def kv_cache_tokens(scheduler: Any) -> int:
    """Tokens that the KV cache holds; those that a request may have where vLLM says neither.

    Why: vLLM 0.23 has no `cache_config.kv_cache_size_tokens`.
    """
    if tokens := getattr(scheduler.cache_config, "kv_cache_size_tokens", None):
        return int(tokens)
    cache = scheduler.kv_cache_config
    groups = max(len(cache.kv_cache_groups), 1)
    return int(cache.num_blocks) // groups * int(scheduler.block_size) or int(scheduler.max_model_len)


def prefix_hit(scheduler: Any, request: Any) -> int:
    """Tokens of a waiting request that are in the local prefix cache.

    Why: `get_computed_blocks` may emit cache events; the coordinator's lookup below it has no side effect
    on statistics or eviction order. The last token is always computed, as vLLM does.
    """
    if request.num_computed_tokens:
        return int(request.num_computed_tokens)
    manager = scheduler.kv_cache_manager
    if not request.block_hashes or not manager.enable_caching or request.skip_reading_prefix_cache:
        return 0
    # 0.23 to 0.25 return two items, others three.
    return int(manager.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)[1])


class ExternalHits:
    """What the KV connector would load of a waiting request, told to vLLM too when it asks the same in that step.

    Why: some connectors count, pin or forget at every `get_num_new_matched_tokens`, so it must not be asked twice.
    Goes when: vLLM knows external hits before it schedules.

    Args:
        connector: of vLLM's scheduler, or None.
        block: tokens of a KV block.
    """

    def __init__(self, connector: Any, block: int) -> None:
        self._block = block
        self._answers: dict[tuple[str, int], tuple[int | None, bool]] = {}
        self._ask: Callable[[Any, int], tuple[int | None, bool]] | None = None
        if connector is not None:
            need(connector, "get_num_new_matched_tokens")
            self._ask = connector.get_num_new_matched_tokens
            connector.get_num_new_matched_tokens = self._tell

    def history(self, request: Any, hit: int) -> int | None:
        """Tokens that need not be computed, given the local prefix hit; None when vLLM will let the request wait."""
        if self._ask is None or request.num_computed_tokens or request.skip_reading_prefix_cache:
            return hit
        aligned = hit - hit % self._block
        answer = self._answers[request.request_id, aligned] = self._ask(request, aligned)
        more, between_steps = answer
        return None if more is None or between_steps else max(hit, aligned + more)

    def forget(self) -> None:
        """Call it after each step: what could be loaded may be gone in the next."""
        self._answers.clear()

    def _tell(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self._ask is not None
        told = self._answers.pop((request.request_id, num_computed_tokens), None)
        return self._ask(request, num_computed_tokens) if told is None else told


@contextmanager
def passed_over(scheduler: Any, requests: Sequence[Any]) -> Iterator[None]:
    """vLLM's next `schedule` leaves these running requests out, and goes on with those behind them.

    Why: it serves running requests in order. It does pass over those whose next decode is not due yet
    (`Request.next_decode_eligible_step`), and looks at nothing else of a request before that.
    Goes when: vLLM shares steps between prompts by itself.
    """
    due = [request.next_decode_eligible_step for request in requests]
    for request in requests:
        request.next_decode_eligible_step = scheduler.current_step + 2
    try:
        yield
    finally:
        for request, step in zip(requests, due, strict=True):
            request.next_decode_eligible_step = step


def alignment(scheduler: Any) -> int:
    """Tokens whose multiples chunks end on: at most 16, or a whole block where vLLM asks for block-aligned chunks.

    Why: vLLM needs whole blocks only for models with Mamba-like state. Blocks are large on some platforms
    (128 tokens on CPUs), where rounding to them made chunks so unequal that a prompt came 10% late.
    """
    block = int(scheduler.block_size)
    if scheduler.need_mamba_block_aligned_split or block % _ALIGNMENT:
        return block
    return _ALIGNMENT


def probe_request(request_id: str, token_ids: list[int]) -> Any:
    """A request that asks for one token, has no client, and names no KV peer.

    Why: made without the front end. It has no block hashes: run it under `without_prefix_cache`. It does not read
    from external KV stores either; one that keeps every prompt by its tokens will keep this one.
    """
    from vllm.v1.request import Request

    from vllm import SamplingParams

    return Request(
        request_id=request_id,
        prompt_token_ids=token_ids,
        sampling_params=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, skip_reading_prefix_cache=True),
        pooling_params=None,
        block_hasher=None,
    )


@contextmanager
def without_prefix_cache(scheduler: Any) -> Iterator[None]:
    """Switch the prefix cache off for a while, so that probe prompts leave no entry and no event in it.

    Why: with caching on, vLLM stores the blocks of every request and fails on one without hashes.
    """
    managers = [scheduler.kv_cache_manager, *scheduler.kv_cache_manager.coordinator.single_type_managers]
    before = [manager.enable_caching for manager in managers]
    for manager in managers:
        manager.enable_caching = False
    try:
        yield
    finally:
        for manager, enabled in zip(managers, before, strict=True):
            manager.enable_caching = enabled


def aborted_status() -> Any:
    """The status of a request that is given up (`Scheduler.finish_requests`)."""
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ABORTED
