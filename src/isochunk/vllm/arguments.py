"""vLLM's own argument parser as data: the table of its options, and what it makes of a command line.

``python -m isochunk.vllm.arguments --table`` prints the table that `isochunk check` uses where vLLM is not installed.
Without the option it answers questions from stdin, one JSON object a line: importing vLLM takes seconds, once.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

__all__ = ["answer", "option_table", "parse"]


class _RefusedError(Exception):
    """vLLM's parser would have ended the process."""


def _parser(*, suppress: bool) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """``vllm``'s parser and that of its ``serve``; with ``suppress`` a namespace holds only what was given."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    whole = FlexibleArgumentParser(prog="vllm", add_help=False)
    serve = make_arg_parser(whole.add_subparsers(dest="subparser").add_parser("serve", add_help=False))
    for each in (whole, serve):
        each.error = _refuse
    if suppress:
        for action in serve._actions:
            action.default = argparse.SUPPRESS
            if _config_class(action) is not None:
                action.type = _as_given(action.type)
    return whole, serve


def _refuse(message: str) -> None:
    raise _RefusedError(message)


def _inside(function: Any, name: str) -> Any:
    """What a closure of vLLM's holds under that name."""
    if not hasattr(function, "__closure__") or function.__closure__ is None:
        return None
    names = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
    return names[name].cell_contents if name in names else None


def _config_class(action: argparse.Action) -> Any:
    """The dataclass that an option's JSON is checked against; None for any other option."""
    kind: Any = _inside(action.type, "return_type") or action.type
    return kind.__defaults__[0] if getattr(kind, "__name__", "") == "parse_dataclass" else None


def _as_given(check: Any) -> Callable[[str], Any]:
    """Have vLLM check the JSON of an option, and keep the keys that were written, with the values it made of them."""
    from vllm.engine.arg_utils import _expand_json_human_readable_numbers

    def read(text: str) -> Any:
        made = check(text)
        return None if made is None else _written(json.loads(_expand_json_human_readable_numbers(text)), made)

    read.__name__ = "read_json"
    return read


def _written(raw: Any, made: Any) -> Any:
    if isinstance(raw, Mapping) and not isinstance(made, Mapping):
        return {key: _written(value, getattr(made, key, value)) for key, value in raw.items()}
    known = isinstance(made, (str, int, float, bool, Mapping, list, tuple)) and not isinstance(made, enum.Enum)
    return _plain(made if known else raw)


def _plain(value: Any) -> Any:
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(each) for each in value]
    if hasattr(value, "name") and hasattr(value, "path"):
        return {"name": value.name, "path": value.path}  # a LoRA module
    return str(value)


def option_table() -> dict[str, Any]:
    """Every option of ``vllm serve``: its spellings, how its value is read, and its default."""
    from pydantic import TypeAdapter
    from pydantic.json_schema import GenerateJsonSchema
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.version import __version__

    from vllm import envs

    class Schema(GenerateJsonSchema):
        def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> dict[str, Any]:
            return {}  # read by a function of vLLM's: anything

        def enum_schema(self, schema: Any) -> dict[str, Any]:
            made = super().enum_schema(schema)
            return {**made, "names": [member.name for member in schema["members"]]}  # vLLM takes these as well

    _, serve = _parser(suppress=False)
    options, configs = [], {}
    for action in serve._actions:
        cls = _config_class(action)
        if cls is not None:
            configs[cls.__name__] = TypeAdapter(cls).json_schema(schema_generator=Schema)
        options.append(_row(action, cls))
    return {
        "vllm": __version__.split("+")[0],
        "options": options,
        "configs": {name: _lean(schema) for name, schema in configs.items()},
        "connectors": sorted(KVConnectorFactory._registry),
        "environment": sorted(name for name in envs.environment_variables if name.startswith("VLLM_")),
    }


def _row(action: argparse.Action, cls: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"strings": list(action.option_strings), "dest": action.dest}
    kind = _inside(action.type, "return_type")
    row["optional"] = kind is not None and getattr(action.type, "__name__", "") == "_optional_type"
    inner = action.type
    while (deeper := _inside(inner, "return_type")) is not None:
        inner = deeper
    row["type"] = cls.__name__ if cls is not None else getattr(inner, "__name__", None)
    row["action"] = type(action).__name__.strip("_")
    for name in ("nargs", "const"):
        if getattr(action, name) is not None:
            row[name] = getattr(action, name)
    if action.choices is not None:
        row["choices"] = [_plain(choice) for choice in action.choices]
    default = action.default
    if isinstance(default, (str, int, float, bool, list)) and default != argparse.SUPPRESS:
        row["default"] = _plain(default)
    return {key: value for key, value in row.items() if value not in (None, False) or key == "default"}


def _lean(schema: Any) -> Any:
    """A JSON schema without its words and defaults."""
    if isinstance(schema, Mapping):
        return {
            key: _named(value) if key in ("properties", "$defs") else _lean(value)
            for key, value in schema.items()
            if key not in ("title", "description", "default", "examples")
        }
    return [_lean(each) for each in schema] if isinstance(schema, list) else schema


def _named(schemas: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _lean(value) for key, value in schemas.items()}


class _Parsers:
    """Made once: one that says what was given, and one with vLLM's defaults."""

    def __init__(self) -> None:
        self.given, self.given_serve = _parser(suppress=True)
        self.full, _ = _parser(suppress=False)


