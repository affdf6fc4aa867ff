"""Who could be in vLLM's next step, in its order, and how many tokens each gets of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from isochunk.core.steps import Prefill
from isochunk.vllm import compat

__all__ = ["Batch", "Law", "Prompt", "Walker", "shares"]

_SHOWN = 32  # waiting prompts that the law is shown one by one
_ANEW = 4  # of them, how many are looked up in the prefix cache at each step


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt that wants tokens.

    ``cached`` of its tokens are in the local prefix cache, as far as is known; ``alone`` is what vLLM without isochunk
    would give it in this step (of one that waits, only where a threshold or a KV connector makes that count). ``hit``
    is its last look-up, where there is anything to look up.
    """

    request: Any
    prefill: Prefill
    alone: int
    waits: bool
    cached: int = 0
    hit: compat.Hit | None = None

    @property
    def key(self) -> str:
        """The request's id."""
        return self.prefill.key

    def still(self, request: Any, history: int) -> bool:
        """Whether this is the same request, waiting, with as much to do."""
        prefill = self.prefill
        return (
            self.request is request and prefill.history == history and prefill.remaining == request.num_tokens - history
        )

    @property
    def lacks(self) -> int:
        """Tokens that are not computed."""
        return self.prefill.remaining


@dataclass(slots=True)
class Batch:
    """The requests that want tokens.

    Attributes:
        decodes: (new tokens, history) of each request in the step whose prompt is done.
        streams: whether a request has its prompt done, or in the pipeline, and tokens to come.
        prompts: in the order in which vLLM serves them, ``begun`` of them running.
        more: prompts that wait behind those.
        aside: running requests that no step can hold beside those before them (too many LoRA adapters).
        unfit: ids of waiting requests whose adapter has to wait.
        limit: tokens that vLLM allows a step; ``left`` of them are left by the running requests.
        room: how many more requests may run.
        threshold: most tokens of a prompt in a step, set by the user; 0 for no such bound.
    """

    limit: int
    left: int
    room: int
    threshold: int
    decodes: list[tuple[int, int]] = field(default_factory=list)
    streams: bool = False
    prompts: list[Prompt] = field(default_factory=list)
    begun: int = 0
    more: int = 0
    aside: list[Any] = field(default_factory=list)
    unfit: list[str] = field(default_factory=list)

    def walk(self) -> None:
        """What vLLM alone would give the waiting prompts, after one of them turned out to lack less."""
        left = self.left
        for prompt in self.prompts[self.begun :]:
            prompt.alone = min(prompt.lacks, self.threshold or prompt.lacks, left)
            left -= prompt.alone


