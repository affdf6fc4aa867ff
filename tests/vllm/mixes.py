"""Random mixes of options and traffic, and what vLLM alone would make of a step of isochunk's.

A mix is made from a number. Its traffic is the same whatever scheduler serves it: who comes, aborts, pauses and so on
at which turn of the engine's loop. The model is a stub whose tokens depend on the request and the position alone.
"""

import json
import os
import random
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler as VllmAsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from isochunk.core.cost import CostModel
from isochunk.vllm.compat import vllm_version
from isochunk.vllm.testing import BLOCK, Engine, StepTime, model_output
from isochunk.vllm.versions import NEWEST, minor
from vllm import SamplingParams

from .conftest import MODEL

LIMIT, BLOCKS, LONGEST, DRAFTS = 2048, 500, 4096, 3
# Elsewhere the next part of a stream that comes while drafts are on their way ends in an assertion of vLLM's own.
STREAMS_BESIDE_DRAFTS = (0, 31) <= (minor(vllm_version()) or NEWEST) < (0, 33)


@dataclass(frozen=True)
class Shape:
    """What an engine is built for; mixes of one shape share it."""

    stages: int
    asynchronous: bool
    order: str
    adapters: int
    loads: bool
    drafts: bool

    def options(self, folder: Path, *, ours: bool) -> dict[str, Any]:
        room = (
            "isochunk.vllm."
            if ours
            else "vllm.v1.core.sched.async_scheduler."
            if self.asynchronous
            else ("vllm.v1.core.sched.scheduler.")
        )
        options: dict[str, Any] = {
            "pipeline_parallel_size": self.stages,
            "in_flight": self.stages + self.asynchronous,
            "scheduler_cls": room + ("AsyncScheduler" if self.asynchronous else "Scheduler"),
            "scheduling_policy": self.order,
            "blocks": BLOCKS,
            "max_model_len": LONGEST,
        }
        if self.adapters:
            options |= {"enable_lora": True, "max_loras": self.adapters}
        if self.drafts:
            options["speculative_config"] = {
                "method": "ngram",
                "num_speculative_tokens": DRAFTS,
                "prompt_lookup_max": 2,
            }
        if self.loads:
            options["kv_transfer_config"] = KVTransferConfig(
                kv_connector="Loads",
                kv_connector_module_path=__name__,
                kv_role="kv_both",
                kv_connector_extra_config={"shared_storage_path": str(folder)},
            )
        return options


SHAPES = [
    Shape(stages, asynchronous, order, adapters, loads, drafts)
    for stages in (2, 4)
    for asynchronous in (False, True)
    for order in ("fcfs", "priority")
    for adapters in (0, 1, 2)
    for loads in (False, True)
    for drafts in (False, True)
]


@dataclass
class Arrival:
    """A request that comes; ``parts`` are the prompts of a stream, one for a request that is none."""

    turn: int
    key: str
    parts: list[list[int]]
    output: int
    shared: int = 0  # of its first tokens are those of others
    priority: int = 0
    adapter: int = 0
    grammar: int | None = None  # turns until its grammar is there
    abort: int | None = None  # turn at which it is given up


