"""Where isochunk's section stands in `additional_config`, and how it gets out of the sight of others who read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isochunk.core.errors import ConfigError

__all__ = ["KEY", "MOVED", "TOP", "find_section", "given_back", "set_apart", "stands_twice"]

NAME = "profiling_chunk_config"
PARENT = "scheduler_config"
KEY = f"additional_config.{PARENT}.{NAME}"
TOP = f"additional_config.{NAME}"  # documented for vLLM-Ascend 0.23 and 0.24, deprecated since
MOVED = "isochunk"


def find_section(additional_config: Any) -> tuple[str, Any]:
    """The key under which the section stands, and the section; the nested key and None when there is none.

    The nested key wins over the one at the top, as vLLM-Ascend has it.

    Raises:
        ConfigError: something on the way to it is no object.
    """
    if additional_config is None:
        return KEY, None
    config = _object(additional_config, "additional_config")
    if MOVED in config:
        return f"additional_config.{MOVED}", config[MOVED]
    parent = config.get(PARENT)
    nested = None if parent is None else _object(parent, f"additional_config.{PARENT}").get(NAME)
    if nested is None and config.get(NAME) is not None:
        return TOP, config[NAME]
    return KEY, nested


def stands_twice(additional_config: Mapping[str, Any]) -> bool:
    """Whether there is one at the top beside the one that counts."""
    where, _ = find_section(additional_config)
    return where != TOP and additional_config.get(NAME) is not None


def set_apart(additional_config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in which only isochunk finds the section.

    vLLM-Ascend reads it under both keys, in the scheduler and again in each worker, which then synchronises the device
    twice a step.
    """
    _, section = find_section(additional_config)
    return {**_without(additional_config), MOVED: section}


def given_back(additional_config: Mapping[str, Any], *, nested: bool) -> dict[str, Any]:
    """A copy in which the section stands where this vLLM-Ascend reads it: nested from 0.25 on, before at the top."""
    _, section = find_section(additional_config)
    config = _without(additional_config)
    if nested:
        config[PARENT] = {**(config.get(PARENT) or {}), NAME: section}
    else:
        config[NAME] = section
    return config


def _without(additional_config: Mapping[str, Any]) -> dict[str, Any]:
    config = {key: value for key, value in additional_config.items() if key not in (NAME, MOVED)}
    if isinstance(config.get(PARENT), Mapping):
        config[PARENT] = {key: value for key, value in config[PARENT].items() if key != NAME}
    return config


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} = {value!r} must be an object, such as {{'{NAME}': {{'enabled': true}}}}")
    return value
