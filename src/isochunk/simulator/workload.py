"""What arrives: prompts with their lengths, times and prefix hits."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from isochunk.core.errors import WorkloadError

__all__ = ["ClosedLoop", "Lengths", "OpenLoop", "Request", "Workload", "make_requests", "poisson"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt of ``tokens`` tokens that arrives ``arrival`` seconds after the start.

    ``cached`` of its tokens are in the KV cache already; or, with ``blocks`` (one hash for each ``unit`` of tokens),
    as many as the instance's own prefix cache holds when the prompt's turn comes. It is answered with ``output``
    tokens; one is what a prefill node is asked for.
    """

    key: str
    tokens: int
    arrival: float = 0.0
    cached: int = 0
    blocks: tuple[int, ...] = ()
    unit: int = 512
    output: int = 1

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise WorkloadError(f"request {self.key}: tokens = {self.tokens} must be at least 1")
        for name in ("unit", "output"):
            if getattr(self, name) < 1:
                raise WorkloadError(f"request {self.key}: {name} = {getattr(self, name)} must be at least 1")
        if not 0 <= self.cached < self.tokens:
            raise WorkloadError(f"request {self.key}: cached = {self.cached} must be from 0 to tokens - 1")
        if not (math.isfinite(self.arrival) and self.arrival >= 0):
            raise WorkloadError(f"request {self.key}: arrival = {self.arrival} must be a finite time, at least 0")


class OpenLoop:
    """Requests that arrive at their own times, whatever the server does."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = sorted(_some(requests), key=lambda r: r.arrival)

    def start(self) -> list[tuple[float, Request]]:
        """The first arrivals, as (seconds, request)."""
        self._rest = iter(self.requests)
        return self.after_arrival()

    def after_arrival(self) -> list[tuple[float, Request]]:
        """What arrives next, once an arrival was handled."""
        return [(request.arrival, request) for request in _take(self._rest, 1)]

    def after_finish(self, now: float) -> list[tuple[float, Request]]:
        """What arrives because a request is answered; nothing here."""
        return []


class ClosedLoop:
    """``concurrency`` clients that each send the next request when the last is answered."""

    def __init__(self, requests: Sequence[Request], concurrency: int) -> None:
        if concurrency < 1:
            raise WorkloadError(f"concurrency = {concurrency} must be at least 1")
        self.requests = _some(requests)
        self.concurrency = concurrency

    def start(self) -> list[tuple[float, Request]]:
        """The first request of every client."""
        self._rest = iter(self.requests)
        return [(0.0, request) for request in _take(self._rest, self.concurrency)]

    def after_arrival(self) -> list[tuple[float, Request]]:
        """Nothing: clients wait for their answers."""
        return []

    def after_finish(self, now: float) -> list[tuple[float, Request]]:
        """The next request of the client that has just got its answer."""
        return [(now, request) for request in _take(self._rest, 1)]


Workload = OpenLoop | ClosedLoop


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """A distribution of prompt lengths: ``fixed`` (mean), ``uniform`` (least, most) or ``normal``, truncated."""

    shape: str = "fixed"
    mean: float = 0.0
    std: float = 0.0
    least: int = 1
    most: int = 1

    def __post_init__(self) -> None:
        if self.shape not in ("fixed", "uniform", "normal"):
            raise WorkloadError(f"length shape {self.shape!r} must be fixed, uniform or normal")
        if self.shape == "fixed" and self.mean < 1:
            raise WorkloadError(f"a prompt of {self.mean:g} tokens must have at least 1")
        if self.shape != "fixed" and not 1 <= self.least <= self.most:
            raise WorkloadError(f"lengths from {self.least} to {self.most} must be at least 1 and in order")
        if self.shape == "normal" and self.std <= 0:
            raise WorkloadError(f"standard deviation {self.std:g} of the lengths must be above 0")

    def sampler(self, random_numbers: random.Random) -> Callable[[], int]:
        """A function that draws one length."""
        if self.shape == "fixed":
            return lambda: round(self.mean)
        if self.shape == "uniform":
            return lambda: random_numbers.randint(self.least, self.most)
        return lambda: self._truncated(random_numbers)

    def _truncated(self, random_numbers: random.Random) -> int:
        # Through the inverse distribution function: one draw, however little of the bell is inside.
        from statistics import NormalDist

        bell = NormalDist(self.mean, self.std)
        low, high = bell.cdf(self.least), bell.cdf(self.most)
        if not 0 < low + (high - low) / 2 < 1 or high <= low:
            raise WorkloadError(
                f"no length of mean {self.mean:g}, std {self.std:g} lies from {self.least} to {self.most}"
            )
        share = min(max(random_numbers.uniform(low, high), 1e-12), 1 - 1e-12)
        return min(max(round(bell.inv_cdf(share)), self.least), self.most)


def make_requests(
    count: int, lengths: Lengths, *, prefix_hit: float = 0.0, block: int = 1, seed: int = 0, output: int = 1
) -> list[Request]:
    """``count`` requests of random lengths of which the share ``prefix_hit`` is cached, in whole blocks.

    Each is answered with ``output`` tokens.
    """
    if count < 1:
        raise WorkloadError(f"requests = {count} must be at least 1")
    if not 0 <= prefix_hit < 1:
        raise WorkloadError(f"prefix hit = {prefix_hit:g} must be at least 0 and below 1")
    draw = lengths.sampler(random.Random(seed))
    requests = []
    for index in range(count):
        tokens = draw()
        # vLLM computes at least the last token again, and takes hits in whole blocks.
        cached = min(int(tokens * prefix_hit + 1e-9), tokens - 1) // block * block
        requests.append(Request(key=f"r{index}", tokens=tokens, cached=cached, output=output))
    return requests


def poisson(requests: Sequence[Request], rate: float, *, seed: int = 0) -> OpenLoop:
    """The same requests, arriving at random at ``rate`` a second."""
    if not (math.isfinite(rate) and rate > 0):
        raise WorkloadError(f"rate = {rate:g} requests a second must be above 0")
    clock = random.Random(f"arrivals {seed}")  # apart from the lengths of the same seed
    now = 0.0
    arriving = []
    for request in requests:
        now += clock.expovariate(rate)
        arriving.append(replace(request, arrival=now))
    return OpenLoop(arriving)


def _some(requests: Sequence[Request]) -> list[Request]:
    if not requests:
        raise WorkloadError("the workload is empty: it must hold at least 1 request")
    return list(requests)


def _take(requests: Iterator[Request], count: int) -> list[Request]:
    return [request for _, request in zip(range(count), requests, strict=False)]
