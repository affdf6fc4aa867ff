"""vLLM's real scheduler, as its own configuration builds it, over an engine without a model."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from vllm import SamplingParams

__all__ = ["BLOCK", "Engine", "StepTime", "engine_config", "model_output"]

BLOCK = 16

_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1000,
    "max_position_embeddings": 1 << 20,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


def engine_config(folder: Path, section: dict[str, Any] | None = None, **options: Any) -> Any:
    """The configuration that ``vllm serve`` would build from these options and plugin section."""
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    arguments = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "pipeline_parallel_size": 2,
        "max_num_batched_tokens": 2048,
        "max_model_len": 65536,
        "max_num_seqs": 64,
        "block_size": BLOCK,
        "enforce_eager": True,
        **options,
    }
    if section is not None:
        arguments["additional_config"] = {"scheduler_config": {"profiling_chunk_config": section}}
    return EngineArgs(**arguments).create_engine_config()


class StepTime:
    """Time that passes by steps, in place of the module `time`: without a model behind it a step takes none."""

    now = 0.0

    def monotonic(self) -> float:
        """Seconds."""
        return self.now

    def time(self) -> float:
        """Seconds; the first requests came at moment 0."""
        return self.now


class Engine:
    """Steps the scheduler with up to ``in_flight`` steps in the pipeline; every prompt's answer is token 7.

    Attributes:
        scheduler: vLLM's, of the class that the configuration names.
        steps: new tokens of each request in each step.
        histories: tokens that each of them had computed before.
        preempted: requests that vLLM put back into its queue in that step.
    """

    def __init__(self, config: Any, *, blocks: int = 20_000, in_flight: int = 2) -> None:
        config.cache_config.num_gpu_blocks = blocks
        if hasattr(config.cache_config, "kv_cache_size_tokens"):  # not in vLLM 0.23
            config.cache_config.kv_cache_size_tokens = blocks * BLOCK
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=config.model_config.dtype)
        self.scheduler = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )
        hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_fn)
        self._hasher = get_request_block_hasher(BLOCK, hash_fn)
        self._queue: deque[Any] = deque()
        self._in_flight = in_flight
        self.steps: list[dict[str, int]] = []
        self.histories: list[dict[str, int]] = []
        self.preempted: list[set[str]] = []

    def add(self, request_id: str, tokens: list[int], output_tokens: int = 1, priority: int = 0) -> None:
        """Queue a prompt of token ids."""
        self.scheduler.add_request(
            Request(
                request_id=request_id,
                prompt_token_ids=tokens,
                sampling_params=SamplingParams(max_tokens=output_tokens, ignore_eos=True),
                pooling_params=None,
                block_hasher=self._hasher,
                priority=priority,
            )
        )

    def has_work(self) -> bool:
        """As vLLM's engine core: is there anything to step for?"""
        return self.scheduler.has_requests() or bool(self._queue)

    def is_running(self) -> bool:
        """As vLLM's engine core: has no shutdown been asked for?"""
        return True

    def step_fn(self) -> None:
        """One turn of vLLM's `step_with_batch_queue`."""
        if self.scheduler.has_requests():
            output = self.schedule()
            new = dict(output.num_scheduled_tokens)
            requests = {key: self.scheduler.requests[key] for key in new}
            sampling = {key for key, request in requests.items() if not request.is_prefill_chunk}
            self._queue.appendleft((output, sampling))
            if new:
                if not output.has_structured_output_requests:
                    self.scheduler.get_grammar_bitmask(output)
                self.steps.append(new)
                self.histories.append({key: requests[key].num_computed_tokens - new[key] for key in new})
                self.preempted.append(set(output.preempted_req_ids or ()))
                if len(self._queue) < self._in_flight:
                    return
        if self._queue:
            output, sampling = self._queue.pop()
            self.answered(output, self.scheduler.update_from_output(output, self.answer(output, sampling)))

    def schedule(self) -> Any:
        """The next step."""
        return self.scheduler.schedule()

    def answer(self, output: Any, sampling: set[str]) -> ModelRunnerOutput:
        """What the model makes of a step; ``sampling`` are the requests whose next token it tells."""
        return model_output(output, {request_id: [7] for request_id in sampling})

    def answered(self, output: Any, told: Any) -> None:
        """What vLLM tells its clients of a step."""

    def run(self, most: int = 100_000) -> None:
        """Step until nothing is left to do."""
        for _ in range(most):
            if not self.has_work():
                return
            self.step_fn()
        raise AssertionError(f"still busy after {most} turns")


def model_output(output: Any, sampled: Mapping[str, list[int]], **more: Any) -> ModelRunnerOutput:
    """A model's answer to a step: the tokens that it sampled for some of its requests."""
    ids = list(output.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request_id: at for at, request_id in enumerate(ids)},
        sampled_token_ids=[sampled.get(request_id, []) for request_id in ids],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
        **more,
    )
