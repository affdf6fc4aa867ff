"""The plugin: the only folder that imports vLLM.

``--scheduler-cls isochunk.vllm.Scheduler`` (or ``AsyncScheduler``) names the classes below; the one-flag
command selects them by itself.
"""

from __future__ import annotations

from typing import Any

__all__ = ["AsyncScheduler", "Scheduler"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from isochunk.vllm import scheduler

        return getattr(scheduler, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
