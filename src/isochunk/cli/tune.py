"""``isochunk tune``: which flags to serve with, and what each choice is predicted to cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isochunk.cli import workload as given
from isochunk.cli.output import JsonOption, print_json, print_table
from isochunk.core.errors import ConfigError

if TYPE_CHECKING:
    from isochunk.simulator import Deployment
    from isochunk.simulator.tuning import Choice

__all__ = ["tune_command"]

_DYNAMIC = '--additional-config \'{"scheduler_config": {"profiling_chunk_config": {"enabled": true}}}\''


def tune_command(
    profile: given.Profile,
    stages: given.Stages = None,
    tokens: given.Tokens = None,
    std: given.Std = None,
    least: given.Least = 1,
    most: given.Most = None,
    requests: given.Requests = None,
    concurrency: given.Concurrency = None,
    rate: given.Rate = None,
    arrivals: given.Arrivals = None,
    trace_block: given.TraceBlock = 512,
    prefix_hit: given.PrefixHit = 0.0,
    output: given.Output = 1,
    decode: given.Decode = False,
    kv_tokens: Annotated[int | None, typer.Option(help="Tokens that the KV cache holds.")] = None,
    layers: Annotated[int | None, typer.Option(help="Layers of the model, for the layer split.")] = None,
    block: given.Block = 16,
    plot: Annotated[Path | None, typer.Option(help="Draw TTFT over fixed sizes with isochunk's point.")] = None,
    json: JsonOption = False,
) -> None:
    """Recommend vLLM's flags for a workload, from a profile."""
    from isochunk.simulator import Deployment
    from isochunk.simulator.tuning import PUBLISHED_SIZES, best_budget, budgets, sweep

    options = given.WorkloadOptions(
        tokens=tokens,
        std=std,
        least=least,
        most=most,
        requests=requests,
        concurrency=concurrency,
        rate=rate,
        trace=arrivals,
        trace_block=trace_block,
        prefix_hit=prefix_hit,
        output=output,
        decode=decode,
    )
    models, estimate = given.load_costs(profile, stages)
    deployment = Deployment(models=models, block=block, kv_tokens=kv_tokens)

    def workload() -> Any:
        return options.workload(block)

    sizes = budgets(max(request.tokens for request in workload().requests), block)
    fixed = sweep(deployment, workload, "fixed", [*sizes, *PUBLISHED_SIZES])
    best = min(fixed, key=lambda choice: choice.ttft_s)
    starts = [2 * best.value, 3 * best.value, 4 * best.value]
    chosen = best_budget(sweep(deployment, workload, "optimal", sizes))
    answer = {
        "chosen": chosen,
        "fixed": fixed,
        "dynamic": sweep(deployment, workload, "first_chunk", starts),
        "stages": _stages(deployment.but(max_tokens=chosen.value), workload),
        "in_flight": _in_flight(deployment.but(max_tokens=chosen.value), workload),
    }
    if plot is not None:
        _draw(fixed, chosen, plot)
    _report(deployment, answer, _split(deployment, layers, tokens or 32768), json, estimate)


def _stages(deployment: Deployment, workload: Any) -> list[Choice]:
    from isochunk.simulator.tuning import restage, sweep

    tried = sorted({max(deployment.stages // 2, 1), deployment.stages, deployment.stages * 2})
    found = []
    for stages in tried:
        same = stages == deployment.stages
        machine = deployment if same else restage(deployment, stages)
        found += [
            type(choice)("stages", stages, choice.ttft_s)
            for choice in sweep(machine, workload, "optimal", [deployment.max_tokens])
        ]
    return found


def _in_flight(deployment: Deployment, workload: Any) -> list[Choice]:
    from isochunk.simulator.tuning import sweep

    found = []
    for slots in (deployment.stages, deployment.stages + 1):
        machine = deployment.but(in_flight=slots)
        found += [
            type(choice)("in flight", slots, choice.ttft_s)
            for choice in sweep(machine, workload, "optimal", [deployment.max_tokens])
        ]
    return found


def _split(deployment: Deployment, layers: int | None, tokens: int) -> str | None:
    from isochunk.simulator.tuning import layer_split

    if layers is None:
        return None
    return ",".join(str(count) for count in layer_split(deployment.models, layers, tokens))


def _report(
    deployment: Deployment, answer: dict[str, Any], split: str | None, json: bool, estimate: dict[str, Any]
) -> None:
    chosen = answer["chosen"]
    flags = [
        f"--pipeline-parallel-size {deployment.stages}",
        f"--max-num-batched-tokens {chosen.value}",
        "--enable-chunked-prefill",
        *([_DYNAMIC] if deployment.stages > 1 else []),  # isochunk refuses to plan for a single stage
    ]
    environment = {} if split is None else {"VLLM_PP_LAYER_PARTITION": split}
    rows = [*answer["fixed"], *answer["dynamic"], *answer["stages"], *answer["in_flight"], chosen]
    same_machine = [*answer["fixed"], *answer["dynamic"], chosen]
    best = min(choice.ttft_s for choice in same_machine)
    if json:
        print_json(
            {
                "flags": flags,
                "environment": environment,
                "best_ttft_s": best,
                "choices": [choice.as_dict(best) for choice in rows],
                **estimate,
            }
        )
        return
    print_table(
        f"isochunk with a budget of {chosen.value}: predicted mean TTFT {chosen.ttft_s:.4g} s",
        ["choice", "value", "TTFT s", "above best"],
        [[row.name, str(row.value), f"{row.ttft_s:.4g}", f"{row.against(best):+.1%}"] for row in rows],
    )
    for name, value in environment.items():
        typer.echo(f"{name}={value} \\")
    typer.echo("vllm serve MODEL " + " \\\n  ".join(flags))


def _draw(fixed: list[Choice], chosen: Choice, path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a picture needs matplotlib: pip install 'isochunk[plot]'") from error
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([c.value for c in fixed], [c.ttft_s for c in fixed], "o-", label="fixed chunk")
    axes.plot([chosen.value], [chosen.ttft_s], "*", markersize=14, label="isochunk")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("max_num_batched_tokens")
    axes.set_ylabel("mean TTFT, seconds")
    axes.legend()
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't write the picture {path}: {error}") from error
