"""One prefill instance: vLLM's engine loop over a pipeline of stages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from isochunk.core.steps import Prefill
from isochunk.simulator.trace import PrefixCache
from isochunk.simulator.workload import Request

if TYPE_CHECKING:
    from isochunk.simulator.deployment import Deployment
    from isochunk.simulator.policies import ChunkPolicy

__all__ = ["Event", "Instance", "Part", "Prompt", "Step"]


class Event(NamedTuple):
    """When, its handler, what it is about, and whether it waits for all else of that instant."""

    time: float
    handler: Callable[[float, Any], list[Event]]
    subject: Any
    last: bool = False


@dataclass(slots=True, eq=False)
class Prompt:
    """A request in an instance: what is computed and what is not."""

    request: Request
    arrived: float
    history: int = 0
    remaining: int = 0
    seconds: float = 0.0  # of work that the router counts until the first token
    begun: bool = False

    def prefill(self, now: float) -> Prefill:
        """What the planner sees of it."""
        return Prefill(self.request.key, self.history, self.remaining, now - self.arrived)


Part = tuple[Prompt, int]
Prompts = deque[Prompt]


@dataclass(slots=True, eq=False)
class Step:
    """One batch on its way: parts (prompt, chunk, history), seconds on the slowest stage, who finishes."""

    parts: list[tuple[Prompt, int, int]]
    seconds: float
    finishing: list[Prompt]
    stages: list[tuple[float, float]] = field(default_factory=list)  # start and end on each, when recorded


Steps = deque[Step]


class Instance:
    """Handlers of the two things that happen to an instance; each returns the events it causes.

    As vLLM's engine does, it schedules while fewer than K steps are in flight and there is something to
    schedule, and then waits for the oldest step: what arrives meanwhile waits with it. What arrives at
    the very instant of a result is seen at once, all of it.
    """

    def __init__(
        self,
        deployment: Deployment,
        policy: ChunkPolicy,
        finished: Callable[[float, Prompt], list[Event]],
        *,
        record: bool = False,
    ) -> None:
        self._models = deployment.models
        self._equal = deployment.models.count(deployment.models[0]) == deployment.stages
        self._slots, self._send, self._return = deployment.slots, deployment.send_s, deployment.return_s
        self._policy, self._finished, self._record = policy, finished, record
        self._cache = PrefixCache(deployment.cache_blocks)
        self._prompts: Prompts = deque()
        self._in_flight: Steps = deque()
        self._free = [0.0] * deployment.stages  # when each stage is free
        self._began = 0.0
        self._left = -1.0  # when the last result came back
        self._waking = False
        self.queued_seconds = 0.0
        self.busy = [0.0] * deployment.stages
        self.active = 0.0
        self.steps = 0
        self.computed = 0
        self.recorded: list[Step] = []

    def hit(self, request: Request) -> int:
        """Tokens of the request that this instance holds."""
        return self._cache.hit(request.blocks, request.tokens) if request.blocks else request.cached

    def arrive(self, now: float, request: Request) -> list[Event]:
        """A request comes in."""
        prompt = Prompt(request, now, remaining=request.tokens)
        hit = self.hit(request)
        prompt.seconds = self._models[0].work(hit, request.tokens)
        self.queued_seconds += prompt.seconds
        prompt.history, prompt.remaining = hit, request.tokens - hit
        self._prompts.append(prompt)
        return self._wake(now) if not self._in_flight or now == self._left else []

    def leave(self, now: float, step: Step) -> list[Event]:
        """The oldest step's result is back."""
        self._left = now
        self._in_flight.popleft()
        self._policy.observe(step)
        events: list[Event] = []
        for prompt in step.finishing:
            self.queued_seconds -= prompt.seconds
            self._cache.store(prompt.request.blocks)
            events += self._finished(now, prompt)
        if not self._in_flight:
            self.active += now - self._began
        return events + self._wake(now)

    def _wake(self, now: float) -> list[Event]:
        """Schedule once everything else that happens at this instant has happened."""
        if self._waking:
            return []
        self._waking = True
        return [Event(now, self.schedule, None, last=True)]

    def schedule(self, now: float, _: None) -> list[Event]:
        """Fill the pipeline."""
        self._waking = False
        if not self._in_flight:
            self._began = now
        events: list[Event] = []
        while self._prompts and len(self._in_flight) < self._slots:
            step = self._take(self._policy.cut(self._prompts, self._in_flight, now))
            self._in_flight.append(step)
            events.append(Event(self._pass(now, step), self.leave, step))
        return events

    def _take(self, parts: list[Part]) -> Step:
        """Move the chunks from the queue into a step."""
        step = Step([], 0.0, [])
        behind = parts if parts[0][0] is not self._prompts[0] else parts[1:]
        for prompt, chunk in parts:
            prompt.begun = True
            step.parts.append((prompt, chunk, prompt.history))
            prompt.history += chunk
            prompt.remaining -= chunk
            self.computed += chunk
            if prompt.remaining == 0:
                step.finishing.append(prompt)
        while self._prompts and self._prompts[0].remaining == 0:
            self._prompts.popleft()
        if any(prompt.remaining == 0 for prompt, _ in behind if self._prompts):
            self._prompts = deque(prompt for prompt in self._prompts if prompt.remaining)
        self.steps += 1
        return step

    def _pass(self, now: float, step: Step) -> float:
        """Send the step through the stages; returns when its result is back."""
        times = self._stage_seconds(step)
        step.seconds = max(times)
        at, free, busy = now, self._free, self.busy
        for stage, seconds in enumerate(times):
            start = max(at, free[stage])
            free[stage] = end = start + seconds
            busy[stage] += seconds
            at = end + self._send
            if self._record:
                step.stages.append((start, end))
        if self._record:
            self.recorded.append(step)
        return at - self._send + self._return

    def _stage_seconds(self, step: Step) -> list[float]:
        models = self._models[:1] if self._equal else self._models
        times = []
        for model in models:
            if len(step.parts) == 1:
                _, chunk, history = step.parts[0]
                times.append(model.seconds(chunk, history))
            else:
                _, chunks, histories = zip(*step.parts, strict=True)
                times.append(model.step(chunks, histories))
        return times * len(self._models) if self._equal else times
