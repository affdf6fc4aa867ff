"""vLLM-Ascend: which one is there, and its schedulers.

Read from its tags v0.23.0 to v0.25.1rc1 and main (vLLM 0.27). `python -m tests.versions --ascend REPOSITORY` tries
this against its own files, on machines without an NPU.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from importlib import metadata, util
from types import CodeType
from typing import Any

from isochunk.vllm.compat.patching import need, vllm_version
from isochunk.vllm.versions import minor

__all__ = [
    "ascend_version",
    "balance_scheduling",
    "class_that_replaces_schedule",
    "decodes_due_by",
    "mend_own_schedule",
    "own_schedule",
    "reads_nested_section",
]

_BALANCE = "enable_balance_scheduling"
_BALANCE_VARIABLE = "VLLM_ASCEND_BALANCE_SCHEDULING"
_NESTED_SINCE = (0, 25)


def ascend_version() -> str | None:
    """Version of the installed vLLM-Ascend, which is vLLM's where it doesn't say; None without it."""
    try:
        return metadata.version("vllm-ascend")
    except metadata.PackageNotFoundError:
        return vllm_version() if util.find_spec("vllm_ascend") is not None else None


def reads_nested_section() -> bool:
    """Whether this vLLM-Ascend reads `additional_config.scheduler_config`; 0.23 and 0.24 read the top level only."""
    return (minor(ascend_version() or "") or _NESTED_SINCE) >= _NESTED_SINCE


def balance_scheduling(additional_config: Any) -> str | None:
    """What switches vLLM-Ascend's balance scheduling on: a key or its variable; None when it is off.

    The variable counts where no key does.
    """
    config = additional_config if isinstance(additional_config, dict) else {}
    nested = config.get("scheduler_config")
    places = {f"additional_config.scheduler_config.{_BALANCE}": nested, f"additional_config.{_BALANCE}": config}
    said = {where: place[_BALANCE] for where, place in places.items() if isinstance(place, dict) and _BALANCE in place}
    for where, value in said.items():
        if value:
            return where
    ignored = set() if reads_nested_section() else {f"additional_config.scheduler_config.{_BALANCE}"}
    value = os.environ.get(_BALANCE_VARIABLE, "").strip()
    return f"{_BALANCE_VARIABLE}={value}" if value not in ("", "0") and not said.keys() - ignored else None


def class_that_replaces_schedule(scheduler_cls: type) -> str | None:
    """Name of the class that this scheduler has `schedule` from, where that is a copy of vLLM's; None where it is not.

    Why: what orders the queue and then calls vLLM's `schedule` can be narrowed like vLLM's own; a copy has forgotten
    what isochunk relies on. A copy hands out KV blocks by itself.
    """
    from vllm.v1.core.sched import async_scheduler, scheduler

    own = {*scheduler.Scheduler.__mro__, *async_scheduler.AsyncScheduler.__mro__}
    for base in scheduler_cls.__mro__:
        if base not in own and "schedule" in vars(base):
            code = getattr(vars(base)["schedule"], "__code__", None)
            if code is None or "allocate_slots" in set(_names(code)):
                return f"{base.__module__}.{base.__qualname__}"
    return None


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def own_schedule(scheduler: Any) -> bool:
    """Whether this is vLLM-Ascend 0.23 on a P node, where vLLM's class is replaced by one with a copy of `schedule`.

    That copy never preempts, never counts `current_step`, and takes no note of `next_decode_eligible_step`.
    Goes when: vLLM-Ascend 0.23 does.
    """
    return bool(getattr(scheduler, "_disable_preemption", False))


def decodes_due_by(scheduler: Any) -> float:
    """Running requests whose `next_decode_eligible_step` is no later are looked at by vLLM's next `schedule`.

    Why: from one decode to the next of a request, as many steps pass as there are stages, where the worker asks for it.
    """
    return math.inf if own_schedule(scheduler) else int(scheduler.current_step) + 1


def mend_own_schedule(scheduler: Any) -> None:
    """Give such a copy what it has forgotten. Does nothing to other schedulers.

    Its steps are counted. And a prompt is let in only when all that run, and it, can be computed to their ends in what
    the KV cache has left: without preemption, requests that together need more blocks than there are wait for each
    other for ever. vLLM's whole chunks seldom come to that; smaller ones have more prompts under way at once.
    """
    if not own_schedule(scheduler):
        return
    manager = scheduler.kv_cache_manager
    allocate: Callable[..., Any] = need(manager, "allocate_slots")
    begin: Callable[[], None] = need(manager, "new_step_starts")
    groups = max(len(scheduler.kv_cache_config.kv_cache_groups), 1)

    def new_step_starts() -> None:
        scheduler.current_step += 1
        begin()

    def missing(request: Any) -> int:
        """Blocks that it will still ask for."""
        end = min(request.num_prompt_tokens + request.max_tokens, scheduler.max_model_len)
        blocks = cdiv(end + scheduler.num_lookahead_tokens) - cdiv(request.num_computed_tokens)
        return groups * max(blocks, 0)

    def cdiv(tokens: int) -> int:
        return -(-tokens // int(scheduler.block_size))

    def allocate_slots(request: Any, *args: Any, **kwargs: Any) -> Any:
        running = scheduler.running
        if running and request not in running:
            free = manager.block_pool.get_num_free_blocks()
            if missing(request) + sum(map(missing, running)) > free:
                return None
        return allocate(request, *args, **kwargs)

    manager.new_step_starts = new_step_starts
    manager.allocate_slots = allocate_slots
