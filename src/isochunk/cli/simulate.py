"""``isochunk simulate``: a workload on a deployment that need not exist yet."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isochunk.cli import workload as given
from isochunk.cli.output import JsonOption, print_json, print_table

if TYPE_CHECKING:
    from isochunk.simulator import Result

__all__ = ["simulate_command"]


def simulate_command(
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
    max_model_len: Annotated[int | None, typer.Option(help="Refuse longer prompts.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of lengths and arrivals.")] = 0,
    policy: Annotated[list[str] | None, typer.Option(help="Policies to compare; repeatable.")] = None,
    chunk: Annotated[int | None, typer.Option(help="Fixed size, or first chunk of the published rules.")] = None,
    max_queue_delay: Annotated[
        float | None, typer.Option(help="Seconds a prompt waits before it may go between a longer one's steps.")
    ] = None,
    least_work_first: Annotated[
        float | None, typer.Option(help="Serve the least work first; seconds after which nobody passes a prompt.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Token budget of a step (max_num_batched_tokens).")] = 32768,
    block: given.Block = 16,
    in_flight: Annotated[int | None, typer.Option(help="Steps in flight K; P when left out.")] = None,
    send: Annotated[float, typer.Option(help="Seconds from a stage to the next.")] = 0.0,
    return_: Annotated[float, typer.Option("--return", help="Seconds from the last stage to the scheduler.")] = 0.0,
    intake: Annotated[float, typer.Option(help="Seconds of a request in the API server.")] = 0.0,
    intake_token: Annotated[float, typer.Option(help="Seconds of each of its tokens there.")] = 0.0,
    instances: Annotated[int, typer.Option(help="Equal instances behind a router.")] = 1,
    router: Annotated[str, typer.Option(help="least_work or round_robin.")] = "least_work",
    cards: Annotated[int | None, typer.Option(help="Accelerators of an instance; one a stage when left out.")] = None,
    kv_tokens: Annotated[int | None, typer.Option(help="Tokens that the KV cache of an instance holds.")] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Requests that run at once in an instance.")] = 1024,
    load_rate: Annotated[
        float | None, typer.Option(help="Tokens a second at which a KV connector loads --prefix-hit.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a timeline picture of the first policy.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace file that Perfetto opens.")] = None,
    json: JsonOption = False,
) -> None:
    """Simulate prefill: time to first token, throughput and idle stages, for one or several policies."""
    from isochunk.simulator import Deployment, simulate

    models, estimate = given.load_costs(profile, stages)
    deployment = Deployment(
        models=models,
        max_tokens=max_tokens,
        block=block,
        in_flight=in_flight,
        send_s=send,
        return_s=return_,
        intake_s=intake,
        intake_token_s=intake_token,
        instances=instances,
        router=router,
        cards=cards,
        max_seqs=max_num_seqs,
        kv_tokens=kv_tokens,
        load_rate=load_rate,
    )
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
        max_model_len=max_model_len,
        seed=seed,
    )
    record = plot is not None or trace is not None
    results = {}
    for name in policy or ["optimal", "fixed"]:
        results[name] = simulate(
            deployment,
            options.workload(block),
            name,
            chunk=chunk,
            max_queue_delay=max_queue_delay,
            least_work_first=least_work_first,
            record=record,
        )
    _pictures(next(iter(results.values())), plot, trace)
    if json:
        print_json({name: {**result.as_dict(), **estimate} for name, result in results.items()})
        return
    _table(results)


def _pictures(result: Result, plot: Path | None, trace: Path | None) -> None:
    from isochunk.simulator.picture import draw_timeline, write_trace

    if plot is not None:
        draw_timeline(result, plot)
    if trace is not None:
        write_trace(result, trace)


def _table(results: dict[str, Result]) -> None:
    numbers = {name: result.as_dict() for name, result in results.items()}
    first = next(iter(numbers.values()))
    print_table(
        f"{first['requests']} prompts, {first['tokens']} tokens, {first['computed_tokens']} computed",
        ["policy", "TTFT mean s", "median", "p90", "p99", "tokens/s/card", "idle by stage", "steps"],
        [[name, *_row(row)] for name, row in numbers.items()],
    )
    for name, row in numbers.items():
        if said := _said(row):
            typer.echo(f"{name}: {said}")


def _said(numbers: dict[str, Any]) -> str:
    """What there is to say only of some workloads."""
    said = []
    if numbers["hit_tokens"]:
        said.append(f"{numbers['hit_tokens']} tokens were in the cache")
    if numbers["tpot_mean_s"] is not None:
        said.append(f"{numbers['tpot_mean_s'] * 1000:.4g} ms a token behind the first")
    if numbers["preemptions"]:
        said.append(f"{numbers['preemptions']} preemptions")
    return ", ".join(said)


def _row(numbers: dict[str, Any]) -> list[str]:
    times = [f"{numbers[f'ttft_{name}_s']:.4g}" for name in ("mean", "median", "p90", "p99")]
    idle = [f"{share:.1%}" for share in numbers["bubbles"]]
    if len(set(idle)) == 1:
        idle = idle[:1]
    return [*times, f"{numbers['tokens_per_s_per_card']:.0f}", " ".join(idle), str(numbers["steps"])]
