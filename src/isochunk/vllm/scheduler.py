"""vLLM's schedulers, narrowed: each prompt's chunk comes from isochunk, everything else from vLLM."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler as VllmAsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler

from isochunk.core.steps import Prefill, StepPlanner
from isochunk.core.turns import Turns, rank
from isochunk.vllm import compat
from isochunk.vllm.batch import Batch, Prompt, Walker, shares
from isochunk.vllm.config import ChunkConfig
from isochunk.vllm.controller import Controller
from isochunk.vllm.prompts import Part
from isochunk.vllm.session import Session
from isochunk.vllm.settings import check_engine, chunk_config
from isochunk.vllm.span import span_attributes

__all__ = ["AsyncScheduler", "Scheduler"]

_ASKED = 8  # times that a step is planned anew because a KV connector has something to load


class NarrowedScheduler:
    """Mixin over vLLM's scheduler classes; an error in it leaves the step to vLLM and is counted."""

    vllm_config: Any
    block_size: int
    connector: Any
    current_step: int
    finished_req_ids: set[str]
    max_num_scheduled_tokens: int
    num_spec_tokens: int
    requests: dict[str, Any]
    running: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_engine(self.vllm_config)
        compat.check_scheduler(self)
        compat.mend_own_schedule(self)
        config = chunk_config(self.vllm_config)
        stages = self.vllm_config.parallel_config.pipeline_parallel_size
        self.isochunk = Session(self, config, self._controller(config, stages))
        self._hits = compat.PrefixHits(self)
        self._block = compat.alignment(self)
        self._errors: list[Exception] = []  # of ours, while vLLM was in the middle of its step
        self._external = compat.ExternalHits(self.connector, self.block_size, self._errors)
        self._turns = Turns(None if compat.own_schedule(self) else config.max_queue_delay)
        self._walker = Walker(self, self._hits, self._external, timed=self._turns.bounded)
        self._longest_wait = None if compat.own_schedule(self) else config.least_work_first
        self._latency = config.max_inter_token_latency
        self._traced = compat.is_traced(self.vllm_config)
        compat.before_busy_loop(_start)
        compat.add_engine_methods({"isochunk_status": _status, "isochunk_totals": _totals, "isochunk_policy": _policy})

    def _controller(self, config: ChunkConfig, stages: int) -> Controller:
        planner = StepPlanner(
            stages=stages,
            max_chunk=self.max_num_scheduled_tokens,
            block=compat.alignment(self),
            min_chunk=config.min_chunk or self.block_size,
            smooth=config.smooth_factor,
        )
        return Controller(config, planner, stages)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's own `schedule`, each prompt's chunk and the step within isochunk's bounds."""
        bounds, within = None, None
        with self.isochunk.attempt("the planner") as attempt:
            self._hits.forget(self.finished_req_ids)
            self._gone(self.finished_req_ids)
            bounds = self._bounds()
            attempt.idle = bounds is None
            if bounds is not None:
                within = compat.Bounded(self, bounds, self._external.passing, self._errors)
        if within is None:
            self._external.free()
        with within or nullcontext():
            output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        with self.isochunk.attempt("holding a step to its bounds") as attempt:
            attempt.idle = within is None
            if self._errors:
                first, self._errors[:] = self._errors[0], []
                raise first
        with self.isochunk.attempt("recording a step") as attempt:
            attempt.idle = not output.total_num_scheduled_tokens
            if bounds is not None and bounds.aside and attempt.idle:
                self._turns.refused()
            self._entered(output)
        return output

    def add_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        """vLLM's own `add_request`; what a prompt has in the prefix cache is looked up as it comes, not in a step."""
        super().add_request(request, *args, **kwargs)  # type: ignore[misc]
        with self.isochunk.attempt("looking up a prefix") as attempt:
            attempt.idle = not self._hits.of(request, self.current_step)

    def get_grammar_bitmask(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's own `get_grammar_bitmask`: its engine asks for it when a step has been sent off to the workers."""
        mask = super().get_grammar_bitmask(*args, **kwargs)  # type: ignore[misc]
        with self.isochunk.attempt("a refit") as attempt:
            attempt.idle = not self.isochunk.idle(time.monotonic())
        return mask

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's own `update_from_output`, and the time at which the step came out."""
        if scheduler_output.total_num_scheduled_tokens:
            with self.isochunk.attempt("timing a step"):
                self.isochunk.exited(time.monotonic(), scheduler_output)
            if self._traced:
                with self.isochunk.attempt("telling the span of a request") as attempt:
                    attempt.idle = not self._tell_spans()
        return super().update_from_output(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def set_pause_state(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's own `set_pause_state`: what prompts take while the engine pauses is no plan's doing."""
        with self.isochunk.attempt("noting a pause"):
            self.isochunk.controller.paused()
        super().set_pause_state(*args, **kwargs)  # type: ignore[misc]

    def _tell_spans(self) -> int:
        """Give the requests whose prompts ended in this step what their spans say; how many there were."""
        controller = self.isochunk.controller
        for record in controller.ended:
            if (request := self.requests.get(record.request_id)) is not None:
                compat.tell_span(request, span_attributes(record, controller.planner.stages))
        return len(controller.ended)

    def _bounds(self) -> compat.Bounds | None:
        """What the next step is held to; None leaves it to vLLM."""
        if compat.is_paused(self) == "all":
            return None
        if self._longest_wait is not None:
            self._reorder(self._longest_wait)
        batch = self._walker.batch()
        yielding: frozenset[str] = frozenset()
        if self._turns.bounded:
            yielding = self._turns.aside([prompt.prefill for prompt in batch.prompts], batch.begun)
        prompts = list(batch.prompts)
        if yielding:
            prompts = [prompt for prompt in prompts if prompt.key not in yielding]
        given, loads = self._shares(prompts, batch, between=bool(yielding))
        if yielding and loads and not prompts:  # who would take the step loads its KV meanwhile
            yielding, prompts = frozenset(), list(batch.prompts)
            given, more = self._shares(prompts, batch, between=False)
            loads += more
        if yielding:
            self.isochunk.controller.yielded(yielding)
        aside = [*batch.aside, *(self.requests[key] for key in yielding)]
        if not given:
            return compat.Bounds(batch.limit, None, aside) if aside else None
        bounds = self._held_to(prompts, batch, given, loads, aside)
        if yielding:  # vLLM does not count the adapters of those set aside
            bounds.held = {**bounds.held, **dict.fromkeys(batch.unfit, 0)}
        return bounds

    def _reorder(self, longest_wait: float) -> None:
        """Least predicted work first among those that wait."""
        model = self.isochunk.controller.model
        if model is None:
            return
        now, step = time.time(), self.current_step

        def its_rank(request: Any) -> tuple[float, float]:
            history = self._hits.of(request, step)
            waited = now - request.arrival_time
            return rank(model, Prefill(request.request_id, history, request.num_tokens - history, waited), longest_wait)

        compat.reorder_waiting(self, its_rank)

    def _shares(self, prompts: list[Prompt], batch: Batch, *, between: bool) -> tuple[dict[str, int], list[Prompt]]:
        """What each prompt gets, and those that turn out to load their KV between steps: they are removed.

        Who comes new into the pipeline is asked about at the KV connector first: vLLM asks it in this very step.
        """
        most = math.inf
        if batch.streams and self._latency is not None:
            most = self.isochunk.controller.within(self._latency)
        law = _Law(self.isochunk, batch, most, between=between)
        loads: list[Prompt] = []
        asked: set[str] = set()
        for _ in range(_ASKED):
            given = shares(prompts, batch, law, self._least, self._block) if prompts else {}
            changed = False
            if not self._external.used:
                break
            for prompt in [each for each in prompts if each.waits and each.key in given and each.key not in asked]:
                asked.add(prompt.key)
                told = self._external.history(prompt.request, prompt.cached)
                changed |= told != prompt.prefill.history
                if told is None:
                    prompts.remove(prompt)
                    batch.prompts.remove(prompt)
                    loads.append(prompt)
                else:
                    prompt.prefill = prompt.prefill.after(told)
            if not changed:
                break
            batch.walk()
        return given, loads

    def _held_to(
        self, prompts: list[Prompt], batch: Batch, given: dict[str, int], loads: list[Prompt], aside: list[Any]
    ) -> compat.Bounds:
        budget = sum(new for new, _ in batch.decodes) + sum(given.values())
        caps = dict(given)
        if self.num_spec_tokens:
            for prompt in prompts:
                if prompt.lacks == 1 and prompt.key in given:  # vLLM pads such a prompt, or lets it wait
                    caps[prompt.key] += self.num_spec_tokens
                    budget += self.num_spec_tokens
        if not self._external.used:
            return compat.Bounds(min(budget, batch.limit), caps, aside)
        behind = [prompt for prompt in prompts if prompt.waits and prompt.alone and prompt.key not in given]
        held: dict[str, int] = {}
        if loads or any(self._external.may_load(prompt.request) for prompt in behind):
            budget += 1  # vLLM's scan ends when the last token is given away
            held = {prompt.key: prompt.alone for prompt in behind if not self._external.may_load(prompt.request)}
            self._external.reach(given.keys(), batch.left, batch.room, batch.threshold)
        return compat.Bounds(min(budget, batch.limit), caps, aside, held)

    def _least(self, prompt: Prompt) -> int:
        return compat.least_chunk(self, prompt.request, prompt.prefill.history)

    def _gone(self, request_ids: Collection[str]) -> None:
        """These requests ended, or were preempted; others may have come under their ids."""
        if request_ids:
            self._external.gone(request_ids)
            self.isochunk.controller.gone(request_ids)

    def _entered(self, output: Any) -> None:
        self._external.forget(self)
        if output.preempted_req_ids:
            self._gone(output.preempted_req_ids)
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


class _Law:
    """What isochunk gives this step."""

    def __init__(self, session: Session, batch: Batch, max_seconds: float, *, between: bool) -> None:
        self._session, self._more = session, batch.more
        self._max_seconds, self._between = max_seconds, between

    def tokens(self, queue: Sequence[Prefill], beside: Sequence[tuple[int, int]]) -> int | None:
        return self._session.tokens(queue, self._more, beside, between=self._between, max_seconds=self._max_seconds)

    def fits(self, beside: Sequence[tuple[int, int]]) -> bool:
        return self._session.controller.fits(beside, self._max_seconds)


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


def _totals(engine: Any) -> dict[str, Any]:
    return dict(engine.scheduler.isochunk.as_dict(prompts=False))


def _policy(engine: Any, policy: str, chunk: int | None) -> dict[str, Any]:
    return dict(engine.scheduler.isochunk.use_policy(policy, chunk))
