"""``isochunk check``: what is wrong with a vLLM command line or a PD deployment."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from isochunk.cli.output import JsonOption, print_json
from isochunk.core.errors import ConfigError
from isochunk.deployment.documents import Started, read_text
from isochunk.deployment.finding import Finding
from isochunk.deployment.node import Deployment
from isochunk.deployment.option_table import TableParser
from isochunk.deployment.reading import Parser, read_deployment
from isochunk.deployment.rules import check
from isochunk.deployment.verify import verify
from isochunk.deployment.vllm_parser import VllmParser
from isochunk.vllm.config import read_config

__all__ = ["TAKE_COMMANDS", "check_command"]

TAKE_COMMANDS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def check_command(
    target: Annotated[
        list[str],
        typer.Argument(
            help="Files of one deployment: YAML (ours, compose, Kubernetes), shell scripts; '-' for stdin; or "
            "the words of a command line: isochunk check vllm serve MODEL ..."
        ),
    ],
    device_gib: Annotated[
        float | None, typer.Option(help="Memory of one device, to check the token budget of a command against.")
    ] = None,
    model_config: Annotated[
        Path | None, typer.Option(help="The model's config.json, when the command does not name its folder.")
    ] = None,
    table: Annotated[
        bool, typer.Option("--table", help="Read options by isochunk's own table: at once, without asking vLLM.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Say what is wrong with a vLLM command line or a whole PD deployment, and how to mend it.

    Where vLLM is installed its own parser reads the options, which takes the seconds of its import.

    Exit code 0: nothing, warnings or notes only. 1: errors. 2: it can't be read.
    """
    started = [_told(each, device_gib, model_config) for each in _read(target)]
    if not started:
        raise ConfigError("there is nothing to check")
    near = Path(target[0]).parent if _is_file(target[0]) else Path()
    with _parser(table) as parser:
        deployment = read_deployment(started, parser, read_config, near=near, say=_say)
        findings = check(deployment)
        if isinstance(parser, VllmParser):
            findings += verify(deployment, parser, findings)
    _show(findings, deployment, as_json=json)
    raise typer.Exit(1 if any(finding.level == "error" for finding in findings) else 0)


def _show(findings: list[Finding], deployment: Deployment, *, as_json: bool) -> None:
    many = {level: sum(f.level == level for f in findings) for level in ("error", "warning", "note")}
    if as_json:
        print_json(
            {
                "errors": many["error"],
                "warnings": many["warning"],
                "vllm": deployment.vllm,
                "nodes": [{"name": node.name, "role": node.role, "model": node.model} for node in deployment.nodes],
                "findings": [finding.as_dict() for finding in findings],
            }
        )
        return
    for finding in findings:
        where = f"{finding.file}:{finding.line}: " if finding.line else ""
        typer.echo(f"{finding.level}: {where}{finding.node}: {finding.what}")
        typer.echo(f"    why: {finding.why}\n    remedy: {finding.remedy}  [{finding.rule}]")
    notes = f", {many['note']} notes" if many["note"] else ""
    typer.echo(f"{many['error']} errors, {many['warning']} warnings{notes}")


@contextmanager
def _parser(table: bool) -> Iterator[Parser]:
    """vLLM's parser where it is installed, else the table."""
    if table or find_spec("vllm") is None:
        yield TableParser()
        return
    _say("asking vLLM's own parser (importing vLLM takes some seconds; --table does without)")
    with VllmParser([sys.executable, "-m", "isochunk.vllm.arguments"]) as parser:
        try:
            parser.wait()
        except ConfigError as error:
            typer.echo(f"isochunk: {error}\nisochunk: reading options by the table instead", err=True)
        else:
            yield parser
            return
    yield TableParser()


def _say(text: str) -> None:
    if sys.stderr.isatty():
        typer.echo(f"isochunk: {text}", err=True)


def _told(started: Started, device_gib: float | None, model_config: Path | None) -> Started:
    """With what the options say of a node that does not say it itself."""
    if device_gib is not None and not 0 < device_gib < float("inf"):
        raise ConfigError(f"--device-gib {device_gib} must be the GiB of one device, above 0")
    command = started.command
    return replace(
        started,
        command=replace(
            command,
            device_gib=command.device_gib or device_gib,
            model_config=command.model_config or (str(model_config) if model_config else None),
        ),
    )


def _read(target: list[str]) -> list[Started]:
    """What files, stdin or the words of a command start; each of several files is a machine of its own."""
    if len(target) > 1 and not all(map(_is_file, target)):
        if _is_file(target[0]) and target[-1].startswith("--"):
            raise ConfigError(f"options stand before the files: isochunk check {target[-1]} {target[0]}")
        return read_text(shlex.join(target), "the command")
    if len(target) == 1 and " " in target[0] and not _is_file(target[0]):
        return read_text(target[0], "the command")
    if target == ["-"]:
        return read_text(sys.stdin.read(), "stdin")
    found: list[Started] = []
    for name in target:
        inside = read_text(_text(Path(name)), name)
        found += [_on_machine(each, name) for each in inside] if len(target) > 1 else inside
    return found


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _on_machine(started: Started, name: str) -> Started:
    return replace(started, command=replace(started.command, host=started.command.host or f"file {name}"))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"can't read {path}: {error}; give a file, or all words of a command") from error
