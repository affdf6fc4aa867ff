"""How a name of vLLM's is replaced, and what is said when it is gone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from isochunk.core.errors import ConfigError
from isochunk.vllm.versions import supported

__all__ = ["gone", "need", "patch_once", "vllm_version"]

_MARK = "_isochunk"


def vllm_version() -> str:
    """Version of the installed vLLM."""
    from vllm.version import __version__

    return str(__version__)


def patch_once(
    owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]], *, static: bool = False
) -> None:
    """Replace a method by its wrapped self, unless that was done before: plugins are loaded many times over.

    Raises:
        ConfigError: vLLM has no such name.
    """
    original = need(owner, name)
    if hasattr(original, _MARK):
        return
    patched = functools.wraps(original)(wrap(original))
    setattr(patched, _MARK, True)
    setattr(owner, name, staticmethod(patched) if static else patched)


def need(owner: Any, name: str) -> Any:
    """This attribute of vLLM's.

    Raises:
        ConfigError: it is not there.
    """
    try:
        return getattr(owner, name)
    except AttributeError:
        raise gone([f"{getattr(owner, '__name__', type(owner).__name__)}.{name}"]) from None


def gone(names: list[str]) -> ConfigError:
    """What to say when vLLM lacks these names."""
    return ConfigError(
        f"vLLM {vllm_version()} has no {', '.join(names)}, which isochunk needs (it is made for {supported()}): "
        "upgrade isochunk, or disable it"
    )
