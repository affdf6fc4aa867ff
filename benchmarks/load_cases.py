"""Random cases of prompts that share a pipeline: costs, stages, limits, lengths, hits and eight kinds of arrivals."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from isochunk.core.cost import CostModel
from isochunk.core.curve import Curve
from isochunk.simulator import ClosedLoop, Deployment, OpenLoop, Request, Workload

__all__ = ["KINDS", "Case", "cases"]

DATA = Path(__file__).resolve().parent.parent / "data"
BLOCK = 16
COUNT = (40, 250)  # prompts of a case, least and most
STEPS = 250  # of a case, about, where so many prompts are enough for that
MOST_STEPS = 4000  # of a case in the smallest size, so that a study takes minutes


class Thinking(ClosedLoop):
    """Clients who take a moment, exponentially distributed, between a first token and their next prompt."""

    def __init__(self, requests: list[Request], concurrency: int, mean_s: float, seed: int) -> None:
        super().__init__(requests, concurrency)
        self._mean_s, self._seed = mean_s, seed

    def start(self) -> list[tuple[float, Request]]:
        """Every client has just got a token."""
        self._clock = random.Random(f"thinking {self._seed}")
        return [(self._pause(), request) for _, request in super().start()]

    def after_finish(self, now: float) -> list[tuple[float, Request]]:
        """The same client's next prompt, later."""
        return [(now + self._pause(), request) for _, request in super().after_finish(now)]

    def _pause(self) -> float:
        return self._clock.expovariate(1 / self._mean_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One deployment and what arrives at it.

    Attributes:
        kind: of the arrivals, from `KINDS`.
        traits: what was drawn, for the table of losses.
        workload: makes the arrivals anew for each run.
        sizes: fifteen fixed sizes, from a third of what is best for a prompt alone up to the limit.
    """

    name: str
    kind: str
    traits: str
    deployment: Deployment
    workload: Callable[[], Workload]
    sizes: tuple[int, ...]


def cases(seed: int, count: int = 300) -> Iterator[Case]:
    """``count`` cases, the eight kinds of arrivals in turn; the same for the same seed."""
    for index in range(count):
        yield _case(f"{seed}-{index}", list(KINDS)[index % len(KINDS)])


def _case(name: str, kind: str) -> Case:
    draw = random.Random(f"case {name}")
    while True:
        stages = draw.choice((2, 3, 4, 6, 8, 12, 16))
        source, model = _cost(draw, stages)
        limit = draw.choice((2048, 4096, 8192, 16384, 32768, 65536))
        shape, lengths = _lengths(draw, limit)
        count = min(max(round(STEPS / _steps(model, stages, [lengths() for _ in range(20)])), COUNT[0]), COUNT[1])
        requests = _agents(draw, count, lengths) if kind == "agents" else _requests(draw, count, lengths)
        new = sum(r.tokens - r.cached for r in requests)
        steps = _steps(model, stages, [r.tokens - r.cached for r in requests])
        least = max(new / (count * steps) / 3, 64)
        if new / min(least, limit / 8) < MOST_STEPS:
            break
    load, workload = KINDS[kind](draw, model, limit, requests, stages)
    hit = sum(r.cached for r in requests) / sum(r.tokens for r in requests)
    return Case(
        name=name,
        kind=kind,
        traits=f"{source}, P {stages}, limit {limit}, {shape}, hit {hit:.0%}, {load}",
        deployment=Deployment(models=(model,) * stages, max_tokens=limit, block=BLOCK),
        workload=workload,
        sizes=tuple(sorted({round(size / BLOCK) * BLOCK for size in np.geomspace(min(least, limit / 8), limit, 15)})),
    )


def _steps(model: CostModel, stages: int, lengths: list[int]) -> float:
    """About how many steps are best for a prompt alone, mean over these lengths."""
    return sum(math.sqrt(stages * model.work(0, tokens) / model.c0) for tokens in lengths) / len(lengths)


def _between(draw: random.Random, low: float, high: float) -> float:
    """Every doubling as likely as any other."""
    return math.exp(draw.uniform(math.log(low), math.log(high)))


def _cost(draw: random.Random, stages: int) -> tuple[str, CostModel]:
    """Three in ten from a GPU's curve, the others from ranges around the published models."""
    if draw.random() < 0.3:
        return _gpu_cost(draw, stages)
    c3 = 0.0 if draw.random() < 0.4 else _between(draw, 1e-8, 2e-6)
    c1 = _between(draw, 2e-6, 5e-5)
    return "ranges", CostModel(_between(draw, 2e-3, 0.2), c1, c1 * _between(draw, 1e-5, 4e-4), c3)


def _gpu_cost(draw: random.Random, stages: int) -> tuple[str, CostModel]:
    """A stage of a model whose linear layers were timed on a GPU; attention and KV reading as the data's page says."""
    curves = json.loads((DATA / "gpu_linear_layers.json").read_text(encoding="utf-8"))["curves"]
    name = draw.choice(sorted(curves))
    measured = curves[name]
    layers = measured["layers"] / stages
    fixed = _between(draw, 1e-3, 2e-2)
    seconds = fixed + layers * np.maximum.accumulate(measured["seconds"])
    pair = 4 * measured["hidden"] / measured["tp"] / 350e12
    kv = 2 * measured["hidden"] / draw.choice((1, 8)) * 2 / measured["tp"] / 2.5e12
    curve = Curve(tuple(measured["tokens"]), tuple(seconds.tolist()))
    return name, CostModel.measured(curve, layers * pair, layers * kv)


def _lengths(draw: random.Random, limit: int) -> tuple[str, Callable[[], int]]:
    """A shape with its name; typical lengths of a quarter of the limit to sixteen times it."""
    typical = min(max(_between(draw, limit / 4, limit * 16), 1000.0), 130_000.0)
    shape = draw.choice(("fixed", "uniform", "lognormal", "two sizes"))
    if shape == "fixed":
        return f"{typical:.0f} tokens", lambda: round(typical)
    if shape == "uniform":
        return f"uniform to {2 * typical:.0f}", lambda: draw.randint(round(typical / 16), round(2 * typical))
    if shape == "lognormal":
        spread = draw.uniform(0.4, 1.2)
        label = f"lognormal {typical:.0f}, {spread:.1f}"
        return label, lambda: round(min(max(typical * math.exp(draw.gauss(0, spread)), 256.0), 262_144.0))
    short, share = typical / draw.choice((4, 8, 16, 32)), draw.uniform(0.5, 0.9)
    label = f"{share:.0%} {short:.0f}, else {typical:.0f}"
    return label, lambda: max(round(short if draw.random() < share else typical), 64)


def _requests(draw: random.Random, count: int, length: Callable[[], int]) -> list[Request]:
    kind = draw.choice(("none", "none", "alike", "mixed"))
    alike = draw.choice((0.3, 0.5, 0.9, 0.97))
    requests = []
    for index in range(count):
        tokens = length()
        hit = {"none": 0.0, "alike": alike, "mixed": draw.choice((0.0, 0.5, 0.9))}[kind]
        requests.append(Request(key=f"r{index}", tokens=tokens, cached=_whole(tokens * hit, tokens)))
    return requests


def _agents(draw: random.Random, count: int, length: Callable[[], int]) -> list[Request]:
    """Conversations whose every turn adds to a prompt that is in the cache up to the turn before."""
    agents, growth = draw.randint(2, 12), draw.uniform(0.05, 0.4)
    known = [0] * agents
    requests = []
    for index in range(count):
        agent = index % agents
        if known[agent] > 200_000 or draw.random() < 0.05:
            known[agent] = 0
        before = known[agent]
        tokens = before + max(round(length() * growth), 32) if before else length()
        requests.append(Request(key=f"r{index}", tokens=tokens, cached=_whole(before, tokens)))
        known[agent] = tokens
    return requests


def _whole(cached: float, tokens: int) -> int:
    return min(int(cached), tokens - 1) // BLOCK * BLOCK


def _seconds(model: CostModel, limit: int, requests: list[Request]) -> float:
    """A prompt's mean seconds on a stage in steps of eight prompts or the limit: what the pipeline can serve."""
    mean = sum(r.tokens - r.cached for r in requests) / len(requests)
    seconds = sum(model.marginal(r.tokens - r.cached, r.cached) for r in requests) / len(requests)
    return seconds + model.c0 * mean / min(limit, 8 * mean)


Arrivals = tuple[str, Callable[[], Workload]]


def _open(requests: list[Request], times: list[float]) -> Callable[[], Workload]:
    arriving = [
        Request(key=r.key, tokens=r.tokens, arrival=at, cached=r.cached) for r, at in zip(requests, times, strict=True)
    ]
    return lambda: OpenLoop(arriving)


def _poisson(draw: random.Random, model: CostModel, limit: int, requests: list[Request], stages: int) -> Arrivals:
    load = draw.uniform(0.2, 0.95)
    rate = load / _seconds(model, limit, requests)
    now, times = 0.0, []
    for _ in requests:
        now += draw.expovariate(rate)
        times.append(now)
    return f"load {load:.2f}", _open(requests, times)


def _bursty(draw: random.Random, model: CostModel, limit: int, requests: list[Request], stages: int) -> Arrivals:
    """Several at a time, the times at random."""
    load, most = draw.uniform(0.2, 0.9), draw.choice((4, 8, 16))
    rate = load / _seconds(model, limit, requests)
    now, times = 0.0, []
    while len(times) < len(requests):
        size = draw.randint(1, most)
        now += draw.expovariate(rate / size)
        times += [now] * size
    return f"load {load:.2f} in bursts of up to {most}", _open(requests, times[: len(requests)])


def _on_off(draw: random.Random, model: CostModel, limit: int, requests: list[Request], stages: int) -> Arrivals:
    """Poisson arrivals at above or near capacity for a while, then silence."""
    load, prompts = draw.uniform(0.6, 2.0), draw.randint(5, 25)
    rate = load / _seconds(model, limit, requests)
    silence = draw.uniform(0.5, 2.0) * prompts / rate
    now, times = 0.0, []
    for index in range(len(requests)):
        now += draw.expovariate(rate) + (silence if index % prompts == 0 else 0.0)
        times.append(now)
    return f"load {load:.2f} for {prompts} prompts, then none", _open(requests, times)


def _thinking(draw: random.Random, model: CostModel, limit: int, requests: list[Request], stages: int) -> Arrivals:
    clients, pause = draw.randint(2, 24), _between(draw, 0.1, 10) * _seconds(model, limit, requests) * stages**0.5
    label = f"{clients} clients think {pause:.1f} s"
    seed = draw.randrange(1 << 30)
    return label, lambda: Thinking(requests, clients, pause, seed)


def _two_groups(draw: random.Random, model: CostModel, limit: int, requests: list[Request], stages: int) -> Arrivals:
    """Short prompts at random times, and long ones (eight times as long) at regular ones."""
    load, every = draw.uniform(0.3, 0.9), draw.randint(4, 12)
    mixed = []
    for index, r in enumerate(requests):
        tokens = r.tokens if index % every == 0 else max(r.tokens // 8, 32)
        mixed.append(Request(key=r.key, tokens=tokens, cached=_whole(r.cached / max(r.tokens, 1) * tokens, tokens)))
    rate = load / _seconds(model, limit, mixed)
    now, times = 0.0, []
    for index in range(len(mixed)):
        if index % every:
            now += draw.expovariate(rate * (every - 1) / every)
        times.append(now)
    return f"load {load:.2f}, one in {every} eight times as long", _open(mixed, times)


def _agents_loop(draw: random.Random, model: CostModel, limit: int, requests: list[Request], stages: int) -> Arrivals:
    clients = draw.randint(2, 24)
    pause = draw.choice((0.0, _between(draw, 0.05, 3) * _seconds(model, limit, requests)))
    seed = draw.randrange(1 << 30)
    if not pause:
        return f"{clients} agents", lambda: ClosedLoop(requests, clients)
    return f"{clients} agents, tools take {pause:.2f} s", lambda: Thinking(requests, clients, pause, seed)


def _loop(draw: random.Random, model: CostModel, limit: int, requests: list[Request], stages: int) -> Arrivals:
    clients = draw.choice((1, 2, 3, 4, 6, 8, 12, 16, 32))
    return f"{clients} clients", lambda: ClosedLoop(requests, clients)


def _together(draw: random.Random, model: CostModel, limit: int, requests: list[Request], stages: int) -> Arrivals:
    """All prompts of a batch at once, the next batch when the last is done or nearly so."""
    batch = draw.randint(2, 32)
    period = draw.uniform(1.1, 3.0) * batch * _seconds(model, limit, requests)
    times = [index // batch * period for index in range(len(requests))]
    return f"{batch} at once, every {period:.1f} s", _open(requests, times)


KINDS: dict[str, Callable[[random.Random, CostModel, int, list[Request], int], Arrivals]] = {
    "poisson": _poisson,
    "bursty": _bursty,
    "on and off": _on_off,
    "think time": _thinking,
    "two groups": _two_groups,
    "agents": _agents_loop,
    "closed loop": _loop,
    "batches": _together,
}
