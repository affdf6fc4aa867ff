"""What the probe needs of vLLM's scheduler: how much it holds, requests of its own, no prefix cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = [
    "aborted_status",
    "kv_cache_tokens",
    "most_active",
    "probe_request",
    "without_prefix_cache",
]


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
