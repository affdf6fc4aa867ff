"""isochunk over the scheduler that a platform has chosen, as vLLM-Ascend's that order the queue.

Each class has a name that vLLM can find in its engine's process: that of the class below, with colons for dots.
"""

from __future__ import annotations

import functools
from typing import Any

from isochunk.core.errors import ConfigError
from isochunk.vllm import compat

__all__ = ["name_over"]


def name_over(scheduler_cls: type) -> str:
    """The name of isochunk's class over this one, for `scheduler_config.scheduler_cls`.

    Raises:
        ConfigError: it has a `schedule` of its own, which isochunk can't narrow.
    """
    name = f"{scheduler_cls.__module__}.{scheduler_cls.__qualname__}"
    if (culprit := compat.class_that_replaces_schedule(scheduler_cls)) is not None:
        through = "" if culprit == name else f" (by {culprit})"
        raise ConfigError(
            f"the platform chose the scheduler {name}, which replaces vLLM's schedule(){through}, so isochunk can't "
            "plan chunks in it: turn off the option that chooses it, or isochunk"
        )
    return f"{__name__}.{name.replace('.', ':')}"


@functools.cache
def _class_over(name: str) -> type:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from isochunk.vllm.scheduler import NarrowedScheduler

    base = resolve_obj_by_qualname(name.replace(":", "."))
    return type(base.__name__, (NarrowedScheduler, base), {"__module__": __name__, "__doc__": base.__doc__})


def __getattr__(name: str) -> Any:
    if ":" in name:
        return _class_over(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
