"""The ``isochunk`` command."""

from __future__ import annotations

import sys

import typer

from isochunk.cli import compare, fit, plan
from isochunk.core.errors import IsochunkError

__all__ = ["app", "main"]

app = typer.Typer(
    name="isochunk",
    help="Pipeline-parallel prefill in vLLM, fast with nothing to tune.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("fit")(fit.fit_command)
app.command("plan")(plan.plan_command)
app.command("compare")(compare.compare_command)


def main() -> None:
    """Run the command; isochunk's own errors become one line on stderr and exit code 2."""
    try:
        app()
    except IsochunkError as error:
        print(f"isochunk: {error}", file=sys.stderr)
        sys.exit(2)
