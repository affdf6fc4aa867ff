"""How many prefill tokens the next step takes: the law applied to a queue of prompts."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from isochunk.core.cost import CostModel
from isochunk.core.errors import PlanError
from isochunk.core.load import Load, Stream
from isochunk.core.planner import POLICIES, Plan, Policy, align, plan

__all__ = ["Prefill", "StepPlanner"]

_REMEMBERED_CUTS = 64
_PART = 0.25  # of prompts that are alike, a step with less than this share to spare does not start on the next
_ALIKE = 0.05  # prompts whose lengths' and works' standard deviation is below this share of their mean are alike
_UNEQUAL = 0.6  # by which share of a prompt or a step, whichever is shorter, steps of whole prompts differ; fitted


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt that wants tokens: ``history`` of them are in the KV cache, ``remaining`` are not.

    ``waited_s`` are the seconds since it came; only `isochunk.core.turns.Turns` asks for them.
    """

    key: str
    history: int
    remaining: int
    waited_s: float = 0.0

    def after(self, history: int) -> Prefill:
        """The same prompt with so many of its tokens in the KV cache."""
        return Prefill(self.key, history, self.history + self.remaining - history, self.waited_s)


class StepPlanner:
    """Chooses the token budget of each step; the simulator and vLLM's scheduler drive this same object.

    Args:
        stages: pipeline stages P.
        max_chunk: most new tokens a step can hold.
        block: tokens whose multiples chunks end on.
        min_chunk: least tokens of a chunk, where the prompt has them.
        smooth: 1 follows the plan, 0 is ``max_chunk``, between blends the two.
        stage_models: cost of a step on each stage when they differ; prompts alone are then cut for them.
    """

    def __init__(
        self,
        *,
        stages: int,
        max_chunk: int,
        block: int = 1,
        min_chunk: int = 1,
        smooth: float = 1.0,
        stage_models: Sequence[CostModel] = (),
    ) -> None:
        if stages < 1 or max_chunk < 1 or block < 1 or not 0 <= smooth <= 1:
            raise PlanError(
                f"stages = {stages}, max_chunk = {max_chunk}, block = {block} must be at least 1 "
                f"and smooth = {smooth} between 0 and 1"
            )
        if stage_models and len(stage_models) != stages:
            raise PlanError(f"{len(stage_models)} stage models do not fit stages = {stages}")
        self.stages = stages
        self._stage_models = tuple(stage_models)
        self.max_chunk = max_chunk
        self.block = block
        self.min_chunk = min(min_chunk, max_chunk)
        self.smooth = smooth
        self.policy: Policy = "optimal"
        self.fixed_chunk = max_chunk
        self._cuts: OrderedDict[str, tuple[Plan, dict[int, int]]] = OrderedDict()
        self._stream = Stream()

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
        in_flight: Sequence[float] = (),
        between: bool = False,
        max_seconds: float = math.inf,
    ) -> int:
        """Prefill tokens of the next step.

        Args:
            model: cost of a step on one stage.
            queue: prompts in the order in which they are served; not empty.
            more: prompts behind those.
            other_seconds: what decodes in the same step add to it.
            in_flight: seconds of each step with prefill tokens now in the pipeline.
            between: the step goes between those of a longer prompt that sits it out (`Turns`).
            max_seconds: most that the step may take on a stage, all in, for streams that decode meanwhile; the
                first prompt goes on by its least chunk whatever it says.
        """
        total = self._planned(model, queue, more, other_seconds, in_flight, between)
        if max_seconds < math.inf:
            total = min(total, self.within(model, queue, max_seconds - other_seconds))
        if self.policy == "optimal" and self.stages > 1:
            self._take(model, queue, total, between and bool(in_flight))
        return total

    def within(self, model: CostModel, queue: Sequence[Prefill], seconds: float) -> int:
        """Prefill tokens of a step of at most so many seconds; at least the least chunk of the first prompt."""
        return self._fill(model, queue, seconds - model.c0)

    def _planned(
        self,
        model: CostModel,
        queue: Sequence[Prefill],
        more: int,
        other_seconds: float,
        in_flight: Sequence[float],
        between: bool,
    ) -> int:
        if self.policy == "fixed" or (self.policy == "optimal" and self.stages == 1):
            return self.fixed_chunk
        if self.policy == "first_chunk":
            target = model.seconds(self.fixed_chunk)
            return self._blend(self._fill(model, queue, target - model.c0 - other_seconds))
        between = between and bool(in_flight)
        if between:
            # Up to the length of its neighbours a step is no later out of the pipeline.
            total = self._fill(model, queue, max(in_flight) - model.c0 - other_seconds)
        else:
            self._stream.ask(queue[0].key, queue[0].history, len(queue) + more, len(in_flight))
            if not in_flight:
                self._stream.restart()
            total = 0
            if len(queue) == 1 and not more and not other_seconds:
                total = self._alone(model, queue[0], bool(in_flight))
            total = total or self._shared(model, queue, more, other_seconds, in_flight)
        return self._blend(total)

    def _take(self, model: CostModel, queue: Sequence[Prefill], tokens: int, between: bool) -> None:
        """Have the stream remember the step. The first prompt's work counts in whole in the step that ends it."""
        work = ended = 0.0
        ends = 0
        for prompt in queue:
            size = min(tokens, prompt.remaining)
            its_work = model.work(prompt.history, prompt.history + size)
            work += its_work
            if size < prompt.remaining:
                break
            tokens -= size
            ended += its_work if ends or between else self._whole(model, prompt)
            ends += 1
        self._stream.take(work, ended, ends, asked=not between)

    def _blend(self, tokens: int) -> int:
        blended = self.max_chunk + self.smooth * (tokens - self.max_chunk)
        return max(min(int(blended), self.max_chunk), 1)

    def _alone(self, model: CostModel, prompt: Prefill, behind_others: bool) -> int:
        """Follow the prompt's own cut; 0 when it has none and others are in the pipeline before it."""
        known = self._cuts.get(prompt.key)
        if known is None or prompt.history not in known[1]:
            if behind_others:
                return 0
            known = self._cut(model, prompt)
        return known[1][prompt.history]

    def _cut(self, model: CostModel, prompt: Prefill) -> tuple[Plan, dict[int, int]]:
        end = prompt.history + prompt.remaining
        cut = plan(
            self._stage_models or model,
            end,
            self.stages,
            cached=prompt.history,
            max_chunk=self.max_chunk,
            block=self.block,
        )
        chunks: dict[int, int] = {}
        at = prompt.history
        for size in cut.chunks:
            chunks[at] = max(size, min(self.min_chunk, end - at))
            at += size
        self._cuts[prompt.key] = (cut, chunks)
        if len(self._cuts) > _REMEMBERED_CUTS:
            self._cuts.popitem(last=False)
        return cut, chunks

    def _shared(
        self, model: CostModel, queue: Sequence[Prefill], more: int, other_seconds: float, in_flight: Sequence[float]
    ) -> int:
        """Tokens of the step that costs the queue least."""
        works = [model.work(prompt.history, prompt.history + prompt.remaining) for prompt in queue]
        whole = self._whole(model, queue[0])
        load = self._load(works, more, whole, in_flight)
        lengths = [prompt.history + prompt.remaining for prompt in queue]
        differ = max(_spread(lengths), _spread(works[1:])) > _ALIKE  # of the first, some may be done
        total = self._level(model, queue, works, load, other_seconds) if differ else 0
        return total or self._even(model, queue, works, load, other_seconds)

    def _level(
        self, model: CostModel, queue: Sequence[Prefill], works: Sequence[float], load: Load, other_seconds: float
    ) -> int:
        """As much of the queue as takes the law's time, for prompts that differ; 0 where that does not pay.

        Steps of whole prompts would take unequal times, and each stage then waits for the longest of P steps. Nearly
        every step ends within a prompt, so the next reads that one's history once more.
        """
        head = queue[0]
        start = self._stream.start_of(head.key, head.history)
        history = (start + sum(prompt.history for prompt in queue[1:])) / len(queue)
        end = sum(prompt.history + prompt.remaining for prompt in queue) / len(queue)
        reread = max(model.c3 * history, model.step_cost(start, head.history + head.remaining) - model.c0)
        overhead = model.c0 + other_seconds + reread
        # Each history is read at least once whatever the cut: that counts as work.
        once = 1 + model.c3 * history * len(queue) / (sum(works) + model.work(start, head.history))
        ideal = load.times(once).work(overhead) / once
        work = self._within_limit(model, load, history, end, overhead, ideal, self.stages - 1) * once
        # Full steps spare the stages the wait for unequal ones, and keep one prompt of each for one step more.
        spared = _UNEQUAL * min(load.own, work) * (load.system + (self.stages - 1) * work)
        if spared < (work + overhead) * load.own or model.c3 * queue[1].history > work / 2:
            return 0
        return self._fill(model, queue, max(work + reread, work / 2 + model.c3 * head.history))

    def _even(
        self, model: CostModel, queue: Sequence[Prefill], works: Sequence[float], load: Load, other_seconds: float
    ) -> int:
        """Whole prompts, or an even part of the first, for prompts that are alike."""
        head = queue[0]
        total = self._first_part(model, head, load, other_seconds)
        if total < head.remaining:
            return total
        # Each prompt's history is read at least once whatever the cut, so for whole prompts it counts as work.
        parts = load
        load = load.times(1 + model.c3 * sum(prompt.history for prompt in queue) / sum(works))
        seconds = model.marginal(head.remaining, head.history)
        overhead = model.c0 + other_seconds
        for prompt, its_work in zip(queue[1:], works[1:], strict=True):
            joint = load.cost(seconds + its_work + model.c3 * prompt.history, overhead)
            alone = load.cost(seconds, overhead)
            if joint > alone or joint > self._apart(model, load, parts, prompt, its_work, overhead):
                return total + self._part(model, load, seconds, overhead, prompt, self.max_chunk - total)
            if total + prompt.remaining > self.max_chunk:
                break
            total += prompt.remaining
            seconds += its_work + model.c3 * prompt.history
        return total

    def _apart(self, model: CostModel, load: Load, parts: Load, prompt: Prefill, work: float, overhead: float) -> float:
        """The cost of steps for the next prompt alone, in parts if that is better."""
        reread = model.step_cost(prompt.history, prompt.history + prompt.remaining) - model.c0
        return load.cost(work / parts.pieces(work, overhead + reread) + reread, overhead)

    def _part(self, model: CostModel, load: Load, seconds: float, overhead: float, prompt: Prefill, room: int) -> int:
        """Tokens of the next prompt that make the step as long as it should be; 0 when that does not pay."""
        full = load.work(overhead)
        spare = full - seconds
        reread = model.c3 * prompt.history
        if spare < _PART * full or load.cost(full, overhead + reread, split=True) > load.cost(seconds, overhead):
            return 0
        size = align(prompt.history, model.marginal_chunk(spare, prompt.history), room, self.block)
        return size if size < prompt.remaining else 0

    def _whole(self, model: CostModel, prompt: Prefill) -> float:
        """Work of the first prompt of the queue, from its first step on."""
        start = self._stream.start_of(prompt.key, prompt.history)
        return model.work(start, prompt.history + prompt.remaining)

    def _load(self, works: Sequence[float], more: int, whole: float, in_flight: Sequence[float]) -> Load:
        queued = queued_sum = 0.0
        for work in works:
            queued += work
            queued_sum += queued
        typical = queued / len(works)
        queued_sum += more * queued + typical * more * (more + 1) / 2
        queued += more * typical
        # The first prompt counts in whole, so that its steps are alike however far it has come.
        done = whole - works[0]
        queued += done
        return Load(
            stages=self.stages,
            abar=queued_sum / (len(works) + more) + done,
            own=typical + done / len(works),
            system=queued + self._stream.in_flight(len(in_flight)) + self._stream.missing * typical,
            rounds=self._stream.rounds(queued - done),
            before=max(in_flight, default=0.0),
        )

    def _first_part(self, model: CostModel, prompt: Prefill, load: Load, other_seconds: float) -> int:
        """The whole prompt or the first of equally long parts of it."""
        at, end = prompt.history, prompt.history + prompt.remaining
        step_cost = model.step_cost(at, end)
        work = model.work(at, end)
        start = self._stream.start_of(prompt.key, at)
        whole, overhead = model.work(start, end), step_cost + other_seconds
        part = self._within_limit(model, load, start, end, overhead, whole / load.pieces(whole, overhead))
        pieces = max(round(work / part), math.ceil(prompt.remaining / self.max_chunk), 1)
        if pieces == 1:
            return prompt.remaining
        size = model.marginal_chunk(work / pieces + step_cost - model.c0, at)
        size = align(at, max(size, float(self.min_chunk)), self.max_chunk, self.block)
        return min(size, prompt.remaining)

    def _within_limit(
        self,
        model: CostModel,
        load: Load,
        start: float,
        end: float,
        overhead: float,
        ideal: float,
        gaps: float = math.inf,
    ) -> float:
        """Seconds of work in a step where ``ideal`` may be more than the token limit allows.

        The first parts of a prompt hold no more than the limit; where the law asks for longer steps than that,
        ``gaps`` of the steps before the others' length is reached are taken to leave a gap behind them.
        """
        whole = model.work(start, end)
        part = model.work(start, start + self.max_chunk)
        best = (math.inf, ideal)
        while part < ideal:
            slope = part / self.max_chunk - model.c1
            reach = min(max(slope / model.c2 - self.max_chunk / 2, start), end) if model.c2 else start
            early = (reach - start) / self.max_chunk
            lost = max(early * part - model.work(start, reach), 0.0) * min(gaps / max(early, 1.0), 1.0)
            best = min(best, (load.cost(part, overhead) * (1 + lost / whole), part))
            part *= 1.5
        return best[1]

    def _fill(self, model: CostModel, queue: Sequence[Prefill], seconds: float) -> int:
        """Tokens that take ``seconds`` when handed to the queue in order."""
        total = 0
        for prompt in queue:
            room = self.max_chunk - total
            size = model.marginal_chunk(seconds, prompt.history)
            if total == 0:
                size = max(size, float(self.min_chunk), 1.0)
            elif (
                size < min(max(self.block, self.min_chunk), prompt.remaining) or model.c3 * prompt.history > seconds / 2
            ):
                break  # what is left would mostly pay for reading this prompt's history once more
            if size < prompt.remaining:
                size = align(prompt.history, size, room, self.block)
            tokens = min(int(size), prompt.remaining, room)
            total += tokens
            seconds -= model.marginal(tokens, prompt.history)
            if tokens < prompt.remaining or total >= self.max_chunk:
                break
        return max(total, 1)


def _spread(values: Sequence[float]) -> float:
    """Standard deviation over mean; 0 of none."""
    if not values:
        return 0.0
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / len(values)) / mean
