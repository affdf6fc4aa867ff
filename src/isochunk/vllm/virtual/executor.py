"""vLLM's executor over virtual stages: it answers what the engine asks of workers, and lets the clocks run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from vllm.distributed.utils import get_pp_indices
from vllm.logger import init_logger
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, LogprobsLists, LogprobsTensors, ModelRunnerOutput

from isochunk.core.errors import ConfigError
from isochunk.vllm.probe import PREFIX
from isochunk.vllm.virtual.answers import Answer, Vocabulary, certain
from isochunk.vllm.virtual.channel import Channel
from isochunk.vllm.virtual.pipeline import Step
from isochunk.vllm.virtual.rehearsal import Rehearsal, rehearsal_of
from isochunk.vllm.virtual.stages import Stages
from vllm import envs

__all__ = ["VirtualExecutor"]

logger = init_logger("vllm.isochunk.virtual")

_PROMPTS_HELD = 4  # of the longest kind, when nobody says how large the KV cache is


class StepResult(Future):  # type: ignore[type-arg]
    """A step's output, which is there when the step is back from the stages. vLLM waits for it in its own thread."""

    def __init__(self, stages: Stages, step: Step, output: ModelRunnerOutput, patience_s: float) -> None:
        super().__init__()
        self._stages = stages
        self._step = step
        self._output = output
        self._patience_s = patience_s

    def done(self) -> bool:
        return self._stages.pipeline.is_back(self._step)

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        self._stages.pipeline.wait(self._step, self._patience_s)
        return self._output


