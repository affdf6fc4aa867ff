"""vLLM's schedulers, narrowed: this step's token budget comes from isochunk, everything else from vLLM."""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler as VllmAsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler

from isochunk.core.steps import Prefill, StepPlanner
from isochunk.core.turns import Turns
from isochunk.vllm import compat
from isochunk.vllm.config import ChunkConfig
from isochunk.vllm.controller import Controller
from isochunk.vllm.prompts import Part
from isochunk.vllm.session import Session
from isochunk.vllm.settings import check_engine, chunk_config

__all__ = ["AsyncScheduler", "Scheduler"]

_QUEUE = 32  # waiting prompts looked at in a step
_HIT_STEPS = 8  # a waiting request's prefix hit is looked up again after so many steps


class NarrowedScheduler:
    """Mixin over vLLM's scheduler classes; an error in it leaves the step to vLLM and is counted."""

    vllm_config: Any
    scheduler_config: Any
    block_size: int
    connector: Any
    current_step: int
    max_num_scheduled_tokens: int
    num_spec_tokens: int
    requests: dict[str, Any]
    running: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_engine(self.vllm_config)
        config = chunk_config(self.vllm_config)
        self.isochunk = Session(self, config, self._controller(config))
        self._hits: dict[str, tuple[int, int]] = {}
        self._external = compat.ExternalHits(self.connector, self.block_size)
        self._turns = Turns(config.max_queue_delay)
        compat.before_busy_loop(_start)
        compat.add_engine_methods({"isochunk_status": _status, "isochunk_policy": _policy})

    def _controller(self, config: ChunkConfig) -> Controller:
        stages = self.vllm_config.parallel_config.pipeline_parallel_size
        planner = StepPlanner(
            stages=stages,
            max_chunk=self.max_num_scheduled_tokens,
            block=compat.alignment(self),
            min_chunk=config.min_chunk or self.block_size,
            smooth=config.smooth_factor,
        )
        return Controller(config, planner, stages)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's own `schedule` under this step's token budget."""
        limit = self.max_num_scheduled_tokens
        aside: list[Any] = []
        try:
            budget = self._budget(aside)
        except Exception:  # noqa: BLE001 - whatever is wrong in the planner must not stop serving
            self.isochunk.fault("the planner failed")
            budget = None
        if budget is not None:
            self.max_num_scheduled_tokens = min(max(budget, 1), limit)
        try:
            with compat.passed_over(self, aside):
                output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.max_num_scheduled_tokens = limit
            self._external.forget()
        try:
            if aside and not output.total_num_scheduled_tokens:
                self._turns.refused()
            self._entered(output)
        except Exception:  # noqa: BLE001 - as above: without its record a step is only not timed
            self.isochunk.fault("a step could not be recorded")
        return output

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's own `update_from_output`, and the time at which the step came out."""
        if scheduler_output.total_num_scheduled_tokens:
            try:
                self.isochunk.exited(time.monotonic(), scheduler_output)
            except Exception:  # noqa: BLE001 - as above
                self.isochunk.fault("a step could not be timed")
        return super().update_from_output(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def _budget(self, aside: list[Any]) -> int | None:
        """Tokens of this step, decodes included; None leaves it to vLLM. Requests that sit it out go to ``aside``."""
        queue: list[Prefill] = []
        decodes: list[tuple[int, int]] = []
        now = time.time()
        for request in self.running:
            new = request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
            if new <= 0 or self.current_step + 1 < request.next_decode_eligible_step:
                continue
            if request.is_prefill_chunk:
                waited = now - request.arrival_time
                queue.append(Prefill(request.request_id, request.num_computed_tokens, new, waited))
            else:
                decodes.append((new, request.num_computed_tokens))
        begun = len(queue)
        more = self._add_waiting(queue, now)
        yielding = self._turns.aside(queue, begun)
        if yielding:
            aside += [self.requests[key] for key in yielding]
            queue = [prompt for prompt in queue if prompt.key not in yielding]
            self.isochunk.controller.yielded(yielding)
        if not queue or self._keeps_images_whole(queue):
            return None
        tokens = self.isochunk.tokens(queue, more, decodes, between=bool(yielding))
        if tokens is None:
            return None
        if any(prompt.remaining == 1 for prompt in queue):
            tokens += self.num_spec_tokens  # vLLM pads such a prompt, and waits for a step that holds the padding
        return tokens + sum(new for new, _ in decodes)

    def _keeps_images_whole(self, queue: list[Prefill]) -> bool:
        """Whether a chunk could end inside an image that must stay whole: vLLM sees to it for its own size only."""
        whole = self.scheduler_config.disable_chunked_mm_input
        return whole and any(self.requests[prompt.key].has_encoder_inputs for prompt in queue)

    def _add_waiting(self, queue: list[Prefill], now: float) -> int:
        """Append waiting prompts with their prefix hits; returns how many are behind those looked at."""
        room = max(min(_QUEUE, compat.most_active(self) - len(self.running)), 0)
        waiting, more = compat.prefill_requests(self, room)
        step = self.current_step
        alone = not queue  # nothing has begun, so vLLM will take the first that waits
        reached = sum(prompt.remaining for prompt in queue) < self.max_num_scheduled_tokens
        hits: dict[str, tuple[int, int]] = {}
        for request in waiting:
            at, history = self._hits.get(request.request_id, (-_HIT_STEPS, 0))
            # The next to be served is looked up anew: the prompt before it may just have filled the cache.
            following = reached and not hits
            if following or step - at >= _HIT_STEPS:
                at, history = step, compat.prefix_hit(self, request)
            hits[request.request_id] = (at, history)
            if following and alone and self.isochunk.controller.planning:
                told = self._external.history(request, history)
                if told is None:  # vLLM will load its KV first, and go on with the next
                    continue
                history = told
            remaining = request.num_tokens - history
            if remaining > 0:
                queue.append(Prefill(request.request_id, history, remaining, now - request.arrival_time))
        self._hits = hits
        return more

    def _entered(self, output: Any) -> None:
        scheduled = output.num_scheduled_tokens
        if not scheduled:
            return
        parts: list[Part] = []
        decodes: list[tuple[int, int]] = []
        for request_id, new in scheduled.items():
            request = self.requests[request_id]
            # vLLM has advanced the request past this step already.
            history = request.num_computed_tokens - new
            if history < request.num_prompt_tokens:
                parts.append(Part(request_id, new, history, request.num_prompt_tokens))
            else:
                decodes.append((new, history))
        self.isochunk.controller.entered(parts, decodes, time.monotonic(), output)


class Scheduler(NarrowedScheduler, VllmScheduler):  # type: ignore[misc]
    """vLLM's scheduler with isochunk's budgets: ``--scheduler-cls isochunk.vllm.Scheduler``."""


class AsyncScheduler(NarrowedScheduler, VllmAsyncScheduler):  # type: ignore[misc]
    """vLLM's asynchronous scheduler with isochunk's budgets."""


def _start(engine: Any) -> None:
    if isinstance(engine.scheduler, NarrowedScheduler):
        engine.scheduler.isochunk.start(engine)


def _status(engine: Any) -> dict[str, Any]:
    scheduler = engine.scheduler
    running, waiting = scheduler.get_request_counts()
    return {**scheduler.isochunk.as_dict(), "queue": {"running": running, "waiting": waiting}}


def _policy(engine: Any, policy: str, chunk: int | None) -> dict[str, Any]:
    return dict(engine.scheduler.isochunk.use_policy(policy, chunk))
