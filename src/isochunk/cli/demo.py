"""``isochunk demo``: a real model on a real vLLM, with and without isochunk, on this machine."""

from __future__ import annotations

import json as jsonlib
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from isochunk.cli.demo_model import ENVIRON, MODEL_NAME, QUESTION, demo_model
from isochunk.cli.output import JsonOption
from isochunk.core.cost import CostModel
from isochunk.core.errors import ConfigError
from isochunk.core.planner import Policy, plan

__all__ = ["demo_command"]

_STAGES = 2
_LENGTHS = (1024, 4096, 8192)
_POLICIES: tuple[Policy, ...] = ("fixed", "first_chunk", "optimal")
_MAX_TOKENS = 8192
_OPTIONS = (
    *("--pipeline-parallel-size", str(_STAGES)),
    *("--max-num-batched-tokens", str(_MAX_TOKENS)),
    # One token more than the longest prompt; the model's own limit is lifted to make room for it.
    *("--max-model-len", "8448", "--hf-overrides", '{"max_position_embeddings": 32768}'),
    *("--served-model-name", MODEL_NAME, "--enable-prompt-tokens-details"),
)
_FEWEST, _MOST = 3, 8
_SECONDS = 150.0


def demo_command(
    output: Annotated[
        Path | None, typer.Option(help="Folder for report, results and logs; results/demo or results/demo-pd.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Samples of each policy at each length; by default what fits the time.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=1, help="About how long the comparison may take; 150 by default.")
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

        if not pd_demo(connector or "nixl", output=output or Path("results/demo-pd"), say=_say, json_only=json):
            raise typer.Exit(1)
        return
    output = output or Path("results/demo")
    from isochunk.bench.summary import as_dict
    from isochunk.cli.chat import ask
    from isochunk.cli.compare import measure, print_comparison, write_report
    from isochunk.cli.output import print_json, write_text
    from isochunk.deployment.server import running_server

    _say(f"model: {MODEL_NAME}, real weights (converted once, then cached)")
    model = demo_model()
    with running_server(model, _OPTIONS, log=output / "server.log", environ=ENVIRON, progress=_say) as url:
        state = _get(url, "/isochunk/status")
        _say(_learnt(state))
        _say(f"{QUESTION} - {ask(url, MODEL_NAME, QUESTION)}")
        result = measure(
            url, lengths=_LENGTHS, policies=_POLICIES, rounds=rounds or _rounds(state, seconds or _SECONDS)
        )
    write_text(output / "results.json", jsonlib.dumps(as_dict(result), indent=1) + "\n")
    write_report(output / "report.html", result)
    if json:
        print_json(as_dict(result))
    else:
        print_comparison(result)
    _say(f"report: {output / 'report.html'}")


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


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


def _rounds(state: dict[str, Any], seconds: float) -> int:
    """As many rounds as are predicted to fit, the warm-up counted as one."""
    if state["model"] is None:
        return _FEWEST
    model = CostModel(**state["model"])
    one = sum(
        plan(model, tokens, _STAGES, max_chunk=_MAX_TOKENS, policy=policy).ttft_s
        for tokens in _LENGTHS
        for policy in _POLICIES
    )
    return min(max(int(seconds / one) - 1, _FEWEST), _MOST)
