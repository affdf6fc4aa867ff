"""``isochunk demo``: a real model on a real vLLM, with and without isochunk, on this machine."""

from __future__ import annotations

import json as jsonlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from isochunk.cli.demo_model import ENVIRON, MODEL_NAME, QUESTION, demo_model
from isochunk.cli.demo_plan import POLICIES, STAGES, DemoPlan, choose, fitting, time_left
from isochunk.cli.machine import look
from isochunk.cli.output import JsonOption
from isochunk.cli.progress import say, still
from isochunk.core.cost import CostModel
from isochunk.core.errors import ConfigError

__all__ = ["demo_command"]

_PATIENCE_S = 1800.0  # a cold start on an old machine
_EAGER = ("--enforce-eager",)


def demo_command(
    output: Annotated[
        Path | None, typer.Option(help="Folder for report, results and logs; results/demo or results/demo-pd.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Samples of each policy at each length; by default what fits the time.")
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=1, help="About how long the comparison may take; what fits 6 minutes by default."),
    ] = None,
    pd: Annotated[
        bool, typer.Option("--pd", help="A P node with isochunk, a D node without, and the proxy in front instead.")
    ] = False,
    connector: Annotated[
        str | None, typer.Option(help="With --pd, what carries the KV: nixl (the default) or mooncake.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Start vLLM on two pipeline stages, ask it a question, and compare three ways of cutting long prompts."""
    if connector is not None and not pd:
        raise ConfigError(f"--connector {connector} goes with --pd")
    if pd:
        if rounds is not None or seconds is not None:
            raise ConfigError("--rounds and --seconds are for the comparison, which --pd does not make")
        from isochunk.cli.demo_pd import pd_demo

        if not pd_demo(connector or "nixl", output=output or Path("results/demo-pd"), say=say, json_only=json):
            raise typer.Exit(1)
        return
    output = output or Path("results/demo")
    from isochunk.bench.summary import as_dict
    from isochunk.cli.chat import ask
    from isochunk.cli.compare import measure, print_comparison, write_report
    from isochunk.cli.output import print_json, write_text
    from isochunk.deployment.server import running_server

    model = _model()
    began = time.monotonic()
    say("looking at this machine")
    machine = look()
    say(str(machine))
    chosen = choose(machine, seconds)
    say(_told(chosen))
    with running_server(
        model, _options(chosen), log=output / "server.log", timeout_s=_PATIENCE_S, environ=ENVIRON, progress=say
    ) as url:
        state = _get(url, "/isochunk/status")
        say(_learnt(state))
        say(f"{QUESTION} - {ask(url, MODEL_NAME, QUESTION)}")
        left = seconds or time_left(began, time.monotonic())
        cost = CostModel(**state["model"]) if state["model"] else None
        lengths, most = fitting(chosen.lengths, cost, left)
        say(f"comparing {', '.join(POLICIES)} on prompts of {_listed(lengths)} tokens, {rounds or most} rounds")
        result = measure(url, lengths=lengths, policies=POLICIES, rounds=rounds or most)
    write_text(output / "results.json", jsonlib.dumps(as_dict(result), indent=1) + "\n")
    write_report(output / "report.html", result)
    if json:
        print_json(as_dict(result))
    else:
        print_comparison(result)
    say(f"report: {output / 'report.html'}")


def _model() -> Path:
    say(f"model: {MODEL_NAME}, real weights (converted once, then cached)")
    with still(lambda: "still converting the model"):
        return demo_model()


def _told(chosen: DemoPlan) -> str:
    done = time.strftime("%H:%M", time.localtime(time.time() + chosen.seconds))
    shorter = " (shorter than usual, since this machine is slow)" if chosen.shortened else ""
    return (
        f"plan: {chosen.dtype}, prompts of {_listed(chosen.lengths)} tokens{shorter}; vLLM's start takes about "
        f"{chosen.start_s:.0f} s, the probe at most {chosen.probe_s:.0f} s (none if one is stored), "
        f"the comparison about {chosen.comparison_s:.0f} s: done by {done}"
    )


def _listed(lengths: Sequence[int]) -> str:
    return ", ".join(map(str, lengths))


def _options(chosen: DemoPlan) -> list[str]:
    longest = chosen.lengths[-1]
    section = {"enabled": True, "max_probe_seconds": chosen.probe_s}
    return [
        *("--pipeline-parallel-size", str(STAGES), "--dtype", chosen.dtype),
        *("--max-num-batched-tokens", str(longest)),
        # Some tokens more than the longest prompt; the model's own limit is lifted to make room for them.
        *("--max-model-len", str(longest + 256), "--hf-overrides", '{"max_position_embeddings": 32768}'),
        *("--served-model-name", MODEL_NAME, "--enable-prompt-tokens-details"),
        *("--additional-config", jsonlib.dumps({"scheduler_config": {"profiling_chunk_config": section}})),
        *(() if chosen.compiled else _EAGER),
    ]


def _learnt(state: dict[str, Any]) -> str:
    if state["model"] is None:
        return "isochunk has no cost model; the log tells why"
    terms = ", ".join(f"{name} {value:.3g}" for name, value in state["model"].items())
    probe = state["probe"]
    how = f"probed in {probe['seconds']:.0f} s, {probe['steps']} steps" if probe else "from the stored profile"
    return f"a step on one stage costs (s): {terms} ({how})"


def _get(url: str, path: str) -> dict[str, Any]:
    import httpx

    response = httpx.get(f"{url}{path}", timeout=60, trust_env=False)
    response.raise_for_status()
    return dict(response.json())
