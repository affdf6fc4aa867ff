"""How many prefill tokens the next step takes: the law applied to a queue of prompts."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from isochunk.core.cost import CostModel
from isochunk.core.errors import PlanError
from isochunk.core.planner import POLICIES, Plan, Policy, align, law_target, plan

__all__ = ["Prefill", "StepPlanner"]

_REMEMBERED_CUTS = 64
_ROUNDING = 0.05  # a part of a step this small is spread over the others instead of costing its own step


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt that wants tokens: ``history`` of them are in the KV cache, ``remaining`` are not."""

    key: str
    history: int
    remaining: int


class StepPlanner:
    """Chooses the token budget of each step; the simulator and vLLM's scheduler drive this same object.

    Args:
        stages: pipeline stages P.
        max_chunk: most new tokens a step can hold.
        block: KV block size; chunks end on its multiples.
        min_chunk: least tokens of a chunk, where the prompt has them.
        smooth: 1 follows the plan, 0 is ``max_chunk``, between blends the two.
    """

    def __init__(self, *, stages: int, max_chunk: int, block: int = 1, min_chunk: int = 1, smooth: float = 1.0) -> None:
        if stages < 1 or max_chunk < 1 or block < 1 or not 0 <= smooth <= 1:
            raise PlanError(
                f"stages = {stages}, max_chunk = {max_chunk}, block = {block} must be at least 1 "
                f"and smooth = {smooth} between 0 and 1"
            )
        self.stages = stages
        self.max_chunk = max_chunk
        self.block = block
        self.min_chunk = min(min_chunk, max_chunk)
        self.smooth = smooth
        self.policy: Policy = "optimal"
        self.fixed_chunk = max_chunk
        self._cuts: OrderedDict[str, tuple[Plan, dict[int, int]]] = OrderedDict()

    def use(self, policy: Policy, chunk: int | None = None) -> None:
        """Switch the policy; ``chunk`` is the fixed size, and the first chunk of ``first_chunk``."""
        if policy not in POLICIES:
            raise PlanError(f"policy = {policy!r} must be one of {', '.join(POLICIES)}")
        if chunk is not None and not 1 <= chunk <= self.max_chunk:
            raise PlanError(f"chunk = {chunk} must be from 1 to max_num_batched_tokens = {self.max_chunk}")
        self.policy = policy
        self.fixed_chunk = self.max_chunk if chunk is None else chunk
        self.forget()

    def forget(self) -> None:
        """Drop the cuts made so far: the model or the policy changed."""
        self._cuts.clear()

    def planned(self, key: str) -> Plan | None:
        """The cut that a prompt alone in the queue is following, if there is one."""
        cut = self._cuts.get(key)
        return cut[0] if cut else None

    def tokens(
        self,
        model: CostModel,
        queue: Sequence[Prefill],
        *,
        more: int = 0,
        other_seconds: float = 0.0,
        in_flight_seconds: float = 0.0,
    ) -> int:
        """Prefill tokens of the next step.

        Args:
            model: cost of a step on one stage.
            queue: prompts in the order in which they are served; not empty.
            more: prompts behind those.
            other_seconds: what decodes in the same step add to it.
            in_flight_seconds: seconds of the longest step now in the pipeline, 0 when it is empty. A step
                that long has been paid for already, so a shorter one would only add overhead.
        """
        if self.policy == "fixed":
            return self.fixed_chunk
        if self.policy == "first_chunk":
            target = model.seconds(self.fixed_chunk)
        elif len(queue) == 1 and not more and not other_seconds:
            return self._blend(self._alone(model, queue[0], in_flight_seconds))
        else:
            target = self._shared_target(model, queue, more, other_seconds, in_flight_seconds)
        return self._blend(self._fill(model, queue, target - model.c0 - other_seconds))

    def _blend(self, tokens: int) -> int:
        blended = self.max_chunk + self.smooth * (tokens - self.max_chunk)
        return max(min(int(blended), self.max_chunk), 1)

    def _alone(self, model: CostModel, prompt: Prefill, in_flight_seconds: float) -> int:
        """Follow the prompt's own cut; make one when there is none or the prompt has left it."""
        known = self._cuts.get(prompt.key)
        if known is not None and prompt.history in known[1]:
            return known[1][prompt.history]
        end = prompt.history + prompt.remaining
        work = model.work(prompt.history, end)
        step_cost = model.step_cost(prompt.history, end)
        if in_flight_seconds > law_target(model, work, self.stages, step_cost):
            target = self._cover(model, [prompt], in_flight_seconds)
            return self._fill(model, [prompt], target - model.c0)
        cut = plan(model, end, self.stages, cached=prompt.history, max_chunk=self.max_chunk, block=self.block)
        chunks: dict[int, int] = {}
        at = prompt.history
        for size in cut.chunks:
            chunks[at] = max(size, min(self.min_chunk, end - at))
            at += size
        self._cuts[prompt.key] = (cut, chunks)
        if len(self._cuts) > _REMEMBERED_CUTS:
            self._cuts.popitem(last=False)
        return chunks[prompt.history]

    def _shared_target(
        self,
        model: CostModel,
        queue: Sequence[Prefill],
        more: int,
        other_seconds: float,
        in_flight_seconds: float,
    ) -> float:
        """The law's target for a queue, then shortened so that whole steps cover all the queued work."""
        queued = 0.0
        queued_sum = 0.0
        for prompt in queue:
            queued += model.work(prompt.history, prompt.history + prompt.remaining)
            queued_sum += queued
        typical = queued / len(queue)
        queued_sum += more * queued + typical * more * (more + 1) / 2
        step_cost = self._step_cost(model, queue) + other_seconds
        target = law_target(model, queued_sum / (len(queue) + more), self.stages, step_cost)
        target = max(target, in_flight_seconds)
        return target if more else self._cover(model, queue, target, other_seconds)

    def _cover(self, model: CostModel, queue: Sequence[Prefill], target: float, other_seconds: float = 0.0) -> float:
        """The longest target, not above ``target``, for which equal steps cover the queue with no small last one."""
        work = sum(model.work(p.history, p.history + p.remaining) for p in queue)
        step_cost = self._step_cost(model, queue) + other_seconds
        if target <= step_cost:
            return target
        steps = max(math.ceil(work / (target - step_cost) - _ROUNDING), 1)
        return step_cost + work / steps

    def _step_cost(self, model: CostModel, queue: Sequence[Prefill]) -> float:
        if model.c3 == 0:
            return model.c0
        work = weighted = 0.0
        for prompt in queue:
            end = prompt.history + prompt.remaining
            part = model.work(prompt.history, end)
            work += part
            weighted += part * model.step_cost(prompt.history, end)
        return weighted / work

    def _fill(self, model: CostModel, queue: Sequence[Prefill], seconds: float) -> int:
        """Tokens that take ``seconds`` when handed to the queue in order."""
        total = 0
        for prompt in queue:
            room = self.max_chunk - total
            size = model.marginal_chunk(seconds, prompt.history)
            if total == 0:
                size = max(size, float(self.min_chunk), 1.0)
            elif size < self.block or model.c3 * prompt.history > seconds / 2:
                break  # what is left would mostly pay for reading this prompt's history once more
            if size < prompt.remaining:
                size = align(prompt.history, size, room, self.block)
            tokens = min(int(size), prompt.remaining, room)
            total += tokens
            seconds -= model.marginal(tokens, prompt.history)
            if tokens < prompt.remaining or total >= self.max_chunk:
                break
        return max(total, 1)
