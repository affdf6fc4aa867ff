"""``isochunk check``: what is wrong with a vLLM command line or a PD deployment."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from isochunk.cli.command_line import parse_server
from isochunk.cli.deployment import Deployment
from isochunk.cli.deployment_file import load_deployment
from isochunk.cli.output import JsonOption, print_json
from isochunk.cli.rules import check
from isochunk.core.errors import ConfigError

__all__ = ["TAKE_COMMANDS", "check_command"]

TAKE_COMMANDS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def check_command(
    target: Annotated[
        list[str],
        typer.Argument(
            help="A YAML file of the deployment, a shell script with one command, '-' for a script on stdin, or the "
            "words of a command line: isochunk check vllm serve MODEL ..."
        ),
    ],
    device_gib: Annotated[
        float | None, typer.Option(help="Memory of one device, to check the token budget of a command against.")
    ] = None,
    model_config: Annotated[
        Path | None, typer.Option(help="The model's config.json, when the command does not name its folder.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Say what is wrong with a vLLM command line or a whole PD deployment, and how to mend it.

    Exit code 0: nothing, or warnings only. 1: errors. 2: it can't be read.
    """
    findings = check(_read(target, device_gib, model_config))
    errors = sum(f.level == "error" for f in findings)
    if json:
        print_json({"errors": errors, "findings": [f.as_dict() for f in findings]})
    else:
        for finding in findings:
            typer.echo(f"{finding.level}: {finding.where}: {finding.what}\n    remedy: {finding.remedy}")
        typer.echo(f"{errors} errors, {len(findings) - errors} warnings")
    raise typer.Exit(1 if errors else 0)


def _read(target: list[str], device_gib: float | None, model_config: Path | None) -> Deployment:
    if len(target) > 1:
        return _one(shlex.join(target), "the command", device_gib, model_config)
    path = Path(target[0])
    if path.suffix in (".yaml", ".yml"):
        if device_gib or model_config:
            raise ConfigError("--device-gib and --model-config go with one command; the YAML says them for each node")
        return load_deployment(path)
    if target[0] == "-":
        return _one(sys.stdin.read(), "stdin", device_gib, model_config)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read {path}: {error}; give a file, or all words of a command") from error
    return _one(text, path.name, device_gib, model_config)


def _one(command: str, name: str, device_gib: float | None, model_config: Path | None) -> Deployment:
    return Deployment(servers=(parse_server(command, name=name, device_gib=device_gib, model_config=model_config),))
