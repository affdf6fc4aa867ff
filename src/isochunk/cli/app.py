"""The ``isochunk`` command."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from isochunk import __version__
from isochunk.cli import (
    bench,
    calibrate,
    check,
    compare,
    demo,
    doctor,
    explain,
    fit,
    plan,
    profile,
    proxy,
    rehearse,
    report,
    serve,
    simulate,
    tune,
)
from isochunk.core.errors import IsochunkError
from isochunk.vllm.versions import supported

__all__ = ["app", "main"]

app = typer.Typer(
    name="isochunk",
    help="Pipeline-parallel prefill in vLLM, fast with nothing to tune.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("fit")(fit.fit_command)
app.command("plan")(plan.plan_command)
app.command("profile")(profile.profile_command)
app.command("check", context_settings=check.TAKE_COMMANDS)(check.check_command)
app.command("proxy", add_help_option=False, context_settings=proxy.PASS_ALL)(proxy.proxy_command)
app.command("serve", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve.serve_command)
app.command("rehearse", context_settings=rehearse.PASS_ON)(rehearse.rehearse_command)
app.command("demo")(demo.demo_command)
app.command("doctor", context_settings=doctor.TAKE_COMMANDS)(doctor.doctor_command)
app.command("explain")(explain.explain_command)
app.command("report")(report.report_command)
app.command("compare")(compare.compare_command)
app.command("bench")(bench.bench_command)
app.command("calibrate")(calibrate.calibrate_command)
app.command("simulate")(simulate.simulate_command)
app.command("tune")(tune.tune_command)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"isochunk {__version__}, for {supported()}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", is_eager=True, callback=_version)
    ] = False,
) -> None:
    """Pipeline-parallel prefill in vLLM, fast with nothing to tune."""


def main() -> None:
    """Run the command; isochunk's own errors become one line on stderr and exit code 2."""
    try:
        app()
    except IsochunkError as error:
        print(f"isochunk: {error}", file=sys.stderr)
        sys.exit(2)
