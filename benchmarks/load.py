"""Requests of random token ids, made without the server: the same lengths and moments for every arm, other prompts."""

from __future__ import annotations

import random
from collections.abc import Sequence

from isochunk.bench.client import Server
from isochunk.bench.load import Request

__all__ = ["QUIET_S", "poisson", "random_requests"]

QUIET_S = 1.5  # between two measurements: vLLM's queues spin for a second after they were read last

_IDS = range(100, 40_000)


async def random_requests(
    server: Server,
    lengths: Sequence[int],
    *,
    due_s: Sequence[float] | None = None,
    common: Sequence[int] = (),
    shared: float = 0.0,
) -> list[Request]:
    """One request of each length for one token; ``shared`` of each prompt is the start of ``common``."""
    requests = []
    for at, tokens in enumerate(lengths):
        kept = int(shared * tokens)
        prompt = [*common[:kept], *random.choices(_IDS, k=tokens - kept)]
        body = await server.body(prompt, 1)
        requests.append(Request(tokens=tokens, shared=kept, due_s=due_s[at] if due_s else 0.0, body=body))
    return requests


def poisson(count: int, rate: float, seed: int) -> list[float]:
    """Moments in seconds of ``count`` arrivals, ``rate`` a second on average."""
    generator = random.Random(f"arrivals {seed}")  # apart from the lengths of the same seed
    moments, at = [], 0.0
    for _ in range(count):
        at += generator.expovariate(rate)
        moments.append(at)
    return moments
