"""Who waits in vLLM's scheduler, and whom it would take in its next step."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from operator import attrgetter
from typing import Any

from isochunk.vllm.compat.patching import vllm_version
from isochunk.vllm.versions import minor

__all__ = [
    "adapters_of_running",
    "is_paused",
    "just_wait",
    "prefill_threshold",
    "reorder_waiting",
    "streams_on",
    "waiting_behind",
    "waiting_requests",
    "waiting_state",
]

_RUNNING_ADAPTERS = (0, 33)
_STATE = attrgetter("status", "num_computed_tokens")


def waiting_requests(scheduler: Any) -> Iterator[Any]:
    """Waiting requests that vLLM would take in its next step if it had the tokens, in its order.

    Why: the queues are internals of `Scheduler`. Those that wait for a grammar, remote KV or the next part of a
    stream are passed over, as vLLM does; those whose grammar or KV has just come are not, since vLLM takes them on.
    """
    return filter(_ready(scheduler), _order(scheduler))


def waiting_state(scheduler: Any, count: int) -> list[Any]:
    """The first ``count`` requests in vLLM's order, blocked ones too, with what may change of one that just waits.

    Where the list is equal to an older one, the queue is as it was, if none of those was blocked.
    """
    requests = list(islice(_order(scheduler), count))
    return [*requests, *map(_STATE, requests)]


def just_wait(requests: Iterable[Any]) -> bool:
    """Whether all of these wait for nothing but tokens, and have not been preempted."""
    from vllm.v1.request import RequestStatus

    return all(request.status is RequestStatus.WAITING for request in requests)


def _order(scheduler: Any) -> Iterable[Any]:
    paused = is_paused(scheduler)
    if hasattr(scheduler, "kv_holding_waiting"):
        # While new requests are held back, those that hold KV blocks are still taken.
        return () if paused == "all" else chain(scheduler.kv_holding_waiting, () if paused else scheduler.waiting)
    if paused:
        return ()
    # form of 0.23 to 0.30: what was skipped has a queue of its own, and priorities decide between the two
    queues = (scheduler.skipped_waiting, scheduler.waiting)
    return heapq.merge(*queues) if scheduler.policy.value == "priority" else chain(*queues)


def reorder_waiting(scheduler: Any, rank: Callable[[Any], tuple[float, float]]) -> None:
    """Put those that wait and have not begun in the order of their ranks, behind those that were preempted.

    Why: vLLM's own priority queue can't carry it: a request's priority is fixed when it comes, so nobody ages, and
    running requests are preempted by it. Its queue for first come, first served is a deque, popped from the left.
    Goes when: vLLM has a queue ordered by the scheduler.
    """
    from vllm.v1.request import RequestStatus

    waiting = list(scheduler.waiting)
    if len(waiting) < 2:
        return
    first = [request for request in waiting if request.status is RequestStatus.PREEMPTED or request.num_computed_tokens]
    begun = set(map(id, first))
    others = [request for request in waiting if id(request) not in begun]
    ranks = {id(request): rank(request) for request in others}
    order = [*first, *sorted(others, key=lambda request: ranks[id(request)])]
    scheduler.waiting.clear()
    scheduler.waiting.extend(order)


def _ready(scheduler: Any) -> Any:
    """A test for requests that vLLM would take on, without doing what vLLM does when it takes them on."""
    from vllm.v1.request import RequestStatus

    waiting, preempted = RequestStatus.WAITING, RequestStatus.PREEMPTED
    remote, grammar = RequestStatus.WAITING_FOR_REMOTE_KVS, RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    received = scheduler.finished_recving_kv_req_ids

    def ready(request: Any) -> bool:
        status = request.status
        if status is waiting or status is preempted:
            # Its last output is still in the pipeline (0.28 on): it goes on after that.
            return not getattr(request, "num_stale_output_tokens", 0) or request.drop_stale_output
        if status is remote:
            return request.request_id in received
        if status is grammar:
            asked = request.structured_output_request
            made = asked.grammar if asked else None
            return made is not None and not isinstance(made, Exception)
        return False

    return ready


def waiting_behind(scheduler: Any, shown: Sequence[Any]) -> int:
    """How many requests that could be served wait beside those shown; about, since blocked ones may be ready now."""
    if is_paused(scheduler):
        return 0
    if hasattr(scheduler, "kv_holding_waiting"):
        deferred = scheduler.deferred_waiting
        total = len(scheduler.kv_holding_waiting) + len(scheduler.waiting)
        blocked = len(deferred) - sum(request in deferred for request in shown) if deferred else 0
        return int(max(total - len(shown) - blocked, 0))
    ready = _ready(scheduler)
    skipped = sum(map(ready, scheduler.skipped_waiting))
    return int(max(len(scheduler.waiting) + skipped - len(shown), 0))


def is_paused(scheduler: Any) -> str:
    """One of "all" while vLLM schedules nothing, "new" while it takes on no new request, else ""."""
    state = getattr(scheduler, "_pause_state", None)
    name = "UNPAUSED" if state is None else state.name
    return {"PAUSED_ALL": "all", "PAUSED_NEW": "new"}.get(name, "")


def prefill_threshold(scheduler: Any) -> int:
    """Most tokens that vLLM gives one request in its next step under the user's thresholds; 0 for no such bound.

    Why: `long_prefill_token_threshold`, from 0.31 on for more than one request only, and adaptive on request;
    `max_num_partial_prefills` (until 0.26) does no more in vLLM than set it.
    """
    config = scheduler.scheduler_config
    threshold = int(config.long_prefill_token_threshold)
    if threshold <= 0 or not hasattr(scheduler, "adaptive_long_prefill_threshold"):
        return max(threshold, 0)
    requests = int(sum(scheduler.get_request_counts()))
    if requests < 2:
        return 0
    if scheduler.adaptive_long_prefill_threshold:
        return int(max(threshold, config.max_num_batched_tokens // requests))
    return threshold


def adapters_of_running(scheduler: Any) -> set[int]:
    """LoRA adapters of running requests that waiting ones must get along with, be they in the next step or not.

    Why: vLLM counts those of the requests that it schedules; from 0.33 on those of all that run, since two that run
    and were not in one step can be in the next, which then fails in an assertion.
    """
    release = minor(vllm_version())
    if release is not None and release < _RUNNING_ADAPTERS:
        return set()
    return {request.lora_request.lora_int_id for request in scheduler.running if request.lora_request}


def streams_on(request: Any, lacks: int) -> bool:
    """Whether a request whose prompt is done, or ends in a step on its way, has a token to come that has no step yet.

    Args:
        request: vLLM's, running.
        lacks: tokens that it could have computed now; none while its last step is in the pipeline.
    """
    on_its_way = request.num_output_placeholders or int(lacks <= 0)
    return bool(request.num_output_tokens + on_its_way < request.max_tokens)
