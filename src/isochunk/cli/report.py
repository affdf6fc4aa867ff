"""``isochunk report``: what a server did with its last prompts, as a page, a picture or a trace."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from isochunk.cli.compare import ApiKeyOption
from isochunk.cli.compare_page import short_chunks
from isochunk.cli.output import need_folder, write_text
from isochunk.cli.statuses import Status, ask_status, read_status
from isochunk.core.cost import CostModel
from isochunk.core.errors import ConfigError
from isochunk.core.planner import Plan, static_plan
from isochunk.report import data
from isochunk.report.figures import save_timelines
from isochunk.report.ink import need_matplotlib
from isochunk.report.page import render
from isochunk.report.trace import trace

__all__ = ["report_command"]

_COLUMNS = ("prompt", "policy", "tokens", "cached", "chunks", "first token, s", "predicted, s", "vLLM's own size, s")


def report_command(
    url: Annotated[str | None, typer.Option(help="Where a server listens, such as http://localhost:8000.")] = None,
    recorded: Annotated[
        Path | None, typer.Option(help="In place of it: a saved status, or what 'isochunk compare --save' wrote.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="HTML page to write.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Picture of the stages to write: .png, .svg or .pdf.")] = None,
    trace_file: Annotated[Path | None, typer.Option("--trace", help="Trace to write, for ui.perfetto.dev.")] = None,
    api_key: ApiKeyOption = None,
) -> None:
    """Write what became of a server's last prompts: a self-contained page, a picture, a trace."""
    files = [path for path in (output, picture, trace_file) if path is not None]
    if not files:
        raise ConfigError("name at least one file to write: -o report.html, --picture stages.png or --trace trace.json")
    for path in files:
        need_folder(path)
    if output or picture:
        need_matplotlib()
    if (url is None) == (recorded is None):
        raise ConfigError("give either --url of a server or --recorded with a file")
    status = read_status(recorded) if recorded is not None else ask_status(str(url), api_key)
    status = {**status, "prompts": [prompt for prompt in status["prompts"] if prompt["chunks"]]}
    if not status["prompts"]:
        raise ConfigError(f"{url or recorded} has no prompt that ended yet: send one and try again")
    where = str(url or recorded)
    if output is not None:
        write_text(output, render(_page(where, status)))
    if picture is not None:
        save_timelines(picture, _timelines(status))
    if trace_file is not None:
        write_text(trace_file, jsonlib.dumps(trace(status)) + "\n")
    for path in files:
        typer.echo(f"wrote {path}")


def _page(where: str, status: Status) -> data.Page:
    prompts = status["prompts"]
    rows = [_row(number, prompt, status) for number, prompt in enumerate(prompts, start=1)]
    return data.Page(
        title=f"isochunk: the last {len(rows)} prompts of {where}",
        headline=_headline(prompts),
        facts=tuple(_facts(status).items()),
        columns=_COLUMNS,
        rows=tuple(rows),
        notes=("vLLM's own size is predicted by the server's cost model, for the same prompt alone.",),
        timelines=_timelines(status),
        points=tuple(_points(prompts)),
    )


def _headline(prompts: list[Mapping[str, Any]]) -> str:
    alone = [p for p in prompts if p["alone"] and p["predicted_ttft_s"] and p["measured_ttft_s"]]
    if not alone:
        return f"{len(prompts)} prompts, none of them alone with a prediction."
    off = sorted(abs(p["predicted_ttft_s"] / p["measured_ttft_s"] - 1) for p in alone)
    return (
        f"{len(prompts)} prompts; of the {len(alone)} that ran alone, the first token came "
        f"{off[len(off) // 2]:.1%} off its prediction at the median."
    )


def _facts(status: Status) -> dict[str, str]:
    shown = ("version", "policy", "chunk", "stages", "max_num_batched_tokens", "alignment", "source", "drift")
    facts = {name: _fact(status.get(name)) for name in shown}
    numbers = {name: value for name, value in (status["model"] or {}).items() if isinstance(value, float)}
    return {
        **facts,
        "cost model": ", ".join(f"{name} {value:.3g}" for name, value in numbers.items()) or "none",
        "counters": ", ".join(f"{name} {count}" for name, count in (status.get("counters") or {}).items()),
    }


def _fact(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _row(number: int, prompt: Mapping[str, Any], status: Status) -> tuple[str, ...]:
    own = _own(prompt, status)
    return (
        (prompt["request_id"] or str(number))[-12:],  # a server tells ids only to whoever names them
        prompt["policy"],
        f"{prompt['tokens']:,}",
        f"{prompt['cached']:,}",
        short_chunks(prompt["chunks"]),
        f"{prompt['measured_ttft_s']:.4g}",
        "-" if prompt["predicted_ttft_s"] is None else f"{prompt['predicted_ttft_s']:.4g}",
        "-" if own is None else f"{own.ttft_s:.4g}",
    )


def _own(prompt: Mapping[str, Any], status: Status) -> Plan | None:
    model = CostModel(**status["model"]) if status["model"] else None
    return static_plan(
        model,
        prompt["tokens"],
        status["stages"],
        cached=prompt["cached"],
        max_chunk=status["max_num_batched_tokens"],
    )


def _timelines(status: Status) -> tuple[data.Timeline, ...]:
    """The longest prompt that ran alone, or else the longest; below what vLLM's own size is predicted to do."""
    chosen = max(status["prompts"], key=lambda prompt: (prompt["alone"], prompt["tokens"] - prompt["cached"]))
    found = [
        data.Timeline(
            label=f"{chosen['tokens']:,} tokens, {chosen['policy']}",
            tokens=chosen["tokens"],
            stages=status["stages"],
            chunks=tuple(chosen["chunks"]),
            entered_s=tuple(chosen["entered_s"]),
            measured_s=tuple(chosen["measured_s"]),
            ours=chosen["policy"] == "optimal",
        )
    ]
    own = _own(chosen, status)
    if own is not None:
        found.append(
            data.Timeline(
                label="the same under vLLM's own size, predicted",
                tokens=chosen["tokens"],
                stages=status["stages"],
                chunks=own.chunks,
                entered_s=(0.0,) * len(own.chunks),
                measured_s=own.step_seconds,
            )
        )
    return tuple(found)


def _points(prompts: list[Mapping[str, Any]]) -> list[data.Points]:
    pairs = [
        (measured, predicted)
        for prompt in prompts
        for measured, predicted in zip(prompt["measured_s"], prompt["predicted_s"], strict=True)
        if measured and predicted
    ]
    if not pairs:
        return []
    measured, predicted = zip(*pairs, strict=True)
    return [data.Points(label="steps", kind="ours", measured_s=measured, predicted_s=predicted)]
