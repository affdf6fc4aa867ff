"""A step's bounds: what each prompt gets of it, and who sits it out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from isochunk.vllm.compat.ascend import own_schedule

__all__ = ["Bounded", "Bounds", "alignment", "least_chunk", "wait_their_turn"]

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


class Bounded:
    """While it is entered, vLLM's `schedule` keeps to these bounds; for one step.

    Why: `max_num_scheduled_tokens` bounds the step, and only the step: whoever comes first takes it all, be it from
    decodes that stand behind. vLLM has one place where it cuts each prompt's chunk to a size of its own: for models
    with Mamba-like state, at the end of a block (`_mamba_block_aligned_split`, asked while
    `need_mamba_block_aligned_split`). All of 0.23 to 0.33 ask there for every request, running or waiting, after the
    user's own threshold; 0 tokens leave a running request out and end the scan of the waiting ones.
    Goes when: vLLM bounds each request by itself (a hook for it, or a threshold by request).

    All that can fail is done when it is made. What fails while vLLM asks leaves that request to vLLM.

    Args:
        scheduler: vLLM's.
        bounds: what the step is held to.
        passing: called as vLLM comes to a held request, with its tokens.
        errors: takes what fails while vLLM asks.
    """

    def __init__(self, scheduler: Any, bounds: Bounds, passing: Callable[[int], None], errors: list[Exception]) -> None:
        self._scheduler, self._passing, self._errors = scheduler, passing, errors
        # vLLM-Ascend's copy asks there for loads as well, which have no tokens, and ends its scan at the first.
        self._caps = None if own_schedule(scheduler) else bounds.caps
        self._held, self._aside = bounds.held, list(bounds.aside)
        self._limit, self._aligned = scheduler.max_num_scheduled_tokens, scheduler.need_mamba_block_aligned_split
        self._split = scheduler._mamba_block_aligned_split
        self._blocked = getattr(scheduler, "_handle_blocked_waiting_request", None)
        self._budget = min(max(bounds.budget, 1), self._limit)
        self._running = _running()
        self._due = [request.next_decode_eligible_step for request in self._aside]
        self._passed_over = scheduler.current_step + 2  # vLLM looks at nothing else of whose next decode is not due

    def __enter__(self) -> None:
        scheduler = self._scheduler
        scheduler.max_num_scheduled_tokens = self._budget
        if self._caps is not None:
            scheduler.need_mamba_block_aligned_split = True
            scheduler._mamba_block_aligned_split = self._cut
        if self._held and self._blocked is not None:
            scheduler._handle_blocked_waiting_request = self._handle
        for request in self._aside:
            request.next_decode_eligible_step = self._passed_over

    def __exit__(self, *_: object) -> None:
        scheduler = self._scheduler
        scheduler.max_num_scheduled_tokens = self._limit
        scheduler.need_mamba_block_aligned_split = self._aligned
        vars(scheduler).pop("_mamba_block_aligned_split", None)
        vars(scheduler).pop("_handle_blocked_waiting_request", None)
        for request, step in zip(self._aside, self._due, strict=True):
            request.next_decode_eligible_step = step
        if self._held:
            try:
                wait_their_turn(scheduler, [scheduler.requests[key] for key in self._held if key in scheduler.requests])
            except Exception as error:  # noqa: BLE001 - it is statistics
                self._errors.append(error)

    def _cut(self, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> int:
        try:
            num_new_tokens = self._capped(request, num_new_tokens)
        except Exception as error:  # noqa: BLE001 - vLLM is in the middle of its step
            self._errors.append(error)
        if self._aligned and num_new_tokens:
            return int(self._split(request, num_new_tokens, *args, **kwargs))
        return num_new_tokens

    def _capped(self, request: Any, num_new_tokens: int) -> int:
        if request.status is self._running and not request.is_prefill_chunk:
            return num_new_tokens
        assert self._caps is not None
        return min(num_new_tokens, self._caps.get(request.request_id, 0))

    def _handle(self, request: Any) -> Any:
        try:
            if request.request_id in self._held:
                self._passing(self._held[request.request_id])
                return False
        except Exception as error:  # noqa: BLE001 - as above
            self._errors.append(error)
        assert self._blocked is not None
        return self._blocked(request)


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
