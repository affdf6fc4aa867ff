"""What is wrong with a dashboard by Grafana's own schema, as its foundation SDK has it."""

import enum
import json
import types
import typing
from collections.abc import Iterator
from typing import Any

from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

_MODELS = "grafana_foundation_sdk.models"


def faults(told: dict[str, Any]) -> list[str]:
    """Fields that the schema doesn't know, and values that it doesn't allow; each with its place."""
    plugins.register_default_plugins()
    dashboard = Dashboard.from_json(told)
    kept = json.loads(JSONEncoder().encode(dashboard))
    return [*_unknown(told, kept, "dashboard"), *_wrong(dashboard, "dashboard")]


def _unknown(told: Any, kept: Any, place: str) -> Iterator[str]:
    """What the SDK did not take up from the file."""
    if isinstance(told, dict) and isinstance(kept, dict):
        for name, value in told.items():
            if name in kept:
                yield from _unknown(value, kept[name], f"{place}.{name}")
            else:
                yield f"{place}.{name} is unknown"
    elif isinstance(told, list) and isinstance(kept, list) and len(told) == len(kept):
        for index, (one, other) in enumerate(zip(told, kept, strict=True)):
            yield from _unknown(one, other, f"{place}[{index}]")
    elif told != kept:
        yield f"{place} is read as {kept!r}"


def _wrong(found: Any, place: str) -> Iterator[str]:
    """Values that are not of their field's type."""
    if isinstance(found, list):
        for index, value in enumerate(found):
            yield from _wrong(value, f"{place}[{index}]")
    elif isinstance(found, dict):
        for name, value in found.items():
            yield from _wrong(value, f"{place}.{name}")
    elif type(found).__module__.startswith(_MODELS) and not isinstance(found, enum.Enum):
        for name, hint in typing.get_type_hints(type(found)).items():
            value = getattr(found, name)
            if value is not None and not _fits(value, hint):
                yield f"{place}.{name} = {value!r} is no {hint}"
            yield from _wrong(value, f"{place}.{name}")


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, each) for each in inner)
    if origin is typing.Literal:
        return value in inner
    if origin is list:
        return isinstance(value, list) and all(_fits(each, inner[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(each, inner[1]) for each in value.values())
    return not isinstance(hint, type) or _is_a(value, hint)  # what is no type is Any


def _is_a(value: Any, kind: type) -> bool:
    if issubclass(kind, enum.Enum):
        return value in list(kind)
    return isinstance(value, (int, float) if kind is float else kind) and (kind is bool or not isinstance(value, bool))
