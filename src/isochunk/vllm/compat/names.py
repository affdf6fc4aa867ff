"""Every name and signature of vLLM that a step needs, looked at before the first one.

A vLLM in which one is gone refuses to start, instead of failing in every step and serving without a plan.
`tests/vllm/test_names.py` holds these tables against the source.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

from isochunk.core.errors import ConfigError
from isochunk.vllm.compat.patching import gone
from isochunk.vllm.compat.scheduling import probe_request

__all__ = ["REQUEST", "SCHEDULER", "check_names", "check_scheduler"]

# What is called, and with how many arguments beside self. Where there is more than one name, one is enough: the first
# is that of the newest version.
_CALLS: tuple[tuple[tuple[str, ...], int], ...] = (
    (("vllm.engine.arg_utils:EngineArgs.create_engine_config",), 0),
    (("vllm.v1.engine.core:EngineCoreProc.run_busy_loop",), 0),
    (("vllm.v1.engine.core:EngineCoreProc.has_work",), 0),
    (("vllm.v1.engine.core:EngineCoreProc.is_running",), 0),
    (("vllm.v1.engine.core:EngineCore.step_with_batch_queue",), 0),
    (("vllm.v1.core.sched.scheduler:Scheduler.schedule",), 0),
    (("vllm.v1.core.sched.scheduler:Scheduler.update_from_output",), 2),
    (("vllm.v1.core.sched.scheduler:Scheduler.add_request",), 1),
    (("vllm.v1.core.sched.scheduler:Scheduler.finish_requests",), 2),
    (("vllm.v1.core.sched.scheduler:Scheduler.get_request_counts",), 0),
    (("vllm.v1.core.kv_cache_coordinator:UnitaryKVCacheCoordinator.find_longest_cache_hit",), 2),
    (("vllm.v1.core.kv_cache_coordinator:HybridKVCacheCoordinator.find_longest_cache_hit",), 2),
    (("vllm.v1.request:RequestStatus.FINISHED_ABORTED",), 0),
    (
        (
            "vllm.entrypoints.serve.middleware.authenticate:AuthenticationMiddleware.verify_token",
            "vllm.entrypoints.serve.utils.server_utils:AuthenticationMiddleware.verify_token",
        ),
        1,
    ),
)
_OUTPUT = ("num_scheduled_tokens", "total_num_scheduled_tokens")

# Attributes of the scheduler, and of what hangs on it. Those with a bar have an older name after it.
SCHEDULER = (
    "_mamba_block_aligned_split",
    "block_size",
    "cache_config",
    "connector",
    "current_step",
    "finished_recving_kv_req_ids",
    "finished_req_ids",
    "kv_cache_config.kv_cache_groups",
    "kv_cache_config.num_blocks",
    "kv_cache_manager.block_pool.get_cached_block",
    "kv_cache_manager.coordinator.find_longest_cache_hit",
    "kv_cache_manager.coordinator.single_type_managers",
    "kv_cache_manager.enable_caching",
    "kv_holding_waiting|skipped_waiting",
    "lora_config",
    "max_model_len",
    "max_num_running_reqs",
    "max_num_scheduled_tokens",
    "need_mamba_block_aligned_split",
    "num_spec_tokens",
    "num_waiting_for_streaming_input",
    "policy",
    "requests",
    "running",
    "scheduler_config.disable_chunked_mm_input",
    "scheduler_config.long_prefill_token_threshold",
    "scheduler_config.max_num_batched_tokens",
    "use_eagle",
    "vllm_config.parallel_config.pipeline_parallel_size",
    "waiting",
)
REQUEST = (
    "arrival_time",
    "block_hashes",
    "has_encoder_inputs",
    "is_prefill_chunk",
    "lora_request",
    "max_tokens",
    "mm_features",
    "next_decode_eligible_step",
    "num_computed_tokens",
    "num_output_placeholders",
    "num_output_tokens",
    "num_prompt_tokens",
    "num_tokens",
    "num_tokens_with_spec",
    "request_id",
    "skip_reading_prefix_cache",
    "status",
    "structured_output_request",
    "trace_headers",
)


def check_names() -> None:
    """Look at what is called, and at what a request has.

    Raises:
        ConfigError: names what is gone or takes other arguments, this version of vLLM, and the remedy.
    """
    missing = [wrong for names, arguments in _CALLS if (wrong := _wrong_call(names, arguments)) is not None]
    missing += [f"SchedulerOutput.{name}" for name in _OUTPUT if name not in _fields("SchedulerOutput")]
    try:
        request = probe_request("isochunk-names", [0])
    except (ImportError, TypeError, AttributeError) as error:
        missing.append(f"Request as isochunk makes it ({error})")
    else:
        missing += [f"Request.{name}" for name in REQUEST if not hasattr(request, name)]
    if missing:
        raise gone(missing)


def check_scheduler(scheduler: Any) -> None:
    """Look at what this scheduler has, and that it is none that isochunk can't narrow.

    Raises:
        ConfigError: as `check_names`, or balance scheduling is on.
    """
    check_names()
    missing = [f"Scheduler.{name}" for name in SCHEDULER if not any(_has(scheduler, part) for part in _either(name))]
    if missing:
        raise gone(missing)
    if getattr(scheduler, "_balance_enabled", False):
        raise ConfigError(
            "balance scheduling of vLLM-Ascend is on in this engine and excludes isochunk; turn one of the two off"
        )


def _either(name: str) -> Iterator[str]:
    yield from name.split("|")


def _has(owner: Any, path: str) -> bool:
    for part in path.split("."):
        if not hasattr(owner, part):
            return False
        owner = getattr(owner, part)
    return True


def _wrong_call(names: tuple[str, ...], arguments: int) -> str | None:
    """The first of these names, and what is wrong with it, when none of them is there; None when one is."""
    found = [target for name in names if (target := _resolve(name)) is not None]
    first = names[0].rpartition(":")[2]
    if not found:
        return first
    target = found[0]
    if not callable(target) or arguments == 0:
        return None
    try:
        inspect.signature(target).bind(*range(arguments + 1))
    except TypeError as error:
        return f"{first} with {arguments} arguments ({error})"
    except ValueError:  # has no signature to look at
        return None
    return None


def _resolve(name: str) -> Any:
    module, _, path = name.partition(":")
    try:
        owner: Any = importlib.import_module(module)
    except ModuleNotFoundError:
        return None
    for part in path.split("."):
        owner = getattr(owner, part, None)
    return owner


def _fields(name: str) -> set[str]:
    from vllm.v1.core.sched import output

    return set(getattr(getattr(output, name), "__dataclass_fields__", ()))