def parse(parsers: _Parsers, words: Sequence[str]) -> dict[str, Any]:
    """``options`` that the words give and words that are ``unknown``, or the ``error`` of vLLM's parser."""
    try:
        with contextlib.redirect_stderr(sys.stdout):
            made = vars(parsers.given.parse_args(["serve", *words]))
    except _RefusedError as error:
        return {"error": str(error)}
    except SystemExit:
        return {"error": "vLLM's parser ends here"}
    except Exception as error:  # noqa: BLE001 whatever vLLM raises on this command is what it says of it
        return {"error": f"{type(error).__name__}: {error}".strip()}
    return {"options": {key: _plain(value) for key, value in made.items() if key != "subparser"}}


def answer(parsers: _Parsers, question: Mapping[str, Any]) -> dict[str, Any]:
    """What vLLM makes of ``words`` under the environment ``env``; with ``verify``, also what its configuration says."""
    with _environment(question.get("env") or {}):
        if question.get("verify"):
            return {"complaints": _complaints(parsers, question["words"], question.get("config"))}
        return parse(parsers, question["words"])


@contextlib.contextmanager
def _environment(env: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update({key: value for key, value in env.items() if key.startswith("VLLM_")})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _complaints(parsers: _Parsers, words: Sequence[str], config: str | None) -> list[str]:
    """What vLLM's configuration objects refuse, of those that ask no device: modes, scheduler, context, division."""
    from vllm.entrypoints.launchers.cli_args import validate_parsed_serve_args

    try:
        args = parsers.full.parse_args(["serve", *words])
    except (Exception, SystemExit):  # noqa: BLE001 the parser's own words are said elsewhere
        return []
    checks: list[Callable[[], object]] = [lambda: validate_parsed_serve_args(args), lambda: _one_balancer(args)]
    checks.append(lambda: _scheduler(args))
    if config is not None:
        checks.append(lambda: _model(args, config))
    return [said for check in checks if (said := _refusal(check)) is not None]


def _refusal(check: Callable[[], object]) -> str | None:
    try:
        check()
    except (ValueError, AssertionError, NotImplementedError) as error:
        return " ".join(str(error).split())
    except Exception:  # noqa: BLE001 it needs what is not here: a device, a network, a file
        return None
    return None


def _one_balancer(args: argparse.Namespace) -> None:
    modes = (
        args.data_parallel_multi_port_external_lb,
        args.data_parallel_external_lb or args.data_parallel_rank is not None,
        args.data_parallel_hybrid_lb
        or (args.data_parallel_start_rank is not None and not args.data_parallel_multi_port_external_lb),
    )
    if sum(map(bool, modes)) > 1:
        raise ValueError("Cannot use more than one data parallel load balancing mode.")
    if args.headless and args.api_server_count:
        raise ValueError(f"--api-server-count={args.api_server_count} cannot be used with --headless")


def _scheduler(args: argparse.Namespace) -> None:
    from vllm.config import SchedulerConfig

    length = args.max_model_len
    if args.max_num_batched_tokens is None or length is None or length < 1:
        return
    made = SchedulerConfig(
        max_model_len=length,
        is_encoder_decoder=False,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_num_seqs=args.max_num_seqs or 1,
        enable_chunked_prefill=args.enable_chunked_prefill is not False,
        long_prefill_token_threshold=args.long_prefill_token_threshold,
    )
    made.verify_max_model_len(length)


def _model(args: argparse.Namespace, config: str) -> None:
    """Context length as vLLM computes it from the model's ``config.json``."""
    from vllm.config.model import _get_and_verify_max_len
    from vllm.transformers_utils.config import get_config, get_hf_text_config
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

    overrides = args.hf_overrides if isinstance(args.hf_overrides, dict) else {}
    hf_config = get_config(config, trust_remote_code=False, hf_overrides_kw=overrides)
    text = get_hf_text_config(hf_config)
    _get_and_verify_max_len(
        hf_config=text,
        model_arch_config=ModelArchConfigConvertorBase(hf_config, text).convert(),
        tokenizer_config=None,
        max_model_len=args.max_model_len,
        disable_sliding_window=args.disable_sliding_window,
        sliding_window=getattr(text, "sliding_window", None),
    )


def _serve(out: TextIO) -> None:
    """Answer questions, one a line, until stdin ends."""
    from vllm.version import __version__

    parsers = _Parsers()
    print(json.dumps({"vllm": __version__.split("+")[0]}), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(parsers, json.loads(line))), file=out, flush=True)


def _write_table(out: TextIO) -> None:
    """The table with an option a line, so that versions can be compared."""
    made = option_table()
    rows = ",\n".join(json.dumps(row, sort_keys=True) for row in made["options"])
    configs = ",\n".join(
        f"{json.dumps(k)}: {json.dumps(v, sort_keys=True)}" for k, v in sorted(made["configs"].items())
    )
    out.write(f'{{"vllm": {json.dumps(made["vllm"])},\n"connectors": {json.dumps(made["connectors"])},\n')
    out.write(f'"environment": {json.dumps(made["environment"])},\n')
    out.write(f'"options": [\n{rows}\n],\n"configs": {{\n{configs}\n}}}}\n')


if __name__ == "__main__":
    stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # vLLM prints, and stdout is for data
    if sys.argv[1:] == ["--table"]:
        _write_table(stdout)
    else:
        _serve(stdout)
    stdout.flush()
