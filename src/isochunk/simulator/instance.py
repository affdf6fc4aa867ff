"""One prefill instance: vLLM's engine loop over a pipeline of stages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from isochunk.simulator.scheduler import Prompt, Scheduler, Step
from isochunk.simulator.share import ChunkPolicy
from isochunk.simulator.workload import Request

if TYPE_CHECKING:
    from isochunk.simulator.deployment import Deployment

__all__ = ["Event", "Instance"]


class Event(NamedTuple):
    """When, its handler, what it is about, and whether it waits for all else of that instant."""

    time: float
    handler: Callable[[float, Any], list[Event]]
    subject: Any
    last: bool = False


class Instance:
    """Handlers of what happens to an instance; each returns the events that it causes.

    As vLLM's engine does, it makes batches until K are in flight, and then waits for the oldest: what arrives
    meanwhile waits with it. What arrives at the very instant of a result is seen at once, all of it. While there
    are requests of which nothing can be scheduled, the batches that it makes are empty: they take no time, but a place.
    """

    def __init__(
        self,
        deployment: Deployment,
        policy: ChunkPolicy,
        answered: Callable[[float, Prompt], list[Event]],
        *,
        record: bool = False,
    ) -> None:
        self._models = deployment.models
        self._equal = deployment.models.count(deployment.models[0]) == deployment.stages
        self._slots, self._send, self._return = deployment.slots, deployment.send_s, deployment.return_s
        self._intake, self._taken = (deployment.intake_s, deployment.intake_token_s), 0.0
        self._load_rate, self._load_until = deployment.load_rate, 0.0
        self._policy, self._answered, self._record = policy, answered, record
        self.scheduler = Scheduler(deployment, policy)
        self._batches: deque[Step | None] = deque()  # the oldest first; None is empty
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
        """Tokens of the request that this instance holds, as things stand."""
        return self.scheduler.hit(request)

    def arrive(self, now: float, request: Request) -> list[Event]:
        """A request comes in, and is in the engine when the API server is done with it."""
        prompt = self.scheduler.prompt(request, now)
        prompt.seconds = self._models[0].work(self.hit(request), request.tokens)
        self.queued_seconds += prompt.seconds
        self._taken = max(self._taken, now) + self._intake[0] + self._intake[1] * request.tokens
        return self.enter(now, prompt) if self._taken <= now else [Event(self._taken, self.enter, prompt)]

    def enter(self, now: float, prompt: Prompt) -> list[Event]:
        """The engine has a request."""
        self.scheduler.queue(prompt)
        return self._look(now)

    def leave(self, now: float, step: Step) -> list[Event]:
        """The oldest step's result is back."""
        self._left = now
        self._batches.popleft()
        self._policy.observe(step)
        first, done = self.scheduler.result(step)
        for prompt in first:
            self.queued_seconds -= prompt.seconds
            prompt.first_token = now
        events = [event for prompt in done for event in self._answered(now, prompt)]
        if not any(self._batches):
            self.active += now - self._began
        return events + self._wake(now)

    def loaded(self, now: float, prompt: Prompt) -> list[Event]:
        """The KV of a prompt has come from elsewhere."""
        self.scheduler.loaded(prompt)
        return self._look(now)

    def _look(self, now: float) -> list[Event]:
        """Something came: it is seen at once by an engine that waits for no step."""
        return self._wake(now) if not any(self._batches) or now == self._left else []

    def _wake(self, now: float) -> list[Event]:
        """Schedule once everything else that happens at this instant has happened."""
        if self._waking:
            return []
        self._waking = True
        return [Event(now, self.schedule, None, last=True)]

    def schedule(self, now: float, _: None) -> list[Event]:
        """Fill the pipeline, until the oldest batch in it is one to wait for."""
        self._waking = False
        events: list[Event] = []
        batches = self._batches
        while self.scheduler:
            if len(batches) < self._slots:
                events += self._next(now)
                continue
            if batches[0] is not None or not any(batches):
                break
            batches.popleft()
        while batches and batches[0] is None:
            batches.popleft()
        return events

    def _next(self, now: float) -> list[Event]:
        """The next batch enters, if only an empty one."""
        in_flight = [step for step in self._batches if step]
        step = self.scheduler.step(now, in_flight)
        events = [self._load(now, prompt, tokens) for prompt, tokens in self.scheduler.started]
        self._batches.append(step)
        if step is not None:
            if not in_flight:
                self._began = now
            self.steps += 1
            self.computed += sum(chunk for _, chunk, _ in step.parts)
            events.append(Event(self._pass(now, step), self.leave, step))
        return events

    def _load(self, now: float, prompt: Prompt, tokens: int) -> Event:
        """Loads come one after the other."""
        assert self._load_rate is not None
        self._load_until = max(self._load_until, now) + tokens / self._load_rate
        return Event(self._load_until, self.loaded, prompt)

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
