"""A step's bounds: what each prompt gets of it, and who sits it out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from isochunk.vllm.compat.ascend import own_schedule

__all__ = ["Bounds", "alignment", "bounded", "least_chunk", "wait_their_turn"]

_ALIGNMENT = 16


@dataclass(slots=True)
class Bounds:
    """What vLLM's next step is held to.

    ``budget`` tokens in all; of prompts, those in ``caps`` alone, with at most so many tokens each (None: all of them,
    as vLLM likes). Requests that have their prompt behind them are not in it. ``aside`` are running requests that sit
    the step out, ``held`` waiting ones that are passed over (0.31 on: before, vLLM stops at the first of them), with
    the tokens that vLLM alone would give each.
    """

    budget: int
    caps: Mapping[str, int] | None
    aside: Sequence[Any] = ()
    held: Mapping[str, int] = field(default_factory=dict)


@contextmanager
def bounded(scheduler: Any, bounds: Bounds | None, passing: Callable[[int], None]) -> Iterator[None]:
    """vLLM's next `schedule` keeps to these bounds; None lets it do as it likes.

    Why: `max_num_scheduled_tokens` bounds the step, and only the step: whoever comes first takes it all, be it from
    decodes that stand behind. vLLM has one place where it cuts each prompt's chunk to a size of its own: for models
    with Mamba-like state, at the end of a block (`_mamba_block_aligned_split`, asked while
    `need_mamba_block_aligned_split`). All of 0.23 to 0.33 ask there for every request, running or waiting, after the
    user's own threshold; 0 tokens leave a running request out and end the scan of the waiting ones.
    Goes when: vLLM bounds each request by itself (a hook for it, or a threshold by request).

    Args:
        passing: called as vLLM comes to a held request, with its tokens.
    """
    if bounds is None:
        yield
        return
    limit, aligned = scheduler.max_num_scheduled_tokens, scheduler.need_mamba_block_aligned_split
    split, blocked = scheduler._mamba_block_aligned_split, getattr(scheduler, "_handle_blocked_waiting_request", None)
    running = _running()
    # vLLM-Ascend's copy asks there for loads as well, which have no tokens, and ends its scan at the first.
    caps, held = None if own_schedule(scheduler) else bounds.caps, bounds.held

    def cut(request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> int:
        if request.status is not running or request.is_prefill_chunk:
            assert caps is not None
            num_new_tokens = min(num_new_tokens, caps.get(request.request_id, 0))
        if aligned and num_new_tokens:
            return int(split(request, num_new_tokens, *args, **kwargs))
        return num_new_tokens

    def handle(request: Any) -> Any:
        if request.request_id in held:
            passing(held[request.request_id])
            return False
        assert blocked is not None
        return blocked(request)

    scheduler.max_num_scheduled_tokens = min(max(bounds.budget, 1), limit)
    if caps is not None:
        scheduler.need_mamba_block_aligned_split = True
        scheduler._mamba_block_aligned_split = cut
    if held and blocked is not None:
        scheduler._handle_blocked_waiting_request = handle
    due = [request.next_decode_eligible_step for request in bounds.aside]
    for request in bounds.aside:  # vLLM passes over those whose next decode is not due, and looks at nothing else
        request.next_decode_eligible_step = scheduler.current_step + 2
    try:
        yield
    finally:
        scheduler.max_num_scheduled_tokens = limit
        scheduler.need_mamba_block_aligned_split = aligned
        vars(scheduler).pop("_mamba_block_aligned_split", None)
        vars(scheduler).pop("_handle_blocked_waiting_request", None)
        for request, step in zip(bounds.aside, due, strict=True):
            request.next_decode_eligible_step = step
        if held:
            wait_their_turn(scheduler, [scheduler.requests[key] for key in held if key in scheduler.requests])


def wait_their_turn(scheduler: Any, requests: Iterable[Any]) -> None:
    """These requests were passed over because it is not their turn, not because something holds them up.

    Why: vLLM's statistics tell the two apart (`deferred_waiting`, 0.31 on).
    """
    if hasattr(scheduler, "deferred_waiting"):
        scheduler.deferred_waiting.difference_update(requests)


def alignment(scheduler: Any) -> int:
    """Tokens whose multiples chunks end on: at most 16, or a whole block where vLLM asks for block-aligned chunks.

    Why: vLLM needs whole blocks only for models with Mamba-like state. Blocks are large on some platforms
    (128 tokens on CPUs), where rounding to them made chunks so unequal that a prompt came 10% late.
    """
    block = int(scheduler.block_size)
    if scheduler.need_mamba_block_aligned_split or block % _ALIGNMENT:
        return block
    return _ALIGNMENT


def least_chunk(scheduler: Any, request: Any, history: int) -> int:
    """Fewest tokens with which vLLM lets this prompt go on; with fewer it may give it none, for ever.

    Why: chunks end on blocks for Mamba-like state; multi-token prediction keeps the last few tokens of a prompt in
    one chunk (`_reserve_prefill_lookahead`, 0.28 on); an image that must stay whole is not begun without its end.
    """
    least = max(int(getattr(scheduler, "num_prefill_lookahead", 0)), 1)
    if scheduler.need_mamba_block_aligned_split:
        least = max(least, int(scheduler.block_size))
    if request.has_encoder_inputs and scheduler.scheduler_config.disable_chunked_mm_input:
        shift = max(int(getattr(scheduler, "num_prefill_lookahead", 0)), int(bool(scheduler.use_eagle)))
        for feature in request.mm_features:
            start, length = feature.mm_position.offset, feature.mm_position.length
            if start <= history + least + shift and start + length > history:
                least = max(least, start + length - history)
    return least


def _running() -> Any:
    from vllm.v1.request import RequestStatus

    return RequestStatus.RUNNING
