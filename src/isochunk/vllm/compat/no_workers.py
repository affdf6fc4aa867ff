"""An engine whose workers are not there: the executor in their place, and no say for this machine's platform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from isochunk.vllm.compat.few_cores import runs_on_cpu
from isochunk.vllm.compat.patching import need, patch_once

__all__ = ["use_executor", "without_platform"]


def use_executor(executor: Callable[[], Any]) -> None:
    """Every engine gets the executor class that ``executor()`` returns, whatever backend it names.

    Why: ``--distributed-executor-backend`` takes no class of others together with pipeline stages.
    Goes when: it does.
    """
    from vllm.v1.executor.abstract import Executor

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *_: executor()

    patch_once(Executor, "get_class", wrap, static=True)


def without_platform() -> None:
    """On a machine without accelerator, configurations are what an accelerator's would be in their place.

    Why: the CPU platform switches asynchronous scheduling off, takes large KV blocks and binds workers to cores,
    none of which is so where virtual stages stand for accelerators. The model runner that takes P + 1 steps is chosen
    only where Triton is there for it, which the virtual stages don't need.
    Goes when: vLLM has a platform for engines without a device.
    """
    import vllm.config.vllm as configuration
    from vllm.platforms import current_platform

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def check_and_update_config(vllm_config: Any) -> None:
            cache = vllm_config.cache_config
            if not cache.user_specified_block_size:
                cache.block_size = cache.DEFAULT_BLOCK_SIZE
            vllm_config.compilation_config.cudagraph_capture_sizes = []

        return check_and_update_config

    if runs_on_cpu():
        need(configuration, "HAS_TRITON")
        configuration.HAS_TRITON = True
        patch_once(type(current_platform), "check_and_update_config", wrap, static=True)
