"""vLLM's executor over virtual stages: it answers what the engine asks of workers, and lets the clocks run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from vllm.distributed.utils import get_pp_indices
from vllm.logger import init_logger
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from isochunk.core.errors import ConfigError
from isochunk.vllm.virtual.channel import Channel
from isochunk.vllm.virtual.pipeline import Step
from isochunk.vllm.virtual.rehearsal import Rehearsal, rehearsal_of
from isochunk.vllm.virtual.speaker import Share, Speaker
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
        self._speaker = Speaker(self.model_config, rehearsal.answer_tokens)
        self._waiting: tuple[Step, Share] | None = None
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
        return _done(answers) if non_block else answers

    def initialize_from_config(self, kv_cache_configs: Any) -> None:
        """There is no memory to take. Versions before 0.30 compile here too."""

    def compile_or_warm_up_model(self) -> None:
        """There is nothing to compile."""

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """The step enters the stages; its tokens are chosen in `sample_tokens`, as with real workers."""
        start = time.perf_counter()
        share = self._speaker.hear(scheduler_output)
        result = None if share else EMPTY_MODEL_RUNNER_OUTPUT
        if share:
            if not self._began and share.is_a_clients:
                self._began = True
                self._stages.begin()
            self._waiting = (self._stages.enter(share.chunks, share.histories, share.decodes), share)
            self._entered += 1
        self._busy_s += time.perf_counter() - start
        return _done(result) if non_block else result

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """The tokens of the step that entered last, when it is back."""
        start = time.perf_counter()
        assert self._waiting is not None, "sample_tokens without a step before it"
        (step, share), self._waiting = self._waiting, None
        result = StepResult(self._stages, step, self._speaker.say(share, grammar_output), self._patience_s)
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
            **self._rehearsal.known().estimate,
        }


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


# What the engine asks of every worker, and what one without a device answers.
_NOTHING_TO_DO: dict[str, Any] = {
    "supports_draft_weight_updates": False,  # asked by 0.28 to 0.30 of every engine that starts
    "get_supported_tasks": ("generate",),
    "check_health": None,
    "set_kv_cache_layout": None,
    "update_max_model_len": None,
    "reset_mm_cache": None,
    "reset_encoder_cache": None,
    "execute_dummy_batch": None,
    "synchronize_device": None,
    "get_kv_connector_handshake_metadata": None,
    "shutdown": None,
}
