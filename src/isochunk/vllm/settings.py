"""What isochunk asks of a vLLM deployment, and what tells one deployment from another."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from typing import Any

from isochunk.core.errors import ConfigError
from isochunk.vllm import compat, over, shared_cores, versions
from isochunk.vllm.config import ChunkConfig, read_config
from isochunk.vllm.sections import KEY, TOP, given_back, set_apart, stands_twice
from isochunk.vllm.virtual.rehearsal import rehearsal_of

__all__ = ["SCHEDULERS", "check_engine", "chunk_config", "claim_section", "profile_key", "select_scheduler"]

logger = logging.getLogger("vllm.isochunk.settings")

SCHEDULERS = {False: "isochunk.vllm.Scheduler", True: "isochunk.vllm.AsyncScheduler"}


def chunk_config(vllm_config: Any) -> ChunkConfig:
    """The plugin's section of a vLLM configuration; naming the scheduler class by hand enables it too.

    Raises:
        ConfigError: as `read_config`.
    """
    config = read_config(vllm_config.additional_config)
    if config.planner != "isochunk":
        return config.model_copy(update={"enabled": False})
    if not config.enabled and _is_ours(vllm_config.scheduler_config.scheduler_cls):
        return config.model_copy(update={"enabled": True})
    return config


def claim_section(additional_config: Any, named: Any = None) -> Any:
    """What vLLM's configuration is made with: isochunk's section stands where only isochunk looks.

    ``"planner": "ascend"`` puts it where vLLM-Ascend looks.

    Args:
        named: the scheduler class that the user named.

    Raises:
        ConfigError: the section is wrong, or asks for a planner that is not there.
    """
    config = read_config(additional_config)
    if not additional_config or not (config.enabled or _is_ours(named)):
        return additional_config
    if config.planner == "isochunk":
        if stands_twice(additional_config):
            logger.warning("isochunk: %s is ignored, since %s is given too", TOP, KEY)
        return set_apart(additional_config)
    if _is_ours(named):
        raise ConfigError(f"planner = 'ascend' and --scheduler-cls {named} exclude each other; drop one of them")
    if (version := compat.ascend_version()) is None:
        raise ConfigError("planner = 'ascend', but vLLM-Ascend is not installed here: leave 'planner' out")
    logger.warning("isochunk: planner = 'ascend': vLLM-Ascend %s cuts the prompts, isochunk does nothing", version)
    return given_back(additional_config, nested=compat.reads_nested_section())


def select_scheduler(vllm_config: Any, named: Any = None) -> None:
    """Choose isochunk's scheduler class when the configuration enables it.

    Args:
        named: the class that the user named. Another that stands in the configuration was chosen by the platform.

    Raises:
        ConfigError: the configuration is wrong, or the deployment is refused.
    """
    if not chunk_config(vllm_config).enabled:
        return
    check_engine(vllm_config)
    compat.check_names()
    scheduler = vllm_config.scheduler_config
    current = scheduler.scheduler_cls
    if current is None:
        scheduler.scheduler_cls = SCHEDULERS[bool(scheduler.async_scheduling)]
    elif not _is_ours(current) and not _is_ours(cls := scheduler.get_scheduler_cls()):
        if current == named:
            raise ConfigError(
                f"--scheduler-cls {current} and {KEY}.enabled exclude each other: "
                "only one class can schedule; drop one of them"
            )
        scheduler.scheduler_cls = over.name_over(cls)
    compat.add_routes()
    if compat.is_traced(vllm_config):
        try:
            compat.add_to_spans()
        except ConfigError as error:  # spans without plans are no reason to refuse a server
            logger.warning("isochunk: the spans of requests will not carry their plans: %s", error)


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
    runner = vllm_config.model_config.runner_type
    if runner != "generate" or getattr(vllm_config.model_config, "is_diffusion", False):
        raise ConfigError(
            f"this model {'denoises' if runner == 'generate' else 'pools'} (--runner {runner}): isochunk plans and "
            f"measures prompts that are followed by tokens; remove {KEY}, or give the model a generating runner"
        )
    if not scheduler.enable_chunked_prefill:
        raise ConfigError("chunked prefill is off: isochunk needs it; remove --no-enable-chunked-prefill")
    if (said := compat.balance_scheduling(vllm_config.additional_config)) is not None:
        raise ConfigError(
            f"{said} and isochunk exclude each other: balance scheduling replaces vLLM's schedule() by a copy that "
            "stops taking prompts in by a count of its own; turn one of the two off"
        )
    for option in ("max_queue_delay", "least_work_first"):
        value = getattr(config, option)
        if value is not None and scheduler.policy == "priority":
            raise ConfigError(
                f"{KEY}.{option} = {value} and --scheduling-policy priority exclude each other: "
                "a prompt would pass one of a better priority; drop one of them"
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
    compilation = vllm_config.compilation_config
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
        "compilation": f"{compilation.mode} {compilation.backend}",
        "graphs": [str(compilation.cudagraph_mode), _largest_graph(compilation)],
        "asynchronous": bool(vllm_config.scheduler_config.async_scheduling),
        "speculation": _speculation(vllm_config.speculative_config),
        "kv_layout": f"{_kv_layout(cache)} {cache.block_size}",
        "threads": [os.environ.get("VLLM_CPU_OMP_THREADS_BIND", ""), len(os.sched_getaffinity(0))],
        "naps": shared_cores.is_named(),
        "vllm": compat.vllm_version(),
        **({"rehearsal": rehearsal.key()} if (rehearsal := rehearsal_of(os.environ)) else {}),
    }


def _largest_graph(compilation: Any) -> int:
    """Most tokens of a step that a captured graph serves; 0 for none."""
    largest = getattr(compilation, "max_cudagraph_capture_size", None)
    sizes = getattr(compilation, "cudagraph_capture_sizes", None) or [0]
    return int(max(sizes) if largest is None else largest)


def _kv_layout(cache: Any) -> str:
    return str(getattr(cache, "kv_cache_layout", None) or os.environ.get("VLLM_KV_CACHE_LAYOUT", ""))


def _speculation(speculative: Any) -> list[str]:
    """Method and length of the drafts that steps check beside prefills; empty without."""
    if speculative is None:
        return []
    return [str(getattr(speculative, name, None)) for name in ("method", "model", "num_speculative_tokens")]


def _device_name(platform: Any) -> str:
    try:
        return str(platform.get_device_name())
    except Exception:  # noqa: BLE001 - platforms differ in what they can tell; the name only keeps profiles apart
        return ""


def _is_ours(named: Any) -> bool:
    """Whether a scheduler class that was named is isochunk's, or one derived from it. Imports none."""
    if named is None or isinstance(named, str):
        return named is not None and named.startswith("isochunk.")
    return any(base.__module__.startswith("isochunk.") for base in named.__mro__)


def _prefill_node(vllm_config: Any) -> bool:
    transfer = vllm_config.kv_transfer_config
    return transfer is not None and transfer.kv_role in ("kv_producer", "kv_both")
