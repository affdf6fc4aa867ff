"""``isochunk serve``: start vLLM with isochunk enabled."""

from __future__ import annotations

import os
import shlex
import sys
from typing import Annotated

import typer

__all__ = ["serve_command"]


def serve_command(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Model folder or name, as for 'vllm serve'.")],
) -> None:
    """Start vLLM with isochunk enabled; every other option goes to vLLM as it is.

    On vLLM's CPU build it also sets what pipeline stages on one machine need.
    """
    from isochunk.deployment.launch import launch

    command, environment = launch(model, context.args, os.environ)
    added = {k: v for k, v in environment.items() if os.environ.get(k) != v}
    shown = [*(f"{k}={shlex.quote(v)}" for k, v in added.items()), "python", *map(shlex.quote, command[1:])]
    print(f"isochunk: {' '.join(shown)}", file=sys.stderr, flush=True)
    os.execve(command[0], command, environment)
