"""What vLLM does at start-up: its configuration, its engine's loop, methods of its engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from isochunk.vllm.compat.patching import need, patch_once

__all__ = ["add_engine_methods", "around_engine_config", "before_busy_loop"]


def around_engine_config(before: Callable[[Any, Any], Any], after: Callable[[Any, Any], None]) -> None:
    """Around every engine configuration that vLLM makes, with the scheduler class that the user named.

    What ``before(additional_config, named)`` returns takes the place of `additional_config`;
    ``after(vllm_config, named)`` sees the result.

    Why: vLLM has no hook that lets a plugin see `additional_config` and choose the scheduler class from it, and
    platforms choose theirs while the configuration is made.
    Goes when: vLLM offers such a hook, or accepts the scheduler class from `additional_config`.
    """
    from vllm.engine.arg_utils import EngineArgs

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
            named = self.scheduler_cls
            self.additional_config = before(self.additional_config, named)
            config = original(self, *args, **kwargs)
            after(config, named)
            return config

        return create_engine_config

    patch_once(EngineArgs, "create_engine_config", wrap)


def before_busy_loop(start: Callable[[Any], None]) -> None:
    """Call ``start(engine_core)`` in the engine's process before it serves its first request.

    Why: the probe needs the whole engine (scheduler, executor, batch queue) and must end before the server
    reports ready; vLLM's front end asks the engine for its tasks before that, and waits for the loop.
    Data-parallel engines, whose ranks step in lockstep, have a loop of their own and are left alone.
    Goes when: vLLM has an engine start-up hook for plugins.
    """
    from vllm.v1.engine.core import EngineCoreProc

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def run_busy_loop(self: Any) -> Any:
            start(self)
            return original(self)

        return run_busy_loop

    patch_once(EngineCoreProc, "run_busy_loop", wrap)


def add_engine_methods(methods: dict[str, Callable[..., Any]]) -> None:
    """Give the engine core methods that the API process can call by name (its utility calls).

    Why: vLLM lets an endpoint plugin reach workers (`collective_rpc`) but not the scheduler.
    Goes when: vLLM has utility calls for scheduler plugins.
    """
    from vllm.v1.engine.core import EngineCore

    need(EngineCore, "step_with_batch_queue")
    for name, method in methods.items():
        setattr(EngineCore, name, method)
