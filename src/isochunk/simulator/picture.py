"""A recorded run as a picture or as a trace file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from isochunk.core.errors import ConfigError
from isochunk.simulator.result import Result
from isochunk.simulator.scheduler import Step

__all__ = ["draw_timeline", "write_trace"]

_SHOWN = 400  # more steps than this are not told apart in one picture


def draw_timeline(result: Result, path: Path) -> None:
    """Draw the first steps of the first instance: a row a stage, a colour a prompt, white where a stage waits.

    The suffix of ``path`` chooses the format (png, svg, pdf).

    Raises:
        ConfigError: matplotlib is missing or the file can't be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a picture needs matplotlib: pip install 'isochunk[plot]'") from error
    steps = result.recorded[0][:_SHOWN]
    figure = Figure(figsize=(12, 1 + 0.45 * len(steps[0].stages)), layout="constrained")
    axes = figure.subplots()
    colours: dict[str, int] = {}
    for step in steps:
        key = step.parts[0][0].request.key
        colour = f"C{colours.setdefault(key, len(colours)) % 10}"
        for stage, (start, end) in enumerate(step.stages):
            axes.barh(stage, end - start, left=start, height=0.8, color=colour, edgecolor="white", linewidth=0.4)
    axes.set_yticks(range(len(steps[0].stages)), [f"stage {n}" for n in range(len(steps[0].stages))])
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title(f"{len(steps)} steps, idle {result.bubbles[0]:.1%}")
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't write the picture {path}: {error}") from error


def write_trace(result: Result, path: Path) -> None:
    """Write the recorded steps in the Trace Event format, which Perfetto and chrome://tracing open.

    Raises:
        ConfigError: the file can't be written.
    """
    events: list[dict[str, Any]] = []
    for process, steps in enumerate(result.recorded):
        events.append(_name("process_name", process, 0, f"instance {process}"))
        stages = len(steps[0].stages) if steps else 0
        events += [_name("thread_name", process, stage, f"stage {stage}") for stage in range(stages)]
        for index, step in enumerate(steps):
            events += _spans(process, index, step)
    try:
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"can't write the trace {path}: {error}") from error


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _spans(process: int, index: int, step: Step) -> list[dict[str, Any]]:
    parts = [{"request": p.request.key, "chunk": chunk, "history": history} for p, chunk, history in step.parts]
    return [
        {
            "ph": "X",
            "name": f"step {index}",
            "pid": process,
            "tid": stage,
            "ts": start * 1e6,  # the format's unit is the microsecond
            "dur": (end - start) * 1e6,
            "args": {"parts": parts},
        }
        for stage, (start, end) in enumerate(step.stages)
    ]
