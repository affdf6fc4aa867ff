"""``isochunk plan``: the chunks of one prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isochunk.cli.estimates import say_estimate
from isochunk.cli.output import JsonOption, print_json, print_table
from isochunk.core.errors import PlanError
from isochunk.core.planner import POLICIES, Policy, plan
from isochunk.core.published import known_profile

__all__ = ["plan_command"]


def plan_command(
    profile: Annotated[Path, typer.Option(help="Profile file, bare coefficients in JSON, or a published model.")],
    tokens: Annotated[int, typer.Option(help="Length of the prompt, its cached part included.")],
    stages: Annotated[
        int | None, typer.Option(help="Pipeline stages P; may be left out when the profile has stage models.")
    ] = None,
    cached: Annotated[int, typer.Option(help="Tokens of a prefix hit.")] = 0,
    max_chunk: Annotated[int | None, typer.Option(help="Most tokens of a step (max_num_batched_tokens).")] = None,
    block: Annotated[int, typer.Option(help="KV block size.")] = 1,
    policy: Annotated[str, typer.Option(help=f"One of {', '.join(POLICIES)}.")] = "optimal",
    json: JsonOption = False,
) -> None:
    """Cut one prompt into chunks and predict its time to first token."""
    stored = known_profile(str(profile))
    say_estimate(stored)
    chosen = plan(
        stored.model if stages is not None and not stored.stage_models else stored.models,
        tokens,
        stages,
        cached=cached,
        max_chunk=max_chunk,
        block=block,
        policy=_policy(policy),
    )
    if json:
        print_json({**chosen.as_dict(), **stored.estimate})
        return
    rows = []
    at = cached
    for index, (size, seconds) in enumerate(zip(chosen.chunks, chosen.step_seconds, strict=True)):
        rows.append([str(index + 1), str(at), str(size), f"{seconds:.4g}"])
        at += size
    print_table(
        f"{chosen.policy}: {len(chosen.chunks)} chunks, target {chosen.target_s:.4g} s, "
        f"predicted TTFT {chosen.ttft_s:.4g} s",
        ["step", "history", "chunk", "seconds"],
        rows,
    )


def _policy(name: str) -> Policy:
    for policy in POLICIES:
        if name == policy:
            return policy
    raise PlanError(f"--policy {name!r} must be one of {', '.join(POLICIES)}")
