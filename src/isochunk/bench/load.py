"""A load of many requests on a running server: so many at a time, or at random moments."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from random import Random

from isochunk.bench.client import Answer, Server
from isochunk.bench.lengths import Lengths
from isochunk.bench.prompts import PromptMaker
from isochunk.bench.solo import ended_by
from isochunk.core.errors import ConfigError, ServerError

__all__ = ["Load", "Outcome", "Request", "prepare", "send"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What to send.

    Attributes:
        requests: how many.
        lengths: tokens of each prompt.
        output_tokens: of each answer.
        concurrency: requests under way at a time; None with a rate.
        rate: requests a second on average, at the moments of a Poisson process, however many are under way.
        shared: part of each prompt, from its start, that all prompts share.
        seed: the same seed gives the same prompts at the same moments.

    Raises:
        ConfigError: a value is out of its range.
    """

    requests: int
    lengths: Lengths
    output_tokens: int = 1
    concurrency: int | None = 1
    rate: float | None = None
    shared: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.requests < 1 or self.output_tokens < 1:
            raise ConfigError(f"requests = {self.requests}, output tokens = {self.output_tokens}: at least 1 of each")
        if (self.concurrency is None) == (self.rate is None):
            raise ConfigError("give either a concurrency or a rate")
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"concurrency = {self.concurrency} must be at least 1")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise ConfigError(f"rate = {self.rate} must be above 0 requests a second")
        if not 0 <= self.shared < 1:
            raise ConfigError(
                f"shared = {self.shared} must be at least 0 and below 1: every prompt has a part of its own"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request ready to send.

    Attributes:
        tokens: of its prompt.
        shared: tokens at its start that others share.
        due_s: seconds after the start of the load when it is sent; 0 when that depends on the others.
    """

    tokens: int
    shared: int
    due_s: float
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A request and its answer, or the error in its place; ``sent_s`` counts from the start of the load."""

    request: Request
    sent_s: float
    answer: Answer | None
    error: str | None = None


async def prepare(server: Server, load: Load, progress: Callable[[], None] = lambda: None) -> list[Request]:
    """Make all requests before the first is sent, so that making them takes nothing from the server.

    Raises:
        ConfigError: the longest prompt does not fit the server.
    """
    limit = await server.max_model_len()
    if limit is not None and load.lengths.longest + load.output_tokens > limit:
        raise ConfigError(
            f"prompts of {load.lengths.longest} tokens with {load.output_tokens} tokens of answer do not fit the "
            f"server's {limit} (max_model_len)"
        )
    random = Random(load.seed)
    maker = PromptMaker(server, load.seed)
    common = await maker.prompt(int(load.shared * load.lengths.longest)) if load.shared else []
    due = 0.0
    requests = []
    for _ in range(load.requests):
        tokens = load.lengths.draw(random)
        shared = int(load.shared * tokens)
        prompt = [*common[:shared], *await maker.prompt(tokens - shared)]
        due += random.expovariate(load.rate) if load.rate else 0.0
        body = await server.body(prompt, load.output_tokens)
        requests.append(Request(tokens=tokens, shared=shared, due_s=due, body=body))
        progress()
    return requests


async def send(
    server: Server,
    requests: Sequence[Request],
    concurrency: int | None,
    progress: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Send them, each when it is due and a place is free; the outcomes are in the order of the requests.

    Cancelled (Ctrl-C), it returns what has come back until then, if anything has.
    """
    places = asyncio.Semaphore(len(requests) if concurrency is None else concurrency)
    start = time.perf_counter()
    outcomes: dict[int, Outcome] = {}

    async def one(index: int, request: Request) -> None:
        try:
            sent = time.perf_counter() - start
            try:
                answer, error = await server.send(request.body), None
            except ServerError as failed:
                answer, error = None, str(failed)
            outcome = Outcome(request=request, sent_s=sent, answer=answer, error=error)
            outcomes[index] = outcome
            progress(outcome)
        finally:
            places.release()

    try:
        async with asyncio.TaskGroup() as group:
            index = 0
            async for request in _in_time(requests, start):
                await places.acquire()
                group.create_task(one(index, request))
                index += 1
    except asyncio.CancelledError as error:
        if not outcomes:
            raise
        server.note(f"{ended_by(error)}: {len(requests) - len(outcomes)} of {len(requests)} requests are missing")
    return [outcomes[index] for index in sorted(outcomes)]


async def _in_time(requests: Sequence[Request], start: float) -> AsyncIterator[Request]:
    for request in requests:
        wait = start + request.due_s - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        yield request
