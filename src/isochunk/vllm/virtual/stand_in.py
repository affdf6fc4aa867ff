"""Virtual stages in place of vLLM's workers, in every process of a rehearsed server. Imports vLLM only when called."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from isochunk.core.errors import ConfigError
from isochunk.vllm import compat
from isochunk.vllm.virtual.rehearsal import Rehearsal

__all__ = ["ALWAYS_REFUSED", "check", "needs_a_worker", "stand_in", "too_many_stages"]

logger = logging.getLogger("vllm.isochunk.virtual")

_CONNECTOR = "VirtualConnector"


def stand_in() -> None:
    """Let the engine take the virtual executor, and keep this machine's platform out of the configuration."""

    def executor() -> Any:
        from isochunk.vllm.virtual.executor import VirtualExecutor

        return VirtualExecutor

    compat.use_executor(executor)
    compat.without_platform()


def check(vllm_config: Any, rehearsal: Rehearsal) -> None:
    """Refuse what virtual stages can't rehearse, and let KV be handed over without any being there.

    Raises:
        ConfigError: names the option and the remedy.
        ProfileError: the profile can't be read.
    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    for option, given in _NEEDS_A_WORKER.items():
        if given(vllm_config):
            raise needs_a_worker(option)
    stages = parallel.pipeline_parallel_size
    layers = model.get_total_num_hidden_layers()
    if stages > layers:
        raise too_many_stages(stages, layers, model.model)
    if rehearsal.kv_tokens is not None and rehearsal.kv_tokens < model.max_model_len:
        raise ConfigError(
            f"--kv-tokens {rehearsal.kv_tokens} is less than one prompt of --max-model-len {model.max_model_len}: "
            "raise the first, or lower the second"
        )
    rehearsal.stages(stages).close()
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_connector not in (None, _CONNECTOR):
        logger.warning("isochunk: %s moves KV of real workers; in this rehearsal it is free", transfer.kv_connector)
        transfer.kv_connector = _CONNECTOR
        transfer.kv_connector_module_path = "isochunk.vllm.virtual.connector"


def needs_a_worker(option: str) -> ConfigError:
    """Why this option of vLLM's can't be rehearsed."""
    return ConfigError(f"{option} needs real workers, and the stages of a rehearsal are clocks: leave it out")


def too_many_stages(stages: int, layers: int, model: str) -> ConfigError:
    """Why so many stages can't be."""
    return ConfigError(
        f"--stages {stages} (--pipeline-parallel-size) is more than the {layers} layers of {model}: "
        "lower it, or name a model with more layers"
    )


_NEEDS_A_WORKER: dict[str, Callable[[Any], bool]] = {
    "--enable-lora": lambda config: config.lora_config is not None,
    "--speculative-config": lambda config: config.speculative_config is not None,
    "--profiler-config": lambda config: config.profiler_config.profiler is not None,
    "--enable-sleep-mode": lambda config: config.model_config.enable_sleep_mode,
    "--enable-return-routed-experts": lambda config: bool(
        getattr(config.model_config, "enable_return_routed_experts", False)
    ),
    "--weight-transfer-config": lambda config: config.weight_transfer_config is not None,
    "--ec-transfer-config": lambda config: config.ec_transfer_config is not None,
    "--runner pooling": lambda config: config.model_config.runner_type != "generate",
    "--data-parallel-size": lambda config: config.parallel_config.data_parallel_size > 1,
    "--nnodes": lambda config: config.parallel_config.nnodes > 1,
}
# Those whose very presence says it; the others depend on their value.
ALWAYS_REFUSED = frozenset(_NEEDS_A_WORKER) - {"--runner pooling", "--data-parallel-size", "--nnodes"}
