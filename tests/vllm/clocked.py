"""vLLM's own engine loop, scheduler and KV cache under a clock of its own: what the simulator must be equal to."""

import itertools
import queue
import random
from collections import deque
from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

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


class Link:
    """Through which KV comes from elsewhere, one prompt after the other: what each request has there, and when."""

    def __init__(self, rate: float | None = None) -> None:
        self.rate, self.now, self.until = rate, 0.0, 0.0
        self.cached: dict[str, int] = {}
        self.loads: list[tuple[float, str]] = []


LINK = Link()


class Elsewhere(KVConnectorBase_V1):
    """A KV connector, its scheduler's half."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        more = max(LINK.cached[request.request_id] - num_computed_tokens, 0)
        return more, more > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            assert LINK.rate is not None
            LINK.until = max(LINK.until, LINK.now) + num_external_tokens / LINK.rate
            LINK.loads.append((LINK.until, request.request_id))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, *args: Any, **kwargs: Any) -> None: ...

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self, *args: Any, **kwargs: Any) -> None: ...


class _Run(EngineCore):
    """vLLM's engine core, its own `step_with_batch_queue`, over stages that are numbers."""

    def __init__(self, engine: Engine, deployment: Deployment, requests: Sequence[Request]) -> None:
        self._engine, self._deployment = engine, deployment
        self._coming = deque(sorted(requests, key=lambda request: request.arrival))
        self._free = [0.0] * deployment.stages
        self._tokens = itertools.count(1 << 30)
        self.now, self._idle = 0.0, False
        LINK.__init__(deployment.load_rate)
        self.steps: list[Parts] = []
        self.first: dict[str, float] = {}
        # What the method needs of an engine core.
        self.vllm_config = engine.scheduler.vllm_config
        self.scheduler, self.model_executor = engine.scheduler, self
        self.batch_queue, self.batch_queue_size = deque(), deployment.slots
        self.aborts_queue = queue.Queue()
        self.is_pooling_model = self.is_mm_encoder_only = self.check_for_draft_tokens = self.log_stats = False
        self._weight_version = None
        self.is_ec_consumer = True  # until 0.27

    def result(self) -> tuple[list[Parts], dict[str, float]]:
        while self._coming or self.batch_queue or self.scheduler.has_requests():
            if not any(batch[1].total_num_scheduled_tokens for batch in self.batch_queue):
                self._pass_time()
            LINK.now = self.now
            while self._coming and self._coming[0].arrival <= self.now:
                request = self._coming.popleft()
                LINK.cached[request.key] = request.cached
                self._idle = False
                self._engine.add(request.key, token_ids(request), output_tokens=request.output)
            self.step_with_batch_queue()
        return self.steps, self.first

    def _pass_time(self) -> None:
        """Nothing is in the stages: the next that happens is an arrival or the end of a load, if nothing is due now."""
        if self.scheduler.has_requests() and not self._idle:
            return
        coming = [request.arrival for request in list(self._coming)[:1]] + [at for at, _ in LINK.loads]
        self.now, self._idle = max(self.now, min(coming, default=0.0)), False

    def execute_model(self, output: Any, non_block: bool) -> "_Result":
        """As an executor: the step goes through the stages."""
        new = output.num_scheduled_tokens
        asked = {key: self.scheduler.requests[key] for key in new}
        at = LINK.now = self.now
        self._idle = not new
        if new:
            parts = [(key, chunk, asked[key].num_computed_tokens - chunk) for key, chunk in new.items()]
            self.steps.append(parts)
            for stage, model in enumerate(self._deployment.models):
                at = max(at, self._free[stage]) + model.step([c for _, c, _ in parts], [h for _, _, h in parts])
                self._free[stage] = at
        sampling = [key for key, request in asked.items() if not request.is_prefill_chunk]
        self._last = _Result(self, at, list(new), sampling)
        return self._last

    def sample_tokens(self, grammar: Any, non_block: bool) -> "_Result":
        """As an executor: tokens that nobody else has."""
        return self._last

    def answer(self, at: float, ids: list[str], sampling: list[str]) -> ModelRunnerOutput:
        """The engine waits for a step's result until it is there."""
        self.now = max(self.now, at)
        LINK.now = self.now
        came = {key for due, key in LINK.loads if due <= self.now}
        LINK.loads = [(due, key) for due, key in LINK.loads if due > self.now]
        self._idle &= not (came or ids)
        for key in sampling:
            self.first.setdefault(key, self.now)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={key: at for at, key in enumerate(ids)},
            sampled_token_ids=[[next(self._tokens)] if key in sampling else [] for key in ids],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=KVConnectorOutput(finished_recving=came) if came else None,
        )


class _Result:
    """The future of a step."""

    def __init__(self, run: _Run, *what: Any) -> None:
        self._run, self._what = run, what

    def result(self) -> ModelRunnerOutput:
        return self._run.answer(*self._what)
