"""vLLM's ``general_plugins`` entry point: runs in every process of vLLM, many times over."""

from __future__ import annotations

from isochunk.vllm import compat
from isochunk.vllm.settings import select_scheduler

__all__ = ["register"]


def register() -> None:
    """Let the one flag choose isochunk's scheduler. Does nothing to servers that don't enable it."""
    compat.after_engine_config(select_scheduler)
