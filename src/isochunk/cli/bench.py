"""``isochunk bench``: a load on a running server, with or without isochunk."""

from __future__ import annotations

import asyncio
import json as jsonlib
import secrets
from pathlib import Path
from typing import Annotated, Any

import typer

from isochunk.bench.client import Server
from isochunk.bench.lengths import parse_lengths
from isochunk.bench.load import Load, Outcome, prepare, send
from isochunk.bench.load_summary import line, summarise, warnings
from isochunk.cli.compare import ApiKeyOption
from isochunk.cli.output import JsonOption, need_folder, print_json, print_table, write_text
from isochunk.cli.progress import Progress
from isochunk.core.errors import ServerError

__all__ = ["bench_command"]


def bench_command(
    url: Annotated[str, typer.Option(help="Where the server listens, such as http://localhost:8000.")],
    requests: Annotated[int, typer.Option(help="How many requests to send.")] = 20,
    input_tokens: Annotated[
        str,
        typer.Option("--input", help="Prompt tokens: N, uniform:LOW:HIGH or normal:MEAN:DEVIATION:LOW:HIGH."),
    ] = "4096",
    output: Annotated[int, typer.Option(help="Tokens of each answer.")] = 1,
    concurrency: Annotated[int | None, typer.Option(help="Requests under way at a time; 1 by default.")] = None,
    rate: Annotated[float | None, typer.Option(help="Requests a second in place of it, Poisson arrivals.")] = None,
    shared: Annotated[float, typer.Option(help="Part of each prompt, from its start, that all share.")] = 0.0,
    cards: Annotated[int, typer.Option(min=1, help="Devices of the server, for the figures a card.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Of prompts and arrivals; another one each time by default.")] = None,
    api_key: ApiKeyOption = None,
    save: Annotated[Path | None, typer.Option(help="JSON lines to write, one a request.")] = None,
    json: JsonOption = False,
) -> None:
    """Send a load and report time to first token, time between tokens, and throughput."""
    if save is not None:
        need_folder(save)
    load = Load(
        requests=requests,
        lengths=parse_lengths(input_tokens),
        output_tokens=output,
        concurrency=1 if concurrency is None and rate is None else concurrency,
        rate=rate,
        shared=shared,
        seed=secrets.randbits(32) if seed is None else seed,
    )
    outcomes, notes = asyncio.run(_run(url, api_key, load))
    if save is not None:
        lines = [jsonlib.dumps(line(index, outcome)) for index, outcome in enumerate(outcomes)]
        write_text(save, "\n".join(lines) + "\n")
    found = [*notes, *warnings(outcomes)]
    summary = summarise(outcomes, cards) | {"seed": load.seed, "warnings": found}
    if not summary["requests"]:
        raise ServerError(found[-1])
    if json:
        print_json(summary)
    else:
        _print(summary)
    for warning in found:
        typer.echo(f"warning: {warning}", err=True)
    if summary["failed"] or len(outcomes) < load.requests:
        raise typer.Exit(1)


async def _run(url: str, api_key: str | None, load: Load) -> tuple[list[Outcome], list[str]]:
    async with Server(url, api_key=api_key) as server:
        with Progress("writing prompts", load.requests) as progress:
            requests = await prepare(server, load, progress.advance)
        with Progress("sending", load.requests) as progress:
            outcomes = await send(server, requests, load.concurrency, lambda outcome: progress.advance())
        return outcomes, server.notes


def _print(summary: dict[str, Any]) -> None:
    names = {"ttft_s": "first token, s", "gap_s": "between tokens, s", "total_s": "whole answer, s"}
    spreads = {text: summary[name] for name, text in names.items() if summary[name]}
    columns = list(next(iter(spreads.values())))
    print_table(
        f"{summary['requests']} requests in {summary['seconds']:.3g} s, seed {summary['seed']}",
        ["", *columns],
        [[text, *(f"{spread[column]:.3g}" for column in columns)] for text, spread in spreads.items()],
    )
    card = f" ({summary['input_tokens_per_s_per_card']:.4g} a card)" if summary["cards"] > 1 else ""
    typer.echo(
        f"{summary['requests_per_s']:.3g} requests/s, {summary['input_tokens_per_s']:.4g} input tokens/s{card}, "
        f"{summary['output_tokens_per_s']:.3g} output tokens/s, {summary['cached_tokens']} tokens from the prefix cache"
    )
