"""The options that `simulate` and `tune` share: whose costs, and what arrives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isochunk.cli.estimates import say_estimate
from isochunk.core.cost import CostModel
from isochunk.core.errors import PlanError, WorkloadError
from isochunk.core.profile import Profile as StoredProfile
from isochunk.core.published import known_profile

if TYPE_CHECKING:
    from isochunk.simulator import Lengths, Request, Workload

__all__ = [
    "Arrivals",
    "Block",
    "Concurrency",
    "Decode",
    "Least",
    "Most",
    "Output",
    "PrefixHit",
    "Profile",
    "Rate",
    "Requests",
    "Stages",
    "Std",
    "Tokens",
    "TraceBlock",
    "WorkloadOptions",
    "load_costs",
]

Profile = Annotated[Path, typer.Option(help="Profile file, bare coefficients c0..c3 in JSON, or a published model.")]
Stages = Annotated[int | None, typer.Option(help="Pipeline stages P; not needed with stage models.")]
Tokens = Annotated[int | None, typer.Option(help="Length of each prompt, or mean with --std.")]
Std = Annotated[float | None, typer.Option(help="Standard deviation: truncated normal lengths.")]
Least = Annotated[int, typer.Option(help="Shortest prompt of random lengths.")]
Most = Annotated[int | None, typer.Option(help="Longest prompt of random lengths; alone: uniform.")]
Requests = Annotated[int | None, typer.Option(help="Number of prompts; 1, or 100 under load.")]
Concurrency = Annotated[int | None, typer.Option(help="Closed loop of this many clients.")]
Rate = Annotated[float | None, typer.Option(help="Poisson arrivals a second.")]
Arrivals = Annotated[Path | None, typer.Option(help="Mooncake trace (JSONL) to replay.")]
TraceBlock = Annotated[int, typer.Option(help="Tokens behind one hash id of the trace.")]
Decode = Annotated[bool, typer.Option("--decode", help="Answer with each trace line's output_length, not one token.")]
Output = Annotated[int, typer.Option("--output-tokens", help="Tokens of each answer; 1 on a prefill node.")]
PrefixHit = Annotated[float, typer.Option(help="Share of each prompt in the KV cache.")]
Block = Annotated[int, typer.Option(help="KV block size.")]


def load_costs(profile: Path, stages: int | None) -> tuple[tuple[CostModel, ...], dict[str, Any]]:
    """One cost model a stage, from a profile with stage models or from one model and ``--stages``.

    Beside them what JSON says of an estimate, see `isochunk.core.profile.Profile.estimate`.
    """
    stored = known_profile(str(profile))
    say_estimate(stored)
    return _stage_models(stored, profile, stages), stored.estimate


def _stage_models(stored: StoredProfile, profile: Path, stages: int | None) -> tuple[CostModel, ...]:
    if stored.stage_models:
        if stages not in (None, len(stored.stage_models)):
            raise PlanError(f"--stages {stages} does not fit the {len(stored.stage_models)} stage models in {profile}")
        return stored.stage_models
    if stages is None:
        raise PlanError(f"--stages is missing: {profile} holds one model, so give the pipeline-parallel size")
    if stages < 1:
        raise PlanError(f"--stages {stages} must be at least 1")
    return (stored.model,) * stages


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """What the command line says about arrivals and lengths; see the options' help for each."""

    tokens: int | None = None
    std: float | None = None
    least: int = 1
    most: int | None = None
    requests: int | None = None
    concurrency: int | None = None
    rate: float | None = None
    trace: Path | None = None
    trace_block: int = 512
    prefix_hit: float = 0.0
    output: int = 1
    decode: bool = False
    max_model_len: int | None = None
    seed: int = 0

    def workload(self, block: int) -> Workload:
        """A fresh workload; prefix hits are in whole KV blocks of ``block`` tokens.

        Raises:
            WorkloadError: names the flag that is wrong or missing.
        """
        from isochunk.simulator import ClosedLoop, OpenLoop, poisson

        kinds = [self.concurrency is not None, self.rate is not None, self.trace is not None]
        if sum(kinds) > 1:
            raise WorkloadError("--concurrency, --rate and --arrivals exclude each other: choose one kind of arrivals")
        if self.decode and self.trace is None:
            raise WorkloadError(
                "--decode needs --arrivals, whose lines have an output_length; else give --output-tokens"
            )
        if self.output < 1:
            raise WorkloadError(f"--output-tokens {self.output} must be at least 1")
        requests = self._requests(block, 100 if any(kinds) else 1)
        if self.concurrency is not None:
            return ClosedLoop(requests, self.concurrency)
        if self.rate is not None:
            return poisson(requests, self.rate, seed=self.seed)
        return OpenLoop(requests)

    def _requests(self, block: int, count: int) -> Sequence[Request]:
        from isochunk.simulator import make_requests, read_trace

        if self.trace is not None:
            if self.output != 1:
                raise WorkloadError(f"--output-tokens {self.output}: with --arrivals, --decode takes the trace's own")
            if self.requests is not None and self.requests < 1:
                raise WorkloadError(f"requests = {self.requests} must be at least 1")
            requests = read_trace(self.trace, block=self.trace_block, max_tokens=self.max_model_len, decode=self.decode)
            return requests if self.requests is None else requests[: self.requests]
        count = count if self.requests is None else self.requests
        requests = make_requests(
            count, self._lengths(), prefix_hit=self.prefix_hit, block=block, seed=self.seed, output=self.output
        )
        longest = max(request.tokens for request in requests)
        if self.max_model_len is not None and longest > self.max_model_len:
            raise WorkloadError(f"a prompt of {longest} tokens is above --max-model-len {self.max_model_len}")
        return requests

    def _lengths(self) -> Lengths:
        from isochunk.simulator import Lengths

        if self.std is not None:
            if not 0 <= self.std < math.inf:
                raise WorkloadError(f"--std {self.std} must be a finite number of tokens, at least 0")
            if self.tokens is None:
                raise WorkloadError("--std needs --tokens, the mean of the lengths")
            most = self.most or self.max_model_len or round(self.tokens + 4 * self.std)
            return Lengths(shape="normal", mean=self.tokens, std=self.std, least=self.least, most=most)
        if self.tokens is not None:
            return Lengths(mean=self.tokens)
        if self.most is None:
            raise WorkloadError("--tokens is missing: give the prompts' length, or --most, or --arrivals")
        return Lengths(shape="uniform", least=self.least, most=self.most)
