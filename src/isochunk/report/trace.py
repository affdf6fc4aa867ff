"""The last prompts of a server as a trace that Perfetto and Chrome open: stages, steps, chunks and requests.

The form is Chrome's trace events (JSON object with ``traceEvents``; times in microseconds), which Perfetto reads:
https://perfetto.dev/docs/faq#how-do-i-open-a-json-trace
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from isochunk.core.flowshop import busy_intervals

__all__ = ["trace"]

_STAGES, _REQUESTS = 1, 2
_US = 1e6

Event = dict[str, Any]


def trace(status: Mapping[str, Any]) -> dict[str, Any]:
    """Plain data for a JSON file.

    A process "pipeline" has a track for each stage and a slice for each step on it, which names the chunks in it. A
    process "requests" has a track for each prompt: its whole prefill, and a slice for each of its chunks.

    Args:
        status: what ``GET /isochunk/status`` answers.
    """
    prompts = [
        {**prompt, "request_id": prompt["request_id"] or f"prompt {number}"}  # ids are told to whoever names them
        for number, prompt in enumerate(status["prompts"], start=1)
        if prompt["chunks"]
    ]
    origin = min((prompt["entered_s"][0] for prompt in prompts), default=0.0)
    events = [_name("process_name", _STAGES, 0, "pipeline"), _name("process_name", _REQUESTS, 0, "requests")]
    events += [_name("thread_name", _STAGES, stage, f"stage {stage + 1}") for stage in range(status["stages"])]
    events += _steps(prompts, status["stages"], origin)
    for track, prompt in enumerate(prompts):
        events += _request(track, prompt, origin)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"isochunk": status["version"]}}


def _steps(prompts: Sequence[Mapping[str, Any]], stages: int, origin: float) -> list[Event]:
    """Chunks that entered at one moment are one step, however many prompts they are of."""
    steps: dict[float, tuple[float, float | None, list[str]]] = {}
    for prompt in prompts:
        rows = zip(
            prompt["entered_s"],
            prompt["measured_s"],
            prompt["predicted_s"],
            prompt["chunks"],
            prompt["histories"],
            strict=True,
        )
        for entered, measured, predicted, chunk, history in rows:
            parts = steps.setdefault(entered, (measured, predicted, []))[2]
            parts.append(f"{chunk} after {history} of {prompt['request_id']}")
    moments = sorted(steps)
    busy = busy_intervals(moments, [steps[moment][0] for moment in moments], stages)
    first = moments[0] - origin if moments else 0.0
    return [
        _slice(
            f"step {number + 1}",
            _STAGES,
            stage,
            first + start,
            end - start,
            {"chunks": steps[moment][2], "predicted_s": steps[moment][1], "measured_s": steps[moment][0]},
        )
        for stage, intervals in enumerate(busy)
        for number, (moment, (start, end)) in enumerate(zip(moments, intervals, strict=True))
    ]


def _request(track: int, prompt: Mapping[str, Any], origin: float) -> list[Event]:
    entered, exited = prompt["entered_s"], prompt["exited_s"]
    names = ("request_id", "tokens", "cached", "policy", "alone", "predicted_ttft_s", "measured_ttft_s")
    told = {name: prompt[name] for name in names}
    whole = _slice(
        f"prefill of {prompt['tokens']} tokens", _REQUESTS, track, entered[0] - origin, exited[-1] - entered[0], told
    )
    chunks = [
        # Several chunks are in the pipeline at once, and slices of one track may not overlap: each is shown from its
        # predecessor's exit to its own.
        _slice(f"chunk of {chunk}", _REQUESTS, track, begin - origin, end - begin, {"history": history})
        for chunk, history, begin, end in zip(
            prompt["chunks"], prompt["histories"], [entered[0], *exited[:-1]], exited, strict=True
        )
    ]
    return [_name("thread_name", _REQUESTS, track, prompt["request_id"]), whole, *chunks]


def _slice(name: str, process: int, track: int, start: float, seconds: float, told: Mapping[str, Any]) -> Event:
    return {
        "name": name,
        "ph": "X",
        "pid": process,
        "tid": track,
        "ts": start * _US,
        "dur": max(seconds, 0.0) * _US,
        "args": dict(told),
    }


def _name(kind: str, process: int, track: int, name: str) -> Event:
    return {"name": kind, "ph": "M", "pid": process, "tid": track, "args": {"name": name}}
