"""What isochunk asks of a vLLM deployment, and what tells one deployment from another."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from typing import Any

from isochunk.core.errors import ConfigError
from isochunk.vllm import compat, shared_cores, versions
from isochunk.vllm.config import KEY, ChunkConfig, read_config
from isochunk.vllm.virtual.rehearsal import rehearsal_of

__all__ = ["SCHEDULERS", "check_engine", "chunk_config", "profile_key", "select_scheduler"]

logger = logging.getLogger("vllm.isochunk.settings")

SCHEDULERS = {False: "isochunk.vllm.Scheduler", True: "isochunk.vllm.AsyncScheduler"}


def chunk_config(vllm_config: Any) -> ChunkConfig:
    """The plugin's section of a vLLM configuration; naming the scheduler class by hand enables it too.

    Raises:
        ConfigError: as `read_config`.
    """
    config = read_config(vllm_config.additional_config)
    if not config.enabled and _names_ours(vllm_config.scheduler_config):
        return config.model_copy(update={"enabled": True})
    return config


def select_scheduler(vllm_config: Any) -> None:
    """Choose isochunk's scheduler class when the configuration enables it.

    Raises:
        ConfigError: the configuration is wrong, or the deployment is refused.
    """
    if not chunk_config(vllm_config).enabled:
        return
    scheduler = vllm_config.scheduler_config
    if scheduler.scheduler_cls is None:
        scheduler.scheduler_cls = SCHEDULERS[bool(scheduler.async_scheduling)]
    elif not _names_ours(scheduler, look=True):
        raise ConfigError(
            f"--scheduler-cls {scheduler.scheduler_cls} and {KEY}.enabled exclude each other: "
            "only one class can schedule; drop one of them"
        )
    check_engine(vllm_config)


def check_engine(vllm_config: Any) -> None:
    """Refuse deployments in which chunk planning can't work; warn about doubtful ones.

    Raises:
        ConfigError: names the option, its value and the remedy.
    """
    config = chunk_config(vllm_config)
    scheduler = vllm_config.scheduler_config
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages < 2:
        raise ConfigError(
            f"--pipeline-parallel-size {stages}: isochunk plans chunks for at least 2 pipeline stages; "
            f"raise it, or remove {KEY}"
        )
    if not scheduler.enable_chunked_prefill:
        raise ConfigError("chunked prefill is off: isochunk needs it; remove --no-enable-chunked-prefill")
    if _balance_scheduling(vllm_config.additional_config):
        raise ConfigError(
            "scheduler_config.enable_balance_scheduling replaces the scheduler that isochunk narrows; turn it off"
        )
    if config.max_queue_delay is not None and scheduler.policy == "priority":
        raise ConfigError(
            f"{KEY}.max_queue_delay = {config.max_queue_delay} and --scheduling-policy priority exclude each other: "
            "a late prompt would pass one of a better priority; drop one of them"
        )
    limit = scheduler.max_num_batched_tokens
    if config.min_chunk is not None and config.min_chunk >= limit:
        raise ConfigError(f"{KEY}.min_chunk = {config.min_chunk} must be below max_num_batched_tokens = {limit}")
    if scheduler.async_scheduling and _prefill_node(vllm_config):
        logger.warning(
            "isochunk: asynchronous scheduling is on at a prefill node, where it gains nothing; "
            "consider --no-async-scheduling"
        )
    if (why := versions.unknown(compat.vllm_version())) is not None:
        logger.warning("isochunk: %s", why)


def profile_key(vllm_config: Any) -> dict[str, Any]:
    """What a step's cost depends on; profiles of other deployments don't match."""
    from vllm.platforms import current_platform

    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    shape = json.dumps(model.hf_config.to_dict(), sort_keys=True, default=str)
    return {
        "model": str(model.model),
        "model_config": hashlib.sha256(shape.encode()).hexdigest()[:16],
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "tensor_parallel": parallel.tensor_parallel_size,
        "pipeline_parallel": parallel.pipeline_parallel_size,
        "data_parallel": parallel.data_parallel_size,
        "expert_parallel": parallel.enable_expert_parallel,
        "context_parallel": [parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size],
        "layer_split": os.environ.get("VLLM_PP_LAYER_PARTITION", ""),
        "device": f"{current_platform.device_name} {_device_name(current_platform)}",
        "attention": str(getattr(vllm_config.attention_config, "backend", None)),
        "kv_dtype": str(cache.cache_dtype),
        "compilation": f"{vllm_config.compilation_config.mode} {vllm_config.compilation_config.backend}",
        "threads": [os.environ.get("VLLM_CPU_OMP_THREADS_BIND", ""), len(os.sched_getaffinity(0))],
        "naps": shared_cores.is_named(),
        "vllm": compat.vllm_version(),
        **({"rehearsal": rehearsal.key()} if (rehearsal := rehearsal_of(os.environ)) else {}),
    }


def _device_name(platform: Any) -> str:
    try:
        return str(platform.get_device_name())
    except Exception:  # noqa: BLE001 - platforms differ in what they can tell; the name only keeps profiles apart
        return ""


def _names_ours(scheduler_config: Any, *, look: bool = False) -> bool:
    """Whether the scheduler class that was named is isochunk's, or one derived from it.

    ``look`` imports a class that is named by its path; servers that don't enable isochunk import it by themselves.
    """
    named = scheduler_config.scheduler_cls
    if isinstance(named, str):
        if named.startswith("isochunk."):
            return True
        named = scheduler_config.get_scheduler_cls() if look else None
    return named is not None and any(base.__module__.startswith("isochunk.") for base in named.__mro__)


def _balance_scheduling(additional_config: Any) -> bool:
    if not isinstance(additional_config, dict):
        return False
    section = additional_config.get("scheduler_config")
    places = [additional_config, section if isinstance(section, dict) else {}]
    return any(bool(place.get("enable_balance_scheduling")) for place in places)


def _prefill_node(vllm_config: Any) -> bool:
    transfer = vllm_config.kv_transfer_config
    return transfer is not None and transfer.kv_role in ("kv_producer", "kv_both")