class VirtualExecutor(Executor):  # type: ignore[misc]
    """An executor whose pipeline stages are clocks; no weights, no worker processes.

    The methods are `Executor`'s.

    Raises:
        ConfigError: the rehearsal does not fit the server.
    """

    supports_pp = True

    def _init_executor(self) -> None:
        rehearsal = rehearsal_of(os.environ)
        if rehearsal is None:
            raise ConfigError("virtual stages need a rehearsal: start them with 'isochunk rehearse'")
        self._rehearsal: Rehearsal = rehearsal
        self._stages = rehearsal.stages(self.parallel_config.pipeline_parallel_size)
        self._patience_s = envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS / rehearsal.speed
        self._answers: dict[str, Answer] = {}
        self._vocabulary = Vocabulary(self._tokenizer(), self._end(), rehearsal.answer_tokens)
        self._waiting: tuple[Step, Any, list[str]] | None = None
        self._began = False
        self._busy_s, self._steps, self._entered = 0.0, 0, 0
        self._channel = Channel(rehearsal.channel, self._told)
        logger.info("%d virtual stages stand in for workers: %s", self._stages.pipeline.stages, self._stages.as_dict())

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """Results are there when they are waited for, so any number of steps may be in flight."""
        return True

    def register_failure_callback(self, callback: Callable[[], None]) -> None:
        """Whom a dying virtual worker calls."""
        self._stages.on_death(callback)

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        """Every layer keeps the keys and values of all tokens, as most models' do."""
        return [
            {f"model.layers.{layer}.self_attn.attn": self._layer_spec() for layer in range(*self._layers(stage))}
            for stage in range(self._stages.pipeline.stages)
        ]

    def determine_available_memory(self) -> list[int]:
        """Bytes a stage: what the user gave, or as many blocks as hold the rehearsal's tokens."""
        stages = self._stages.pipeline.stages
        if (given := self.cache_config.kv_cache_memory_bytes) is not None:
            return [int(given)] * stages
        block = self.cache_config.block_size
        tokens = self._rehearsal.kv_tokens or _PROMPTS_HELD * self.model_config.max_model_len
        blocks = -(-tokens // block) + 1  # vLLM keeps one for itself
        page = self._layer_spec().page_size_bytes
        return [blocks * page * len(range(*self._layers(stage))) for stage in range(stages)]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        """All: nothing is ever laid out. Versions before 0.30 don't ask."""
        from vllm.v1.kv_cache_layout import KVCacheLayout

        return [[layout.name for layout in KVCacheLayout]] * self._stages.pipeline.stages

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        """What all workers would answer; anything that needs a real one is refused.

        Raises:
            RuntimeError: names what was asked for.
        """
        name = method if isinstance(method, str) else getattr(method, "__name__", repr(method))
        if name not in _NOTHING_TO_DO:
            raise RuntimeError(f"{name} needs a real worker, and the stages of a rehearsal are clocks: leave it out")
        answers = [_NOTHING_TO_DO[name]] * self._stages.pipeline.stages
        if not non_block:
            return answers
        future: Future[list[Any]] = Future()
        future.set_result(answers)
        return future

    def initialize_from_config(self, kv_cache_configs: Any) -> None:
        """There is no memory to take. Versions before 0.30 compile here too."""

    def compile_or_warm_up_model(self) -> None:
        """There is nothing to compile."""

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """The step enters the stages; its tokens are chosen in `sample_tokens`, as with real workers."""
        start = time.perf_counter()
        for request_id in scheduler_output.finished_req_ids:
            self._answers.pop(request_id, None)
        result: ModelRunnerOutput | None = None
        if scheduler_output.total_num_scheduled_tokens:
            self._enter(scheduler_output)
        else:
            result = EMPTY_MODEL_RUNNER_OUTPUT
        self._busy_s += time.perf_counter() - start
        if not non_block:
            return result
        future: Future[ModelRunnerOutput | None] = Future()
        future.set_result(result)
        return future

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """The tokens of the step that entered last, when it is back."""
        start = time.perf_counter()
        assert self._waiting is not None, "sample_tokens without a step before it"
        (step, scheduled, samples), self._waiting = self._waiting, None
        result = StepResult(self._stages, step, self._output(scheduled, samples, grammar_output), self._patience_s)
        self._steps += 1
        self._busy_s += time.perf_counter() - start
        return result if non_block else result.result()

    def check_health(self) -> None:
        """Raise when a virtual worker is dead."""
        if (why := self._stages.pipeline.dead) is not None:
            raise RuntimeError(why)

    def shutdown(self) -> None:
        """Stop the clocks; whoever waits for them is told."""
        self._channel.close()
        self._stages.close()

    def _enter(self, scheduled: Any) -> None:
        """Start the clocks; note which requests get a token, in the step's own order."""
        histories: dict[str, int] = {}
        for new in scheduled.scheduled_new_reqs:
            histories[new.req_id] = new.num_computed_tokens
            known = len(new.prefill_token_ids) if new.prefill_token_ids else new.prompt_len
            answer = self._answers[new.req_id] = Answer(new.prompt_len, known, new.sampling_params)
            if new.sampling_params.prompt_logprobs is not None:
                answer.prompt_tokens = new.prompt_token_ids
            if not self._began and not new.req_id.startswith(PREFIX):
                self._began = True
                self._stages.begin()
        cached = scheduled.scheduled_cached_reqs
        for key, history, outputs in zip(
            cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
        ):
            histories[key] = history
            answer = self._answers[key]
            answer.known = answer.prompt + outputs
        chunks = scheduled.num_scheduled_tokens
        decoding = {key for key in chunks if histories[key] >= self._answers[key].prompt and chunks[key] == 1}
        prompts = [key for key in chunks if key not in decoding]
        decodes = [histories[key] for key in chunks if key in decoding]
        step = self._stages.enter([chunks[key] for key in prompts], [histories[key] for key in prompts], decodes)
        samples = [key for key, chunk in chunks.items() if histories[key] + chunk >= self._answers[key].known]
        self._entered += 1
        self._waiting = (step, scheduled, samples)

    def _output(self, scheduled: Any, samples: list[str], grammar: Any) -> ModelRunnerOutput:
        keys = list(scheduled.num_scheduled_tokens)
        said = {key: self._answers[key].token(self._vocabulary) for key in samples}
        if grammar is not None:
            for key, row in zip(grammar.structured_output_request_ids, grammar.grammar_bitmask, strict=True):
                if key in said:
                    said[key] = Answer.allowed(np.asarray(row), said[key], self._vocabulary.end)
        return ModelRunnerOutput(
            req_ids=keys,
            req_id_to_index={key: at for at, key in enumerate(keys)},
            sampled_token_ids=[[said[key]] if key in said else [] for key in keys],
            logprobs=self._logprobs(keys, said),
            prompt_logprobs_dict={key: self._prompt_logprobs(key) for key in said if self._wants_prompt(key)},
        )

    def _wants_prompt(self, key: str) -> bool:
        """Whether this is the first token of a request that asks for its prompt's probabilities."""
        answer = self._answers[key]
        return answer.prompt_tokens is not None and answer.known == answer.prompt

    def _prompt_logprobs(self, key: str) -> LogprobsTensors:
        answer = self._answers[key]
        assert answer.prompt_tokens is not None
        most = answer.parameters.prompt_logprobs
        arrays = certain(answer.prompt_tokens[1:], self.model_config.get_vocab_size() - 1 if most < 0 else most)
        return LogprobsTensors(*map(torch.from_numpy, arrays))

    def _logprobs(self, keys: list[str], said: dict[str, int]) -> LogprobsLists | None:
        """Of the tokens that were said, when a request asks for them: there is no doubt about any."""
        asked = [self._answers[key].parameters.logprobs or 0 for key in said if self._answers[key].parameters]
        if not any(self._answers[key].parameters.logprobs is not None for key in said):
            return None
        counts = [0]
        for key in keys:
            counts.append(counts[-1] + (key in said))
        vocabulary = self.model_config.get_vocab_size()
        most = vocabulary - 1 if min(asked) < 0 else max(asked)
        return LogprobsLists(*certain([said[key] for key in keys if key in said], most), counts)

    def _layers(self, stage: int) -> tuple[int, int]:
        total = self.model_config.get_total_num_hidden_layers()
        first, end = get_pp_indices(total, stage, self.parallel_config.pipeline_parallel_size)
        return int(first), int(end)

    def _layer_spec(self) -> FullAttentionSpec:
        dtype = kv_cache_dtype_str_to_dtype(self.cache_config.cache_dtype, self.model_config)
        return FullAttentionSpec(
            block_size=self.cache_config.block_size,
            num_kv_heads=self.model_config.get_num_kv_heads(self.parallel_config),
            head_size=self.model_config.get_head_size(),
            # MLA keeps one latent vector where others keep a key and a value.
            **({"head_size_v": 0} if self.model_config.use_mla else {}),
            dtype=dtype,
        )

    def _tokenizer(self) -> Any:
        if self.model_config.skip_tokenizer_init:
            return None
        return cached_tokenizer_from_config(self.model_config)

    def _end(self) -> int | None:
        end = getattr(self.model_config.hf_text_config, "eos_token_id", None)
        if isinstance(end, list):
            end = end[0] if end else None
        return None if end is None else int(end)

    def _told(self, data: dict[str, Any]) -> dict[str, Any]:
        """What came through the channel: trouble to make, or nothing; answers with how things are."""
        told = self._stages.tell(data).as_dict() if data else None
        each = self._busy_s / self._steps if self._steps else None
        return {
            "told": told,
            "profile": self._rehearsal.profile,
            "steps": self._steps,
            "entered": self._entered,
            "executor_seconds_a_step": each,
            **self._stages.as_dict(),
        }


# What the engine asks of every worker, and what one without a device answers.
_NOTHING_TO_DO: dict[str, Any] = {
    "get_supported_tasks": ("generate",),
    "check_health": None,
    "set_kv_cache_layout": None,
    "update_max_model_len": None,
    "reset_mm_cache": None,
    "reset_encoder_cache": None,
    "execute_dummy_batch": None,
    "get_kv_connector_handshake_metadata": None,
    "shutdown": None,
}
