"""``isochunk calibrate``: warm and calibrate a running server over HTTP."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import AsyncExitStack
from typing import Annotated, Any

import typer

from isochunk.bench.calibrate import Calibration, as_dict, calibrate
from isochunk.bench.client import Server
from isochunk.bench.solo import Turn
from isochunk.cli.compare import ApiKeyOption
from isochunk.cli.output import JsonOption, print_json, print_table
from isochunk.cli.progress import Progress
from isochunk.core.cost import COEFFICIENTS

__all__ = ["calibrate_command"]


def calibrate_command(
    url: Annotated[str, typer.Option(help="Where to send the prompts, such as http://localhost:8000.")],
    requests: Annotated[int, typer.Option(min=1, help="How many prompts to send.")] = 5,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens of each prompt; by default the most that the server takes.")
    ] = None,
    node: Annotated[
        str | None, typer.Option(help="When --url is a proxy: the P node behind it, which is calibrated.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the prompts; another one each time by default.")] = None,
    api_key: ApiKeyOption = None,
    json: JsonOption = False,
) -> None:
    """Send a server long prompts, one at a time, and show how well it predicts them, before and after."""
    result = asyncio.run(_run(url, node, api_key, tokens, requests, secrets.randbits(32) if seed is None else seed))
    if json:
        print_json(as_dict(result))
    else:
        _print(as_dict(result))
    for warning in result.warnings:
        typer.echo(f"warning: {warning}", err=True)
    if not result.clean or result.ended:
        raise typer.Exit(1)


async def _run(
    url: str, node: str | None, api_key: str | None, tokens: int | None, requests: int, seed: int
) -> Calibration:
    async with AsyncExitStack() as stack:
        front = await stack.enter_async_context(Server(url, api_key=api_key))
        server = await stack.enter_async_context(Server(node, api_key=api_key)) if node else front
        progress = stack.enter_context(Progress("writing the first prompt", requests))
        return await calibrate(
            server,
            tokens=tokens,
            requests=requests,
            seed=seed,
            front=front,
            progress=lambda turn: progress.advance(_text(turn)),
        )


def _text(turn: Turn) -> str:
    return f"{turn.tokens} tokens in {len(turn.record['chunks'])} chunks: {turn.answer.ttft_s:.3g} s"


def _print(result: dict[str, Any]) -> None:
    print_table(
        f"Time to first token, {result['tokens']} tokens on {result['model']}, seed {result['seed']}",
        ["", "chunks", "client, s", "engine, s", "predicted, s", "off"],
        [_request_row(number, request) for number, request in enumerate(result["requests"], 1)],
    )
    print_table(
        "Cost model, seconds",
        ["", *COEFFICIENTS, "source", "median off"],
        [_fit_row(name, result[name]) for name in ("before", "after")],
    )
    moved = ", ".join(f"{name} +{count}" for name, count in result["counters"].items())
    typer.echo(f"Counters that moved: {moved or 'none'}")
    typer.echo(result["verdict"])


def _request_row(number: int, request: dict[str, Any]) -> list[str]:
    predicted, measured = request["predicted_s"], request["engine_s"]
    off = "left out" if request["disturbed"] else "-" if predicted is None else f"{predicted / measured - 1:+.1%}"
    seconds = (request["ttft_s"], measured, predicted)
    return [str(number), str(len(request["record"]["chunks"])), *map(_seconds, seconds), off]


def _fit_row(name: str, fit: dict[str, Any]) -> list[str]:
    coefficients = fit["coefficients"] or {}
    error = fit["median_error"]
    return [
        name,
        *(_seconds(coefficients.get(key)) for key in COEFFICIENTS),
        fit["source"] or "none",
        "-" if error is None else f"{error:.1%}",
    ]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
