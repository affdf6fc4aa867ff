"""How many prefill tokens the next step takes: the law applied to a queue of prompts."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from isochunk.core.cost import CostModel
from isochunk.core.errors import PlanError
from isochunk.core.planner import POLICIES, Plan, Policy, align, plan

__all__ = ["Load", "Prefill", "StepPlanner"]

Floats = npt.NDArray[np.float64]

_REMEMBERED_CUTS = 64
_LIMITED = 16  # sizes tried where the token limit counts
# The law's three constants, chosen on the train seeds of benchmarks/load_study.py; from half to twice each, the mean
# of their cases changes by less than 1%.
_LATER = 0.5  # rounds of prompts to come that count beside those that are here
_LASTING = 1.5  # the same, at most, where prompts alike come one for one
_WHOLE = 0.1  # of a prompt or a step: less than that is neither left of a prompt nor begun of the next


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


@dataclass(slots=True, kw_only=True)
class Load:
    """The law: how much work a step should hold when prompts share the pipeline.

    A step of ``x`` seconds of work and ``overhead`` o takes ``T = x + o`` on each stage, and all work takes ``v = 1 +
    o/x`` times as long. A prompt in the queue waits for the work up to and including its own, for the others in its
    last step, and for its way through the stages, which no step ends before a longer one ahead of it:

        now  = ahead*v + max(x - own, 0)/2*v + (P-1)*max(T, before)

    A prompt that comes next finds all that is here on one stage, or has its own way through all of them:

        next = max(system*v, max(own, x)*v + (P-1)*T)

    The law's step is the one for which ``now + later*next`` is least. For one prompt that nobody follows that is
    `law_target`, and for a stream without end of prompts as long as a step or shorter one that keeps every stage
    busy, ``x = system/P``.

    The token limit may cut the first steps of a long prompt short; then up to P-1 stages stand idle at each of them,
    which stretches all work too.

    Attributes:
        stages: pipeline stages P, at least 2.
        ahead: mean over the queued prompts of the work queued up to and including each.
        own: mean work of one prompt.
        system: work that is queued or in the pipeline.
        before: seconds of the longest step in the pipeline; 0 when it is empty.
        full: of each prompt longer than the token limit, the work of a full step at its start, and at its end.
        growth: work by which each full step of a prompt exceeds the one before.
        count: prompts of which ``full`` are the long ones.
        later: rounds of prompts to come that count.
    """

    stages: int
    ahead: float
    own: float
    system: float
    before: float = 0.0
    full: Sequence[tuple[float, float]] | Floats = ()
    growth: float = 0.0
    count: int = 1
    later: float = _LATER

    def cost(self, work: float, overhead: float) -> float:
        """``now + later*next`` for steps of ``work`` seconds."""
        return float(self._costs(np.array([work]), overhead)[0])

    def _costs(self, works: Floats, overhead: float) -> Floats:
        stretch, seconds = overhead / works, works + overhead
        stretch += 1 + self._idle(works) if len(self.full) else 1.0
        together = np.maximum(works, self.own)
        now = together - self.own
        now *= 0.5
        now += self.ahead
        now *= stretch
        now += (self.stages - 1) * np.maximum(seconds, self.before)
        together *= stretch
        together += (self.stages - 1) * seconds
        now += self.later * np.maximum(self.system * stretch, together)
        return now

    def _idle(self, works: Floats) -> Floats:
        """Idle seconds of a stage behind steps that the token limit cut short, for each second of work."""
        full = np.asarray(self.full)
        short = np.minimum(works[:, None], full[:, 1])
        short -= full[:, 0]
        np.maximum(short, 0.0, out=short)
        gaps = short / self.growth if self.growth else np.full(short.shape, math.inf)
        np.minimum(gaps, self.stages - 1, out=gaps)
        short *= gaps
        return np.asarray(np.add.reduce(short, axis=1) / (2 * self.own * self.count))

    def work(self, overhead: float) -> float:
        """The work that costs least.

        Without a limit each side of a kink is convex, so it is a kink or the least of some side.
        """
        gaps, later = self.stages - 1, self.later
        points = [self.system / self.stages, (self.system - self.own) / gaps, self.own, self.before - overhead]
        nexts = ((later * self.system, 0.0), (later * self.own, later * gaps), (0.0, later * self.stages))
        for ahead, wait in ((self.ahead, 0.0), (self.ahead - self.own / 2, 0.5)):
            for behind, way in nexts:
                moved, slope = overhead * (ahead + behind), wait + way
                if slope:
                    points.append(math.sqrt(moved / slope))
                points.append(math.sqrt(moved / (slope + gaps)))
        if len(self.full):
            least, most = min(np.asarray(self.full)[:, 0].tolist()), max(points)
            factor = (most / least) ** (1 / (_LIMITED - 1))
            points += [least * factor**step for step in range(_LIMITED)]
        points = [work for work in points if work > 0]
        return points[int(self._costs(np.array(points), overhead).argmin())]

    def aligned(self, work: float, overhead: float, prompt: float) -> float:
        """``work`` as whole prompts of ``prompt`` seconds each, or as an equal part of one, whichever costs less."""
        if work >= prompt:
            near = [prompt * math.floor(work / prompt), prompt * math.ceil(work / prompt)]
        else:
            near = [prompt / math.floor(prompt / work), prompt / math.ceil(prompt / work)]
        return near[int(self._costs(np.array(near), overhead).argmin())]


class Works:
    """The work of the prompts of a queue, kept from step to step for those behind the first.

    Args:
        limit: most tokens of a step.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._model: CostModel | None = None
        self._behind: list[Prefill] = []
        self._seconds: list[float] = []
        self._full = np.zeros((1, 2))  # the first row is the first prompt's

    def of(self, model: CostModel, queue: Sequence[Prefill]) -> tuple[list[float], Floats]:
        """Seconds of each prompt; and of each that is longer than the limit, those of a full step at its start and at
        its end, shape (prompts, 2)."""
        head, behind = queue[0], list(queue[1:])
        if model is not self._model or behind != self._behind:
            full = [full for prompt in behind if (full := self._ends(model, prompt))]
            self._full = np.array([(0.0, 0.0), *full])
            self._seconds = [model.work(prompt.history, prompt.history + prompt.remaining) for prompt in behind]
            self._model, self._behind = model, behind
        seconds = [model.work(head.history, head.history + head.remaining), *self._seconds]
        if (ends := self._ends(model, head)) is None:
            return seconds, self._full[1:]
        self._full[0] = ends
        return seconds, self._full

    def _ends(self, model: CostModel, prompt: Prefill) -> tuple[float, float] | None:
        if not model.c2 or prompt.remaining <= self._limit:
            return None
        start, end = prompt.history, prompt.history + prompt.remaining
        return model.work(start, start + self._limit), model.work(end - self._limit, end)


