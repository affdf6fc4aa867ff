"""vLLM's options from a table (`options.json`), for machines without vLLM: the same reading as its own parser's.

The table is written by ``python -m isochunk.vllm.arguments --table`` from an installed vLLM.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import Annotated, Any, Literal, NoReturn, Union

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, create_model

from isochunk.deployment.spelling import human_int, spelled_out

__all__ = ["Parsed", "RefusedError", "TableParser", "defaults", "table"]

Parsed = dict[str, Any]


class RefusedError(Exception):
    """vLLM refuses these words; says why in the words of its parser."""


@functools.cache
def table() -> dict[str, Any]:
    """The table: ``vllm`` (its version), ``options`` and ``configs`` (JSON schemas)."""
    return dict(json.loads(files("isochunk.deployment").joinpath("options.json").read_text(encoding="utf-8")))


@functools.cache
def defaults() -> dict[str, Any]:
    """vLLM's defaults by name, of options that have one."""
    return {row["dest"]: row["default"] for row in table()["options"] if "default" in row}


class TableParser:
    """Reads the arguments of ``vllm serve`` by the table."""

    def __init__(self) -> None:
        self.vllm = str(table()["vllm"])
        self._parser = _Parser(add_help=False, prog="vllm serve")
        for row in table()["options"]:
            _add(self._parser, row)

    def parse(self, words: Sequence[str], env: Mapping[str, str]) -> Parsed:
        """What the words give, by vLLM's names.

        Raises:
            RefusedError: vLLM would refuse them.
        """
        flags = [string for row in table()["options"] for string in row["strings"]]
        return vars(self._parser.parse_args(spelled_out(words, flags)))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RefusedError(message)


def _add(parser: argparse.ArgumentParser, row: Mapping[str, Any]) -> None:
    how: dict[str, Any] = {"default": argparse.SUPPRESS}
    if row["strings"]:
        how["dest"] = row["dest"]
    action = row["action"]
    if action == "BooleanOptionalAction":
        strings = [string for string in row["strings"] if not string.startswith("--no-")]
        parser.add_argument(*strings, action=argparse.BooleanOptionalAction, **how)
        return
    if action == "StoreTrueAction":
        parser.add_argument(*row["strings"], action="store_true", **how)
        return
    how.update({key: row[key] for key in ("nargs", "const", "choices") if key in row})
    if action == "AppendAction":
        how["action"] = "append"
    how["type"] = _lora if action == "LoRAParserAction" else _type(row)
    parser.add_argument(*(row["strings"] or [row["dest"]]), **how)


def _lora(text: str) -> dict[str, Any]:
    if "=" in text and "," not in text:
        name, _, path = text.partition("=")
        return {"name": name, "path": path}
    made = _json(text)
    if not isinstance(made, dict) or not {"name", "path"} <= set(made):
        raise argparse.ArgumentTypeError(f"Invalid fields for --lora-modules: {text}")
    return {"name": made["name"], "path": made["path"]}


def _type(row: Mapping[str, Any]) -> Callable[[str], Any]:
    kinds: dict[str, Callable[[str], Any]] = {
        "int": int,
        "float": float,
        "str": str,
        "loads": _json,
        "union_dict_and_str": _json_or_text,
        "human_readable_int": human_int,
        "human_readable_int_or_auto": _int_or_auto,
        "<lambda>": _folded if "choices" in row else _numbers,
    }
    name = row.get("type") or "str"
    kind = kinds[name] if name in kinds else functools.partial(_config, name)
    if not row.get("optional"):
        return _named(kind, name)
    return _named(lambda text: None if text in ("", "None") else kind(text), name)


def _named(kind: Callable[[str], Any], name: str) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        return kind(text)

    read.__name__ = name
    return read


def _folded(text: str) -> str:
    return text.lower().replace("-", "_")


def _numbers(text: str) -> list[int | str]:
    return [int(part) if part.strip().isdigit() else part.strip() for part in text.split(",")]


def _int_or_auto(text: str) -> int:
    return -1 if text.strip() == "-1" or text.strip().lower() == "auto" else human_int(text)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"Value {text} cannot be converted: {error}") from None


def _json_or_text(text: str) -> Any:
    return _json(text) if re.match(r"(?s)^\s*{.*}\s*$", text) else text


def _config(name: str, text: str) -> Any:
    """JSON checked against one of vLLM's configuration classes; the keys that were written."""
    expanded = "".join(
        part if index % 2 else re.sub(r"\b\d+(?:\.\d+)?[kKmMgGtT]\b", lambda found: str(human_int(found[0])), part)
        for index, part in enumerate(re.split(r'("(?:[^"\\]|\\.)*")', text))
    )
    try:
        made = _model(name).model_validate_json(expanded)
    except (ValidationError, RecursionError) as error:
        raise argparse.ArgumentTypeError(_in_words(error)) from None
    written = made.model_dump(exclude_unset=True)
    if name == "KVTransferConfig" and written.get("kv_connector") and not written.get("kv_role"):
        raise argparse.ArgumentTypeError("Please specify kv_role when kv_connector is set")
    return written


def _in_words(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}".lstrip(": ") for each in error.errors())


@functools.cache
def _model(name: str) -> type[BaseModel]:
    schema = table()["configs"][name]
    made = _from_schema(schema, schema.get("$defs", {}), name)
    assert isinstance(made, type)
    assert issubclass(made, BaseModel)
    return made


def _choice(schema: Mapping[str, Any]) -> Any:
    """One of some texts, or a member of an Enum."""
    values = tuple(schema.get("enum", [schema.get("const")]))
    if "names" not in schema and all(isinstance(each, str) for each in values):
        return Literal[values]
    return Annotated[Any, AfterValidator(functools.partial(_member, values, tuple(schema.get("names", ()))))]


def _member(values: Sequence[Any], names: Sequence[str], value: Any) -> Any:
    """A member of an Enum, by its value or its name."""
    if value in values or not names or (isinstance(value, str) and value.upper() in names):
        return value
    raise ValueError(f"Input should be one of {', '.join(names)}")


def _from_schema(schema: Mapping[str, Any], defs: Mapping[str, Any], name: str, depth: int = 0) -> Any:
    """A type that takes what a JSON schema of pydantic's takes, with pydantic's own leniency."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[-1]
        return _from_schema(defs.get(name, {}), defs, name, depth + 1) if depth < 8 else Any
    if "anyOf" in schema:
        return Union[tuple(_from_schema(each, defs, name, depth + 1) for each in schema["anyOf"])]  # noqa: UP007
    if "enum" in schema or "const" in schema:
        return _choice(schema)
    kind = schema.get("type")
    if kind == "object" and "properties" in schema:
        fields: dict[str, Any] = {
            key: (_from_schema(each, defs, key, depth + 1), ... if key in schema.get("required", []) else None)
            for key, each in schema["properties"].items()
        }
        extra: Any = "forbid" if schema.get("additionalProperties") is False else "allow"
        return create_model(name, __config__=ConfigDict(extra=extra, protected_namespaces=()), **fields)
    if kind == "array":
        return list[_from_schema(schema.get("items", {}), defs, name, depth + 1)]  # type: ignore[misc]
    simple = {
        "null": type(None),
        "integer": int,
        "number": float,
        "string": str,
        "boolean": bool,
        "object": dict[str, Any],
    }
    return simple.get(str(kind), Any)
