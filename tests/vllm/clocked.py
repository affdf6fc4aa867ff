"""vLLM's own engine loop, scheduler and KV cache under a clock of its own: what the simulator must be equal to."""

import itertools
import random
from collections import deque
from collections.abc import Sequence
from typing import Any

from vllm.v1.outputs import ModelRunnerOutput

from isochunk.simulator import Deployment, Request, Result
from isochunk.vllm.testing import Engine

Parts = list[tuple[str, int, int]]  # request, new tokens, tokens before them


def through_vllm(
    engine: Engine, deployment: Deployment, requests: Sequence[Request]
) -> tuple[list[Parts], dict[str, float]]:
    """The steps that vLLM makes of the requests, and when each has its first token, on the deployment's stages."""
    return _Run(engine, deployment, requests).result()


def in_simulator(result: Result) -> tuple[list[Parts], dict[str, float]]:
    """The same of a recorded simulation."""
    steps = [[(prompt.request.key, chunk, history) for prompt, chunk, history in s.parts] for s in result.recorded[0]]
    return steps, {done.key: done.first_token for done in result.finished}


def token_ids(request: Request) -> list[int]:
    """Tokens that are the same where hash ids are the same; without hash ids, like no other request's."""
    if not request.blocks:
        return random.Random(request.key).choices(range(1 << 30), k=request.tokens)
    units = [random.Random(number).choices(range(1 << 30), k=request.unit) for number in request.blocks]
    return list(itertools.chain(*units))[: request.tokens]


class _Run:
    def __init__(self, engine: Engine, deployment: Deployment, requests: Sequence[Request]) -> None:
        self._engine, self._scheduler, self._deployment = engine, engine.scheduler, deployment
        self._coming = deque(sorted(requests, key=lambda request: request.arrival))
        self._free = [0.0] * deployment.stages
        self._in_flight: deque[tuple[float, Any, set[str]]] = deque()
        self._tokens = itertools.count(1 << 30)
        self.now = 0.0
        self.steps: list[Parts] = []
        self.first: dict[str, float] = {}

    def result(self) -> tuple[list[Parts], dict[str, float]]:
        while self._coming or self._in_flight or self._scheduler.has_requests():
            self._arrive()
            if len(self._in_flight) < self._deployment.slots and self._schedule():
                continue
            if self._in_flight:
                self._finish()
            elif self._coming:
                self.now = max(self.now, self._coming[0].arrival)
        return self.steps, self.first

    def _arrive(self) -> None:
        while self._coming and self._coming[0].arrival <= self.now:
            request = self._coming.popleft()
            self._engine.add(request.key, token_ids(request), output_tokens=request.output)

    def _schedule(self) -> bool:
        output = self._scheduler.schedule()
        new = output.num_scheduled_tokens
        if not new:
            return False
        asked = {key: self._scheduler.requests[key] for key in new}
        parts = [(key, chunk, asked[key].num_computed_tokens - chunk) for key, chunk in new.items()]
        at = self.now
        for stage, model in enumerate(self._deployment.models):
            at = max(at, self._free[stage]) + model.step([c for _, c, _ in parts], [h for _, _, h in parts])
            self._free[stage] = at
        self.steps.append(parts)
        self._in_flight.append((at, output, {key for key, request in asked.items() if not request.is_prefill_chunk}))
        return True

    def _finish(self) -> None:
        self.now, output, sampling = self._in_flight.popleft()
        self._arrive()
        ids = list(output.num_scheduled_tokens)
        for key in sampling:
            self.first.setdefault(key, self.now)
        self._scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={key: at for at, key in enumerate(ids)},
                sampled_token_ids=[[next(self._tokens)] if key in sampling else [] for key in ids],
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            ),
        )
