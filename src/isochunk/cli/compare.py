"""``isochunk compare``: the interleaved A/B of policies and fixed sizes on one running server."""

from __future__ import annotations

import asyncio
import json as jsonlib
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from isochunk.bench.arms import policy_arms, powers_of_two, sweep_arms
from isochunk.bench.client import Server
from isochunk.bench.compare import compare, different_arms
from isochunk.bench.results import Comparison, Sample
from isochunk.bench.summary import as_dict, summarise, verdict
from isochunk.cli.compare_page import cells, columns, page
from isochunk.cli.output import JsonOption, need_folder, print_json, write_text
from isochunk.cli.progress import Progress
from isochunk.core.errors import ConfigError
from isochunk.report.ink import need_matplotlib

__all__ = ["compare_command", "measure", "print_comparison", "write_report"]

ApiKeyOption = Annotated[
    str | None, typer.Option("--api-key", envvar="VLLM_API_KEY", help="The server's API key, when it has one.")
]


def compare_command(
    url: Annotated[str, typer.Option(help="Where the server listens, such as http://localhost:8000.")],
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens.")] = "1024,4096,8192",
    policies: Annotated[str, typer.Option(help="Policies to compare.")] = "fixed,first_chunk,optimal",
    sweep: Annotated[
        str, typer.Option(help="Fixed sizes to compare too, such as 256,512,1024; 'auto' doubles from 128.")
    ] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each policy at each length.")] = 5,
    seed: Annotated[int | None, typer.Option(help="Of prompts and order; another one each time by default.")] = None,
    api_key: ApiKeyOption = None,
    report: Annotated[Path | None, typer.Option(help="HTML page to write.")] = None,
    save: Annotated[Path | None, typer.Option(help="JSON file to write, with every sample.")] = None,
    json: JsonOption = False,
) -> None:
    """Compare policies and fixed chunk sizes on one running server, interleaved, and say which is sooner."""
    for path in (report, save):
        if path is not None:
            need_folder(path)  # a long measurement must not end in a folder that does not exist
    if report is not None:
        need_matplotlib()
    result = measure(
        url,
        lengths=_numbers("--lengths", lengths),
        policies=[name.strip() for name in policies.split(",") if name.strip()],
        sweep=None if sweep == "auto" else _numbers("--sweep", sweep),
        rounds=rounds,
        seed=seed,
        api_key=api_key,
    )
    if save is not None:
        write_text(save, jsonlib.dumps(as_dict(result), indent=1) + "\n")
    if report is not None:
        write_report(report, result)
    if json:
        print_json(as_dict(result))
    else:
        print_comparison(result)
        for path in (save, report):
            if path is not None:
                typer.echo(f"wrote {path}")
    if result.ended:
        raise typer.Exit(1)


def measure(
    url: str,
    *,
    lengths: Sequence[int],
    policies: Sequence[str],
    sweep: Sequence[int] | None = (),
    rounds: int,
    seed: int | None = None,
    api_key: str | None = None,
) -> Comparison:
    """Run the comparison with a progress bar on stderr.

    Args:
        sweep: fixed sizes to compare too; None for powers of two up to the server's largest.
        seed: None for one that no run had before, so that no prompt is in the server's prefix cache.
    """

    async def run() -> Comparison:
        async with Server(url, api_key=api_key) as server:
            largest = int((await server.status())["max_num_batched_tokens"])
            sizes = powers_of_two(largest) if sweep is None else sweep
            arms = list(dict.fromkeys([*policy_arms(policies, largest), *sweep_arms(sizes, largest)]))
            unique = list(dict.fromkeys(lengths))
            total = rounds * sum(len(different_arms(arms, tokens)) for tokens in unique)
            with Progress("warming up", total) as progress:
                return await compare(
                    server,
                    arms=arms,
                    lengths=unique,
                    rounds=rounds,
                    seed=secrets.randbits(32) if seed is None else seed,
                    progress=lambda sample: progress.advance(_text(sample)),
                )

    return asyncio.run(run())


def print_comparison(result: Comparison) -> None:
    """The table, what was left out, and the verdict."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for index, column in enumerate(columns(result)):
        table.add_column(column, justify="left" if index == 1 else "right", no_wrap=True)
    before = None
    for row in summarise(result):
        if before not in (None, row.tokens):
            table.add_section()
        before = row.tokens
        table.add_row(*cells(row), style="bold" if row.arm.policy == "optimal" else None)
    console = Console()
    console.print(f"TTFT on {result.model}, {result.rounds} rounds in random order", highlight=False)
    console.print(table)
    for warning in result.warnings:
        typer.echo(f"warning: {warning}", err=True)
    typer.echo(verdict(result))


def write_report(path: Path, result: Comparison) -> None:
    """Write the HTML page."""
    from isochunk.report.page import render

    write_text(path, render(page(result)))


def _text(sample: Sample) -> str:
    return f"{sample.tokens} tokens, {sample.arm.label}: {sample.ttft_s:.3g} s"


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"{option} {text!r} must be whole numbers with commas between, such as 1024,4096") from None