class Walker:
    """Walks through vLLM's queues as its next `schedule` will.

    What it found of those that wait is kept as long as they are the same, as is most often so from step to step.

    Args:
        scheduler: vLLM's.
        hits: what waiting prompts have in the prefix cache.
        external: what a KV connector has of them, if there is one.
        timed: whether anybody asks how long prompts have waited.
    """

    def __init__(
        self, scheduler: Any, hits: compat.PrefixHits, external: compat.ExternalHits, *, timed: bool = True
    ) -> None:
        self._scheduler, self._hits, self._external, self._timed = scheduler, hits, external, timed
        self._waiting: list[Prompt] = []
        self._state: list[Any] | None = None  # of the queue in which these were found; None where nothing holds it
        self._most = 0

    def batch(self) -> Batch:
        """Who could be in the next step."""
        scheduler = self._scheduler
        limit = scheduler.max_num_scheduled_tokens
        room = compat.most_active(scheduler) - scheduler.num_waiting_for_streaming_input - len(scheduler.running)
        batch = Batch(limit, limit, max(room, 0), compat.prefill_threshold(scheduler))
        adapters = _Adapters(scheduler) if scheduler.lora_config else None
        now = time.time() if self._timed else None
        _add_running(scheduler, batch, adapters, now)
        if batch.room and self._as_before(batch):
            self._look_again(batch.left)
        else:
            self._walk(batch, adapters, now)
        batch.prompts += self._waiting
        self._hits.paid()
        batch.more = compat.waiting_behind(scheduler, [prompt.request for prompt in self._waiting])
        return batch

    def _as_before(self, batch: Batch) -> bool:
        """Whether those that wait are those of the step before, none of them changed."""
        if self._state is None or batch.threshold or min(batch.room, _SHOWN) != self._most:
            return False
        return compat.waiting_state(self._scheduler, len(self._waiting) + 1) == self._state

    def _look_again(self, left: int) -> None:
        """Is as much in the prefix cache as before, of those that may be next and of those whose turn it is?"""
        step, waiting = self._scheduler.current_step, self._waiting
        long_ago = step - compat.PATIENCE
        for at, prompt in enumerate(waiting):
            hit = prompt.hit
            following = at < _ANEW and left > 0
            if hit is not None and (following or hit.at <= long_ago):
                cached = self._hits.of(prompt.request, step, following=following)
                if cached != prompt.cached:
                    waiting[at] = _waiting(prompt.request, cached, cached, None)
                    waiting[at].hit = hit
            if following:
                left -= waiting[at].lacks

    def _walk(self, batch: Batch, adapters: _Adapters | None, now: float | None) -> None:
        scheduler, hits, external = self._scheduler, self._hits, self._external
        before = {prompt.key: prompt for prompt in self._waiting}
        step, left, threshold = scheduler.current_step, batch.left, batch.threshold
        far = external.used or threshold > 0  # every prompt that vLLM's own budget would reach counts then
        self._waiting, self._state = [], None
        if not batch.room:
            return
        if adapters is not None:
            adapters.wait(scheduler)
        for request in compat.waiting_requests(scheduler):
            if adapters is not None and not adapters.fit(request):
                batch.unfit.append(request.request_id)
                continue
            cached = hits.of(request, step, following=left > 0 and len(self._waiting) < _ANEW)
            history = external.known(request, cached) if external.used else cached
            prompt = before.get(request.request_id)
            if prompt is None or now is not None or not prompt.still(request, history):
                prompt = _waiting(request, history, cached, now)
            prompt.alone, prompt.cached = max(min(prompt.lacks, threshold or prompt.lacks, left), 0), cached
            prompt.hit = hits.known(request)
            left -= prompt.alone
            if adapters is not None:
                adapters.add(request)
            self._waiting.append(prompt)
            shown = len(self._waiting)
            if shown >= batch.room or (shown >= _SHOWN and not (far and left > 0)):
                break
        if adapters is None and now is None and not far:
            self._keep(batch)

    def _keep(self, batch: Batch) -> None:
        requests = [prompt.request for prompt in self._waiting]
        state = compat.waiting_state(self._scheduler, len(requests) + 1)
        looked_at = state[: len(state) // 2]
        if looked_at[: len(requests)] == requests and compat.just_wait(looked_at):
            self._state, self._most = state, min(batch.room, _SHOWN)


def _add_running(scheduler: Any, batch: Batch, adapters: _Adapters | None, now: float | None) -> None:
    left, threshold, due = batch.left, batch.threshold, compat.decodes_due_by(scheduler)
    for request in scheduler.running:
        computed, placeholders = request.num_computed_tokens, request.num_output_placeholders
        lacks = request.num_tokens_with_spec + placeholders - computed
        decodes = not request.is_prefill_chunk
        if decodes and not batch.streams:
            batch.streams = compat.streams_on(request, lacks)
        if lacks <= 0 or request.next_decode_eligible_step > due:
            continue
        if placeholders and computed + 2 - placeholders >= request.num_prompt_tokens + request.max_tokens:
            continue  # vLLM knows that its last token is on its way
        if adapters is not None:
            if not adapters.fit(request):
                batch.aside.append(request)
                continue
            adapters.add(request)
        alone = min(lacks, left)
        if decodes:
            batch.decodes.append((lacks, computed))
        else:
            if threshold:
                alone = min(alone, threshold)
            batch.prompts.append(Prompt(request, _prefill(request, computed, lacks, now), alone, waits=False))
        left -= alone
    batch.left = left
    batch.begun = len(batch.prompts)


def _waiting(request: Any, history: int, cached: int, now: float | None) -> Prompt:
    prefill = _prefill(request, history, request.num_tokens - history, now)
    return Prompt(request, prefill, 0, waits=True, cached=cached)


def _prefill(request: Any, history: int, lacks: int, now: float | None) -> Prefill:
    return Prefill(request.request_id, history, lacks, 0.0 if now is None else now - request.arrival_time)


class _Adapters:
    """LoRA adapters of a step: at most so many."""

    def __init__(self, scheduler: Any) -> None:
        self._most = int(scheduler.lora_config.max_loras)
        self._in: set[int] = set()

    def fit(self, request: Any) -> bool:
        if not request.lora_request:
            return True
        return request.lora_request.lora_int_id in self._in or len(self._in) < self._most

    def add(self, request: Any) -> None:
        if request.lora_request:
            self._in.add(request.lora_request.lora_int_id)

    def wait(self, scheduler: Any) -> None:
        """From here on waiting requests are asked about."""
        self._in |= compat.adapters_of_running(scheduler)


class Law(Protocol):
    """What a step should take."""

    def tokens(self, queue: Sequence[Prefill], beside: Sequence[tuple[int, int]]) -> int | None:
        """Prefill tokens of a step that holds these others too; None leaves it to vLLM."""

    def fits(self, beside: Sequence[tuple[int, int]]) -> bool:
        """Whether a step of these (new tokens, history) is no longer than it may be."""


def shares(
    prompts: Sequence[Prompt], batch: Batch, law: Law, least: Callable[[Prompt], int], block: int
) -> dict[str, int]:
    """What each prompt of the step gets, in order; empty where the step is left to vLLM.

    Where a threshold of the user's holds a prompt back, all that vLLM alone would serve in this step are served in it:
    those that it would serve whole get it all, the others share what the law gives a step, each below the threshold.

    Args:
        prompts: in the order in which they are served.
        batch: what else is in the step.
        law: how long it should be.
        least: fewest tokens with which vLLM lets a prompt go on.
        block: tokens whose multiples chunks end on.
    """
    room = batch.limit - sum(new for new, _ in batch.decodes)
    if room <= 0:
        return {}
    if batch.threshold and any(prompt.alone == batch.threshold < prompt.lacks for prompt in prompts):
        return _fair(prompts, batch, room, law, least, block)
    total = law.tokens([prompt.prefill for prompt in prompts], batch.decodes)
    return {} if total is None else _in_order(prompts, min(total, room), room, batch.threshold, least)


def _in_order(
    prompts: Sequence[Prompt], total: int, room: int, threshold: int, least: Callable[[Prompt], int]
) -> dict[str, int]:
    given: dict[str, int] = {}
    for prompt in prompts:
        most = min(prompt.lacks, threshold or prompt.lacks)
        size = min(total, most)
        if size < most and size < (floor := least(prompt)):
            size = 0 if given else min(floor, most, room)
        if size <= 0:
            break
        given[prompt.key] = size
        total -= size
        if total <= 0:
            break
    return given


def _fair(
    prompts: Sequence[Prompt], batch: Batch, room: int, law: Law, least: Callable[[Prompt], int], block: int
) -> dict[str, int]:
    beside = list(batch.decodes)
    given: dict[str, int] = {}
    for prompt in prompts:
        if prompt.alone == prompt.lacks <= room and law.fits([*beside, (prompt.lacks, prompt.prefill.history)]):
            beside.append((prompt.lacks, prompt.prefill.history))
            given[prompt.key] = prompt.lacks
            room -= prompt.lacks
    part = [prompt for prompt in prompts if prompt.alone and prompt.key not in given]
    rest = [prompt for prompt in prompts if not prompt.alone]
    if not part:
        return given
    total = law.tokens([prompt.prefill for prompt in [*part, *rest]], beside)
    if total is None:
        return {}
    each = total // len(part)
    each -= each % block if each >= block else 0
    for prompt in part:
        size = min(max(each, least(prompt)), prompt.alone, room)
        if size > 0:
            given[prompt.key] = size
            room -= size
    return given
