"""``isochunk rehearse``: vLLM's own server on virtual stages."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from isochunk.cli.estimates import say_estimate
from isochunk.cli.rehearsed import rehearsed
from isochunk.cli.rehearsed_nodes import serve_nodes
from isochunk.core.errors import ConfigError
from isochunk.vllm.virtual.rehearsal import Rehearsal, absolute

__all__ = ["PASS_ON", "rehearse_command"]

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def rehearse_command(
    context: typer.Context,
    profile: Annotated[
        str, typer.Option(help="Cost of a step: a profile file, or the name of a published one (help: see docs).")
    ],
    stages: Annotated[
        int | None, typer.Option(min=1, help="Pipeline stages, as vLLM's --pipeline-parallel-size.")
    ] = None,
    speed: Annotated[float, typer.Option(help="How many times as fast as the rehearsed machine the clocks run.")] = 1.0,
    hand_over: Annotated[float, typer.Option(help="Seconds from a stage to the next.")] = 0.0,
    return_time: Annotated[float, typer.Option(help="Seconds from the last stage back to the engine.")] = 0.0,
    kv_tokens: Annotated[
        int | None, typer.Option(help="Tokens that the KV cache holds; by default four prompts of --max-model-len.")
    ] = None,
    answer_tokens: Annotated[int, typer.Option(help="Tokens after which an answer ends by itself.")] = 256,
    nodes: Annotated[int, typer.Option(min=1, help="P nodes; of more than one, the proxy in front.")] = 1,
    decode_nodes: Annotated[int, typer.Option(min=1, help="Mock D nodes behind the proxy, with --nodes.")] = 1,
    trouble: Annotated[
        list[str] | None,
        typer.Option(help="What goes wrong, such as slow,stage=2,factor=3,at=10,seconds=5 (docs/rehearsal.md)."),
    ] = None,
) -> None:
    """Start vLLM's own server with isochunk, its pipeline stages being clocks that take what the profile says.

    MODEL is a folder with a configuration and a tokenizer, and comes first; without it a tiny model is used.
    Every other option goes to vLLM as it is.
    """
    rehearsal = Rehearsal(
        profile=absolute(profile),
        speed=speed,
        hand_over=hand_over,
        back=return_time,
        kv_tokens=kv_tokens,
        answer_tokens=answer_tokens,
        troubles=tuple(trouble or ()),
    )
    say_estimate(rehearsal.known())
    _must_be_there(context.args)
    if nodes > 1:
        serve_nodes(rehearsal, context.args, stages=stages, nodes=nodes, decode_nodes=decode_nodes)
        return
    command, environment = rehearsed(rehearsal, context.args, os.environ, stages=stages)
    print(f"isochunk: python {' '.join(map(shlex.quote, command[1:]))}", file=sys.stderr, flush=True)
    os.execve(command[0], command, environment)


def _must_be_there(arguments: Sequence[str]) -> None:
    """Say it before vLLM is loaded when MODEL is a path to nothing; other names may be ones that it knows."""
    model = next(iter(arguments), "")
    if model.startswith(("/", ".", "~")) and not Path(model).expanduser().is_dir():
        raise ConfigError(
            f"MODEL {model} is no folder; it needs a config.json and a tokenizer. Leave it out for a tiny model"
        )