@dataclass
class Mix:
    shape: Shape
    threshold: int = 0
    queue_delay: float | None = None
    latency: float | None = None
    least_work: float | None = None
    policy: tuple[str, int | None] = ("optimal", None)
    knows: bool = True  # a model from the start
    learns: bool = False
    true: CostModel = MODEL  # what steps take
    arrivals: list[Arrival] = field(default_factory=list)
    pauses: dict[int, PauseState] = field(default_factory=dict)
    resets: dict[int, bool] = field(default_factory=dict)

    @classmethod
    def make(cls, seed: int) -> "Mix":
        """The mix of this number; its shape is drawn too."""
        rng = random.Random(seed)
        shape = rng.choice(SHAPES)
        mix = cls(shape)
        mix.threshold = rng.choice((0, 0, 100, 512, 1500))
        if shape.order == "fcfs":
            mix.queue_delay = rng.choice((None, 0.0))
            mix.least_work = rng.choice((None, None, None, 0.0, 0.1))
        mix.latency = rng.choice((None, None, 0.03, 0.1))
        mix.policy = rng.choice((("optimal", None),) * 4 + (("first_chunk", None), ("fixed", None), ("fixed", 60)))
        mix.learns = rng.random() < 0.5
        mix.knows = not mix.learns or rng.random() < 0.7
        if mix.learns:
            mix.true = MODEL.with_costs(
                *(cost * rng.choice((0.25, 1.0, 1.0, 4.0)) for cost in MODEL.as_dict().values())
            )
        shared = [rng.randrange(1000) for _ in range(1500)]
        turn = 0
        for number in range(rng.randint(2, 9)):
            turn += rng.choice((0, 0, 1, 3, 8))
            streams = 1 if shape.loads or rng.random() < 0.9 else rng.randint(2, 3)
            if shape.drafts and not STREAMS_BESIDE_DRAFTS:
                streams = 1
            parts = [rng.choices(range(1000), k=rng.choice((20, 300, 900, 2500)) // streams) for _ in range(streams)]
            # With loads nothing is shared: what vLLM serves in a step is in the cache for those behind in the same one.
            common = rng.choice((0, 0, 200, 1400)) * (not shape.loads)
            parts[0] = shared[:common] + parts[0]
            mix.arrivals.append(
                Arrival(
                    turn,
                    f"{seed}-{number}",
                    parts,
                    shared=common,
                    output=rng.choice((1, 1, 2, 40)),
                    priority=rng.randint(0, 2),
                    adapter=rng.randint(0, 2) if shape.adapters else 0,
                    grammar=rng.randint(0, 6) if streams == 1 and not shape.drafts and rng.random() < 0.2 else None,
                    abort=turn + rng.randint(1, 12) if rng.random() < 0.1 else None,
                )
            )
        if rng.random() < 0.15:
            start = rng.randint(1, 10)
            mix.pauses = {
                start: rng.choice((PauseState.PAUSED_ALL, PauseState.PAUSED_NEW)),
                start + 4: PauseState.UNPAUSED,
            }
        if rng.random() < 0.15:
            mix.resets = {rng.randint(1, 12): not shape.loads and rng.random() < 0.5}
        return mix


class Loads(ExampleConnector):  # type: ignore[misc]
    """A connector with the first half of some prompts in store, for some of them between steps."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        kind = _kind(request.request_id)
        half = request.num_prompt_tokens // 2 // BLOCK * BLOCK
        more = half - num_computed_tokens
        if kind == 0 or more <= 0 or request.num_preemptions:
            return 0, False
        return more, kind == 1

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnectorMetadata

        return ExampleConnectorMetadata()


def _kind(request_id: str) -> int:
    return int(request_id.rsplit("-", 1)[1]) % 3


class Grammar(StructuredOutputGrammar):  # type: ignore[misc]  # 0.26 to 0.28 ask for one of these
    """Takes any token."""

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return tokens

    def is_terminated(self) -> bool:
        return False

    def rollback(self, num_tokens: int) -> None:
        pass

    def fill_bitmask(self, bitmask: Any, batch_index: int) -> None:
        pass

    def reset(self) -> None:
        pass


def token(request_id: str, position: int) -> int:
    """The token at this position after the prompt."""
    return random.Random(f"{request_id} {position}").randrange(1000)


class MixEngine(Engine):
    """An engine whose traffic is a mix; each step of isochunk's may be compared with what vLLM alone would do."""

    def begin(
        self, mix: Mix, compare: Callable[[dict[str, Any], dict[str, Any]], None] | None, rng: random.Random
    ) -> None:
        self.mix, self.compare, self.rng = mix, compare, rng
        self.told: dict[str, list[int]] = {}
        self.streams = {arrival.key for arrival in mix.arrivals if len(arrival.parts) > 1}
        self.lost: set[str] = set()
        self.clock = StepTime()
        self.loading: dict[str, int] = {}
        self.turn = 0
        self.compared = 0
        self.grammars: dict[int, list[Future[Any]]] = {}
        self.scheduler.scheduler_config.long_prefill_token_threshold = mix.threshold

    def serve(self, most: int = 8000) -> None:
        """All of the mix, to its end."""
        last = max([a.turn for a in self.mix.arrivals] + list(self.mix.pauses) + list(self.mix.resets))
        for self.turn in range(most):
            self._events()
            if self.has_work():
                self.step_fn()
                self._lost()
            elif self.turn > last and not self.scheduler.requests:
                return
        raise AssertionError(f"still busy after {most} turns: {self.scheduler.requests.keys()}")

    def _lost(self) -> None:
        """Give up a stream that vLLM has lost: one that is preempted while the step that ends its part is under way.

        vLLM takes the next part on, and then the request out of its queues (`stopped_preempted_reqs`), in 0.32.
        """
        scheduler = self.scheduler
        for request in list(scheduler.requests.values()):
            if (
                request.status is not RequestStatus.WAITING
                or not request.num_preemptions
                or request.request_id not in self.streams
            ):
                continue
            queues = (getattr(scheduler, name, ()) for name in ("waiting", "kv_holding_waiting", "skipped_waiting"))
            if all(request not in queue for queue in queues):
                self.lost.add(request.request_id)
                scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def _events(self) -> None:
        scheduler = self.scheduler
        for future in self.grammars.pop(self.turn, []):
            future.set_result(Grammar())
        for arrival in self.mix.arrivals:
            if arrival.turn == self.turn:
                self._arrive(arrival)
            if arrival.abort == self.turn:
                scheduler.finish_requests(arrival.key, RequestStatus.FINISHED_ABORTED)
        if self.turn in self.mix.pauses:
            scheduler.set_pause_state(self.mix.pauses[self.turn])
        if self.turn in self.mix.resets:
            try:
                scheduler.reset_prefix_cache(reset_running_requests=self.mix.resets[self.turn])
            except RuntimeError as refused:  # vLLM's answer while remote KV is on its way
                if "remote KV transfer" not in str(refused):
                    raise

    def _arrive(self, arrival: Arrival) -> None:
        for at, part in enumerate(arrival.parts):
            streams = len(arrival.parts) > 1
            params = SamplingParams(max_tokens=arrival.output, ignore_eos=True)
            if arrival.grammar is not None:
                params.structured_outputs = StructuredOutputsParams(regex="a*")
            adapter = LoRARequest(f"lora{arrival.adapter}", arrival.adapter, "nowhere") if arrival.adapter else None
            request = Request(
                request_id=arrival.key,
                prompt_token_ids=list(part),
                sampling_params=params,
                pooling_params=None,
                block_hasher=self._hasher,
                priority=arrival.priority,
                lora_request=adapter,
                arrival_time=self.clock.now,
                resumable=streams and at < len(arrival.parts) - 1,
            )
            if arrival.grammar is not None:
                future: Future[Any] = Future()
                request.structured_output_request.grammar = future
                self.grammars.setdefault(self.turn + 1 + arrival.grammar, []).append(future)
            self.scheduler.add_request(request)

    def schedule(self) -> Any:
        last = (list(self.steps[-1].values()), list(self.histories[-1].values())) if self.steps else ((), ())
        self.clock.now += self.mix.true.step(*last) * self.rng.lognormvariate(0, 0.03)
        compare = self.compare is not None and self.compared < 4 and self.rng.random() < 0.1
        before = self._state() if compare else {}
        alone = self._alone() if compare else None
        output = self.scheduler.schedule()
        if compare and alone is not None:
            self.compared += 1
            ours = {"tokens": dict(output.num_scheduled_tokens), "loading": self._loads()}
            self.compare(before | {"alone": alone}, ours)
        for key in self._loads():
            self.loading.setdefault(key, self.turn + 3)
        return output

    def _loads(self) -> list[str]:
        remote = RequestStatus.WAITING_FOR_REMOTE_KVS
        return [key for key, request in self.scheduler.requests.items() if request.status is remote]

    def _state(self) -> dict[str, Any]:
        requests = self.scheduler.requests
        return {
            "threshold": self.mix.threshold if len(requests) > 1 else 0,
            "decodes": [r.request_id for r in self.scheduler.running if not r.is_prefill_chunk],
            "lacks": {key: r.num_tokens - r.num_computed_tokens for key, r in requests.items()},
        }

    def _alone(self) -> dict[str, Any] | None:
        """What vLLM's own `schedule` makes of this very state, in a process of its own; None where it fails."""
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            made: dict[str, Any] | None = None
            try:
                base = VllmAsyncScheduler if isinstance(self.scheduler, VllmAsyncScheduler) else VllmScheduler
                output = base.schedule(self.scheduler)
                made = {"tokens": dict(output.num_scheduled_tokens), "loading": self._loads()}
                made["preempted"] = list(output.preempted_req_ids or ())
            finally:
                os.write(writer, json.dumps(made).encode())
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            told: dict[str, Any] | None = json.loads(pipe.read())
        os.waitpid(child, 0)
        return told

    def answer(self, output: Any, sampling: set[str]) -> Any:
        sampled: dict[str, list[int]] = {}
        for key in sampling:
            request = self.scheduler.requests.get(key)
            if request is None:
                continue
            drafts = output.scheduled_spec_decode_tokens.get(key, [])
            at = request.num_output_tokens
            good = [token(key, at + place) for place in range(len(drafts) + 1)]
            kept = next((n for n, draft in enumerate(drafts) if draft not in (-1, good[n])), len(drafts))
            if -1 in drafts:
                kept = min(kept, token(key, at) % (DRAFTS + 1))
            sampled[key] = good[: kept + 1]
        done = {key for key, turn in self.loading.items() if 0 <= turn <= self.turn}
        self.loading |= dict.fromkeys(done, -1)
        known = {key for key in done if key in self.scheduler.requests}
        received = KVConnectorOutput(finished_recving=known) if known else None
        return model_output(output, sampled, kv_connector_output=received)

    def answered(self, output: Any, told: Any) -> None:
        for outputs in told.values():
            for each in outputs.outputs:
                self.told.setdefault(each.request_id, []).extend(each.new_token_ids)
        if self.mix.shape.drafts and not self.mix.shape.asynchronous:
            requests = [self.scheduler.requests.get(key) for key in output.num_scheduled_tokens]
            alive = [
                r for r in requests if r is not None and r.status is RequestStatus.RUNNING and not r.is_prefill_chunk
            ]
            guesses = [
                [token(r.request_id, r.num_output_tokens + n) if n != 1 else 1 for n in range(DRAFTS)] for r in alive
            ]
            self.scheduler.update_draft_token_ids(DraftTokenIds([r.request_id for r in alive], guesses))
