"""``isochunk profile``: the costs of machines that are not here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isochunk.cli.estimates import say_estimate
from isochunk.cli.output import JsonOption, need_folder, print_json, print_table
from isochunk.core.profile import save_profile

__all__ = ["profile_command"]


def profile_command(
    system: Annotated[str, typer.Option(help="Accelerator, such as h200_sxm, b200_sxm, h100_sxm, a100_sxm, l40s.")],
    model: Annotated[str, typer.Option(help="Hugging Face name of a usual model, or a folder with a configuration.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Profile file to write.")],
    stages: Annotated[int, typer.Option(help="Pipeline stages.")] = 2,
    tensor_parallel: Annotated[int, typer.Option(help="Accelerators a stage.")] = 1,
    expert_parallel: Annotated[bool, typer.Option(help="Experts whole on one accelerator each.")] = False,
    backend: Annotated[str, typer.Option(help="Whose kernels: vllm, sglang or trtllm.")] = "vllm",
    step_seconds: Annotated[
        float, typer.Option(help="Seconds of a step beside its kernels: scheduler, launch, hand-over.")
    ] = 0.004,
    longest: Annotated[int, typer.Option(help="Tokens of the longest prompt.")] = 131_072,
    json: JsonOption = False,
) -> None:
    """Estimate what a prefill step costs on an accelerator, from kernel times that others measured there.

    plan, tune, simulate and rehearse take the file as any other profile.
    """
    from isochunk.simulator.silicon import Silicon, estimate

    need_folder(output)
    profile = estimate(
        Silicon(
            system=system,
            model=model,
            backend=backend,
            tensor_parallel=tensor_parallel,
            expert_parallel=expert_parallel,
            stages=stages,
            step_s=step_seconds,
            longest=longest,
        )
    )
    save_profile(output, profile)
    say_estimate(profile)
    cost = profile.model
    if json:
        print_json({"profile": str(output), "model": cost.as_dict(), **profile.estimate})
        return
    sizes = (128, 512, 2048, 8192)
    print_table(
        f"Estimated seconds of a step on one of {stages} stages, {model} on {system} x {tensor_parallel}",
        ["tokens", "no history", f"after {longest - sizes[-1]} tokens", "decodes after 4096 tokens"],
        [
            [
                str(size),
                f"{cost.seconds(size, 0):.4g}",
                f"{cost.seconds(size, longest - sizes[-1]):.4g}",
                f"{profile.decode.step([1] * size, [4096] * size):.4g}" if profile.decode and size <= 256 else "",
            ]
            for size in (1, 16, *sizes)
        ],
    )
    typer.echo(f"{profile.fit['residual_median']:.1%} off the estimated times at the median; wrote {output}")
