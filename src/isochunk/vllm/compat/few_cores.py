"""vLLM's CPU build with more processes than cores: what spins there naps."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from isochunk.vllm.compat.patching import need, patch_once

__all__ = ["device_index_of_cpu", "keep_cores", "nap_in_nixl", "nap_in_queues", "runs_on_cpu"]


def runs_on_cpu() -> bool:
    """Whether this is vLLM's CPU platform."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def nap_in_queues(seconds: float) -> None:
    """Readers of vLLM's shared-memory queue sleep for ``seconds`` where they would yield and look again.

    Why: they spin for one second after each message; more processes than cores then keep each other waiting.
    Goes when: vLLM lets `SpinCondition` be told not to spin.
    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(self: Any, timeout_ms: int | None = None) -> None:
            if time.monotonic() <= self.last_read + self.busy_loop_s:
                time.sleep(seconds)
            else:
                original(self, timeout_ms)

        return wait

    patch_once(SpinCondition, "wait", wrap)


def nap_in_nixl(seconds: float) -> None:
    """NIXL's progress threads wait up to ``seconds`` for an event where they would look again at once.

    Why: its Python API sets the delay to 0, which takes a core for each agent.
    Goes when: NIXL's `nixl_agent_config` takes a delay.
    """
    from vllm.distributed import nixl_utils

    def with_delay(agent: Callable[..., Any]) -> Callable[..., Any]:
        def create(name: str, config: Any) -> Any:
            config.pthrDelay = round(seconds * 1e6)
            return agent(name, config)

        return create

    def found(wrapper: Any) -> None:
        if wrapper is not None:
            patch_once(need(sys.modules[wrapper.__module__], "nixlBind"), "nixlAgent", with_delay)

    def when_loaded(original: Callable[..., Any]) -> Callable[..., Any]:
        def load(name: str) -> Any:
            attribute = original(name)
            if name == "NixlWrapper":
                found(attribute)
            return attribute

        return load

    found(vars(nixl_utils).get("NixlWrapper"))  # loaded already
    patch_once(nixl_utils, "_load_nixl_attr", when_loaded)


def keep_cores() -> None:
    """NIXL's connector does not move every worker to the last core of its socket.

    Why: on a machine of few cores all stages and nodes would share that one.
    Goes when: the connector keeps to the cores that the worker was bound to.
    """
    from vllm.platforms.cpu import CpuPlatform

    patch_once(CpuPlatform, "discover_numa_topology", lambda original: lambda *_: [])


def device_index_of_cpu() -> None:
    """`torch.accelerator.current_device_index` is 0 without an accelerator, where it raises.

    Why: vLLM's Mooncake connector asks for it on every platform.
    Goes when: it asks only where there is an accelerator.
    """
    import torch

    if not torch.accelerator.is_available():
        patch_once(torch.accelerator, "current_device_index", lambda original: lambda: 0)
