"""``isochunk explain``: why a running server would cut a prompt as it does."""

from __future__ import annotations

from typing import Annotated

import typer

from isochunk.cli.compare import ApiKeyOption
from isochunk.cli.output import JsonOption, print_json, print_table
from isochunk.cli.statuses import ask_status
from isochunk.vllm.live.explain import explain, words

__all__ = ["explain_command"]


def explain_command(
    url: Annotated[str, typer.Option(help="Where the server listens, such as http://localhost:8000.")],
    tokens: Annotated[int, typer.Option(help="Tokens of the prompt.")],
    cached: Annotated[int, typer.Option(help="Tokens at its start that are in the prefix cache.")] = 0,
    api_key: ApiKeyOption = None,
    json: JsonOption = False,
) -> None:
    """Say in words and numbers why this plan: work, step cost, stages, queue, and what every other cut would take."""
    told = explain(ask_status(url, api_key), tokens, cached)
    if json:
        print_json({**told.as_dict(), "words": words(told)})
        return
    for sentence in words(told):
        typer.echo(sentence)
    rows = [("isochunk", len(told.chunks), told.ttft_s)]
    rows += [(each.label, each.steps, each.ttft_s) for each in told.alternatives]
    print_table(
        "",
        ["cut", "steps", "first token, s", "times isochunk's"],
        [[label, str(steps), f"{ttft:.4g}", f"{ttft / told.ttft_s:.2f}"] for label, steps, ttft in rows],
    )
