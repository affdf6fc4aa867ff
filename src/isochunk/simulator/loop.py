"""The event loop: arrivals, the router and the instances."""

from __future__ import annotations

import functools
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

from isochunk.core.errors import PlanError
from isochunk.simulator.deployment import Deployment
from isochunk.simulator.instance import Event, Instance
from isochunk.simulator.policies import make_policy
from isochunk.simulator.result import Finished, Result
from isochunk.simulator.scheduler import Prompt
from isochunk.simulator.share import ChunkPolicy
from isochunk.simulator.workload import Request, Workload

__all__ = ["simulate"]


def simulate(
    deployment: Deployment,
    workload: Workload,
    policy: str | Callable[[], ChunkPolicy] = "optimal",
    *,
    chunk: int | None = None,
    max_queue_delay: float | None = None,
    least_work_first: float | None = None,
    record: bool = False,
) -> Result:
    """Run a workload to its end.

    Raises:
        PlanError: the KV cache can't hold one of the requests, or the policy is unknown.

    Args:
        policy: a name from `policies.POLICIES`, or what makes a policy for each instance.
        chunk: the fixed size, or the first chunk of the published rules; the token budget when None.
        max_queue_delay: seconds that a prompt waits before it may go between a longer one's steps.
        least_work_first: serve those with the least predicted work first, but after so many seconds nobody passes a
            prompt.
        record: keep every step with its times on the stages, for pictures and trace files.
    """
    if callable(policy):
        if any(option is not None for option in (chunk, max_queue_delay, least_work_first)):
            raise PlanError(
                "chunk, max_queue_delay and least_work_first go with a policy's name; "
                "give them to what makes the policy"
            )
        make = policy
    else:
        make = functools.partial(
            make_policy,
            policy,
            deployment,
            chunk=chunk,
            max_queue_delay=max_queue_delay,
            least_work_first=least_work_first,
        )
    return _Run(deployment, workload, make, record).result()


class _Run:
    def __init__(
        self, deployment: Deployment, workload: Workload, make: Callable[[], ChunkPolicy], record: bool
    ) -> None:
        self._deployment, self._workload = deployment, workload
        _check_room(deployment, workload)
        self._finished: list[Finished] = []
        self._instances = [
            Instance(deployment, make(), self._finish, record=record) for _ in range(deployment.instances)
        ]
        self._turn = count()

    def result(self) -> Result:
        order = count()  # equal times keep their order, and handlers are never compared
        heap: list[tuple[float, bool, int, Event]] = []
        events = self._arrivals(self._workload.start())
        while True:
            for event in events:
                heappush(heap, (event.time, event.last, next(order), event))
            if not heap:
                return Result(self._deployment, self._instances, self._finished)
            *_, event = heappop(heap)
            events = event.handler(event.time, event.subject)

    def _arrivals(self, arrivals: list[tuple[float, Request]]) -> list[Event]:
        return [Event(time, self._arrive, request) for time, request in arrivals]

    def _arrive(self, now: float, request: Request) -> list[Event]:
        return self._choose(request).arrive(now, request) + self._arrivals(self._workload.after_arrival())

    def _choose(self, request: Request) -> Instance:
        instances = self._instances
        if len(instances) == 1:
            return instances[0]
        if self._deployment.router == "round_robin":
            return instances[next(self._turn) % len(instances)]
        model = self._deployment.models[0]
        return min(instances, key=lambda i: i.queued_seconds + model.work(i.hit(request), request.tokens))

    def _finish(self, now: float, prompt: Prompt) -> list[Event]:
        self._finished.append(Finished.of(prompt, now))
        return self._arrivals(self._workload.after_finish(now))


def _check_room(deployment: Deployment, workload: Workload) -> None:
    """vLLM would wait for room for ever."""
    if deployment.kv_blocks is None:
        return
    room = deployment.kv_blocks * deployment.block
    for request in workload.requests:
        tokens = request.tokens + request.output - 1  # the last token's KV is never computed
        if tokens > room:
            raise PlanError(
                f"kv_tokens = {deployment.kv_tokens} can't hold request {request.key}: {request.tokens} tokens and "
                f"{request.output} of its answer; room is for {room}, since vLLM keeps a block for itself"
            )