class Arrivals:
    """For how many rounds prompts have come one for one, so that each found as many waiting as the one before.

    Such a loop has no end in sight. To look twice at the same queue changes nothing.
    """

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._waiting = 0
        self._alike = 0

    def rounds(self, queue: Sequence[Prefill], waiting: int) -> float:
        """Rounds of the ``waiting`` prompts, of which ``queue`` shows the first."""
        keys = {prompt.key for prompt in queue}
        if new := len(keys - self._known):
            self._alike = self._alike + new if waiting == self._waiting else 0
            self._waiting = waiting
        self._known = keys
        return self._alike / waiting


@dataclass(frozen=True, slots=True)
class _Cut:
    """What a prompt alone follows: its plan, the chunk at each history, and where it ends."""

    plan: Plan
    chunks: dict[int, int]
    end: int

    def holds(self, prompt: Prefill) -> bool:
        """Whether it is of this prompt, where that is now."""
        return prompt.history + prompt.remaining == self.end and prompt.history in self.chunks


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
        self._cuts: OrderedDict[str, _Cut] = OrderedDict()
        self._works = Works(max_chunk)
        self._varied = 0
        self._varied_key = ""
        self._arrivals = Arrivals()

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

    def gone(self, key: str) -> None:
        """The prompt is no more; another one may come under its key."""
        self._cuts.pop(key, None)

    def planned(self, key: str) -> Plan | None:
        """The cut that a prompt alone in the queue is following, if there is one."""
        cut = self._cuts.get(key)
        return cut.plan if cut else None

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
        if self.policy == "fixed" or (self.policy == "optimal" and self.stages == 1):
            total = self.fixed_chunk
        else:
            total = self._blend(self._planned(model, queue, more, other_seconds, in_flight, between))
        if max_seconds < math.inf:
            total = min(total, self.within(model, queue, max_seconds - other_seconds))
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
        if self.policy == "first_chunk":
            return self._fill(model, queue, model.seconds(self.fixed_chunk) - model.c0 - other_seconds)
        if between and in_flight:
            # Up to the length of its neighbours a step is no later out of the pipeline.
            return self._fill(model, queue, max(in_flight) - model.c0 - other_seconds)
        total = 0
        if len(queue) == 1 and not more and not other_seconds:
            total = self._alone(model, queue[0], bool(in_flight))
        if total:
            return total
        total = self._shared(model, queue, more, other_seconds, in_flight)
        return self._part(queue[0], total) if self._varied and len(queue) == 1 and not more else total

    def _blend(self, tokens: int) -> int:
        blended = self.max_chunk + self.smooth * (tokens - self.max_chunk)
        return max(min(int(blended), self.max_chunk), 1)

    def _alone(self, model: CostModel, prompt: Prefill, behind_others: bool) -> int:
        """Follow the prompt's own cut; 0 when it has none and others are in the pipeline before it."""
        known = self._cuts.get(prompt.key)
        if known is None or not known.holds(prompt):
            if behind_others:
                return 0
            known = self._cut(model, prompt)
        return known.chunks[prompt.history]

    def vary(self, prompts: int) -> None:
        """Cut one step of each of this many prompts in two, so that they tell more than steps that are all alike."""
        self._varied = prompts

    def _part(self, prompt: Prefill, tokens: int) -> int:
        """Half of a step, once a prompt, which varies prompts that follow no cut of their own since others decode."""
        part = align(prompt.history, tokens / 2, tokens, self.block)
        if prompt.key == self._varied_key or not self.min_chunk <= part < tokens:
            return tokens
        self._varied -= 1
        self._varied_key = prompt.key
        return part

    def _cut(self, model: CostModel, prompt: Prefill) -> _Cut:
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
        sizes = list(cut.chunks)
        if self._varied:
            place = len(sizes) // 2
            part = sizes[place] // (2 if len(sizes) > 1 else 4) // self.block * self.block
            if 0 < part < sizes[place]:
                self._varied -= 1
                self._varied_key = prompt.key
                sizes[place : place + 1] = [part, sizes[place] - part]
        for size in sizes:
            chunks[at] = max(size, min(self.min_chunk, end - at))
            at += size
        known = self._cuts[prompt.key] = _Cut(cut, chunks, end)
        if len(self._cuts) > _REMEMBERED_CUTS:
            self._cuts.popitem(last=False)
        return known

    def _shared(
        self, model: CostModel, queue: Sequence[Prefill], more: int, other_seconds: float, in_flight: Sequence[float]
    ) -> int:
        """Tokens of the law's step: the queue in order, up to the law's time."""
        head = queue[0]
        reading = model.step_cost(head.history, head.history + head.remaining) - model.c0
        rounds, alike = self._arrivals.rounds(queue, len(queue) + more), _alike(queue)
        later = min(max(_LATER, rounds), _LASTING) if alike else _LATER
        load = self._load(model, queue, more, in_flight, later)
        overhead = model.c0 + other_seconds + reading
        work = load.work(overhead)
        if alike:
            last = queue[-1]  # not begun, where others wait before it
            work = load.aligned(work, overhead, model.work(last.history, last.history + last.remaining))
        return self._fill(model, queue, work + model.c3 * head.history, work)

    def _load(
        self, model: CostModel, queue: Sequence[Prefill], more: int, in_flight: Sequence[float], later: float
    ) -> Load:
        works, full = self._works.of(model, queue)
        shown = sum(works)
        own = shown / len(works)
        ahead = sum(accumulate(works)) + more * shown + own * more * (more + 1) / 2
        return Load(
            stages=self.stages,
            ahead=ahead / (len(works) + more),
            own=own,
            system=shown + more * own + sum(max(seconds - model.c0, 0.0) for seconds in in_flight),
            before=max(in_flight, default=0.0),
            full=full,
            growth=model.c2 * self.max_chunk**2,
            count=len(queue),
            later=later,
        )

    def _fill(self, model: CostModel, queue: Sequence[Prefill], seconds: float, step: float = 0.0) -> int:
        """Tokens that take ``seconds`` beside the fixed cost, when handed to the queue in order.

        In the law's step, of ``step`` seconds of work, no prompt is cut for the sake of less than `_WHOLE` of itself or
        of the step, whichever is shorter, nor for less than it takes to read its history once more.
        """
        total = 0
        for prompt in queue:
            room = self.max_chunk - total
            rest = model.marginal(prompt.remaining, prompt.history)
            spare = max(_WHOLE * min(step, rest), model.c3 * prompt.history if step else 0.0)
            if rest <= seconds + spare and prompt.remaining <= room:
                total += prompt.remaining
                seconds -= rest
                continue
            size = model.marginal_chunk(seconds, prompt.history)
            if total == 0:
                size = max(size, float(self.min_chunk), 1.0)
            elif (
                seconds <= spare
                or size < max(self.block, self.min_chunk)
                or 2 * model.c3 * prompt.history > seconds  # mostly reading its history once more
            ):
                break
            return total + min(align(prompt.history, size, room, self.block), prompt.remaining)
        return max(total, 1)


def _alike(queue: Sequence[Prefill]) -> bool:
    """Whether prompts have as many tokens left as each other, but for the first, which may have been begun."""
    some = queue[-1].remaining, queue[len(queue) > 1].remaining
    if max(some) > (1 + _WHOLE) * min(some):
        return False
    left = [prompt.remaining for prompt in queue[1:]] or [queue[0].remaining]
    return max(left) <= (1 + _WHOLE) * min(left) and queue[0].remaining <= (1 + _WHOLE) * max(left)
