"""isochunk, the published rule and a sweep of fixed sizes, interleaved on one rehearsed vLLM server.

    python -m benchmarks.rehearsal                                        # every cell that is not measured yet
    python -m benchmarks.rehearsal --models kimi --stages 4 --seconds 500 # some, and no longer than that
    python -m benchmarks.rehearsal --table                                # what was measured

A cell is a cost model, a number of virtual stages, and a load: one prompt alone, a closed loop, or Poisson arrivals
at a share of what isochunk served at 16 at a time. In each round every arm gets the same lengths (and moments), in
random order, with prompts of its own. The clocks run so many times as fast that a step's fixed cost is a few
milliseconds; the table gives the rehearsed machine's seconds. Results are kept after every round, so that a run can
be stopped and goes on where it was.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from math import exp, log
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from benchmarks.curves import gpu_models
from benchmarks.load import poisson, random_requests
from isochunk.bench.client import Server
from isochunk.bench.load import send
from isochunk.cli.rehearsed import running_rehearsal
from isochunk.core.profile import Profile, save_profile
from isochunk.simulator.silicon import Silicon, estimate
from isochunk.vllm.virtual.rehearsal import Rehearsal

RESULTS = Path(__file__).parent / "results" / "rehearsal.json"
LIMIT = 16_384
SIZES = (1024, 2048, 4096, 8192, 16_384)
FIRST = (4096, 8192, 16_384)
OURS = "isochunk"
MIXED = (4096, 65_536)  # log-uniform
ALIKE = 16_384
ROUNDS = 3

Rounds = list[dict[str, dict[str, float]]]


@dataclass(frozen=True)
class Model:
    """Where a profile comes from, and how many times as fast its clocks run.

    Attributes:
        profile: a published name; with ``silicon`` a file is made.
        silicon: a deployment whose kernels were measured, or a curve of `benchmarks.curves` by its name.
    """

    speed: float
    profile: str = ""
    silicon: Silicon | str | None = None

    def file(self, stages: int, folder: Path) -> str:
        """What ``--profile`` takes, for so many stages."""
        if self.silicon is None:
            return self.profile
        if isinstance(self.silicon, str):
            profile = Profile(model=gpu_models(stages)[self.silicon])
        else:
            profile = estimate(replace(self.silicon, stages=stages, longest=MIXED[1] * 4))
        path = folder / f"profile-{stages}.json"
        save_profile(path, profile)
        return str(path.resolve())


LLAMA, DEEPSEEK = "meta-llama/Meta-Llama-3.1-70B", "deepseek-ai/DeepSeek-V3"
MODELS = {
    "kimi": Model(8, "kimi-k2.5-mxfp4@mi355x/pp4tp1"),
    "deepseek-mid": Model(32, "deepseek-v3.1-w8a8@atlas-a3/pp2tp8/mid"),
    "deepseek-hi": Model(48, "deepseek-v3.1-w8a8@atlas-a3/pp2tp8/hi"),
    "qwen3-235b": Model(16, "qwen3-235b@atlas-a3/pp2tp8/mid"),
    "curve-llama2-70b-h100": Model(1, silicon="Llama-2-70b-hf@h100/tp8"),
    "curve-llama2-7b-h100": Model(1, silicon="Llama-2-7b-hf@h100/tp1"),
    "h100-llama-70b": Model(2, silicon=Silicon(system="h100_sxm", model=LLAMA, tensor_parallel=4)),
    "b200-llama-70b": Model(2, silicon=Silicon(system="b200_sxm", model=LLAMA, tensor_parallel=2)),
    "a100-llama-70b": Model(2, silicon=Silicon(system="a100_sxm", model=LLAMA, tensor_parallel=8)),
    "h200-deepseek": Model(2, silicon=Silicon(system="h200_sxm", model=DEEPSEEK, tensor_parallel=8)),
    "b200-deepseek": Model(2, silicon=Silicon(system="b200_sxm", model=DEEPSEEK, tensor_parallel=8)),
    "h200-qwen3-235b": Model(
        2, silicon=Silicon(system="h200_sxm", model="Qwen/Qwen3-235B-A22B-FP8", tensor_parallel=4)
    ),
}


@dataclass(frozen=True)
class Load:
    """One prompt alone (``tokens``), ``clients`` at a time, or Poisson arrivals at ``part`` of the capacity."""

    tokens: int = 0
    clients: int = 0
    part: float = 0.0
    mixed: bool = True
    hits: float = 0.0

    @property
    def label(self) -> str:
        """As it stands in the results."""
        if self.tokens:
            return f"{self.tokens} tokens alone"
        what = "4k to 64k" if self.mixed else "16k"
        shared = f", {self.hits:.0%} cached" if self.hits else ""
        return f"{self.clients} clients, {what}{shared}" if self.clients else f"Poisson {self.part:.0%}, {what}"

    def lengths(self, seed: int, count: int) -> list[int]:
        """So many prompts' tokens."""
        if not self.mixed:
            return [ALIKE] * count
        low, high = map(log, MIXED)
        generator = random.Random(seed)
        return [int(exp(generator.uniform(low, high))) for _ in range(count)]


ALONE = [Load(tokens=tokens) for tokens in (8192, 16_384, 32_768, 65_536, 131_072, 262_144, 524_288, 1_048_576)]
CLOSED = [Load(clients=n, mixed=m, hits=h) for n in (4, 16) for m in (True, False) for h in (0.0, 0.9)]
OPEN = [Load(part=part) for part in (0.5, 0.8, 0.95)]


@dataclass(frozen=True)
class Arm:
    """A policy, and the size that goes with it."""

    label: str
    policy: str
    chunk: int | None = None


ARMS = [
    Arm(OURS, "optimal"),
    *(Arm(f"rule {size}", "first_chunk", size) for size in FIRST),
    *(Arm(f"fixed {size}", "fixed", size) for size in SIZES),
]


class Book:
    """The results file: rounds of each cell, kept after every one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cells: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def rounds(self, key: str) -> Rounds:
        """What was measured of this cell."""
        return list(self.cells.get(key, {}).get("rounds", []))

    def add(self, key: str, about: dict[str, Any], measured: dict[str, dict[str, float]]) -> None:
        """Keep a round."""
        self.cells.setdefault(key, {**about, "rounds": []})["rounds"].append(measured)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.cells, indent=1, sort_keys=True) + "\n", encoding="utf-8")


async def alone(server: Server, arm: Arm, load: Load) -> dict[str, float]:
    await server.use(arm.policy, arm.chunk)
    (request,) = await random_requests(server, [load.tokens])
    answer = await server.send(request.body)
    record = (await server.status())["prompts"][-1]
    assert record["tokens"] == load.tokens
    measured = {"ttft_s": record["measured_ttft_s"], "client_s": answer.ttft_s, "steps": len(record["chunks"])}
    return measured | ({"predicted_s": record["predicted_ttft_s"]} if record["predicted_ttft_s"] else {})


async def under_load(
    server: Server, arm: Arm, load: Load, rate: float, seed: int, common: list[int]
) -> dict[str, float]:
    lengths = load.lengths(seed, max(3 * load.clients, 24))
    if load.hits:
        await server.complete(common[: int(load.hits * max(lengths))])
    await server.use(arm.policy, arm.chunk)
    due = poisson(len(lengths), rate, seed) if load.part else None
    requests = await random_requests(server, lengths, due_s=due, common=common, shared=load.hits)
    outcomes = await send(server, requests, load.clients or None)
    answers = [outcome.answer for outcome in outcomes if outcome.answer]
    assert len(answers) == len(lengths), [outcome.error for outcome in outcomes if outcome.error]
    times = [answer.ttft_s for answer in answers][load.clients :]  # the first of a closed loop come all at once
    span = max(o.sent_s + o.answer.seconds for o in outcomes if o.answer) - outcomes[0].sent_s
    return {"ttft_s": fmean(times), "p90_s": float(np.percentile(times, 90)), "tokens_per_s": sum(lengths) / span}


async def measure(url: str, load: Load, rate: float, seed: int, arms: list[Arm]) -> dict[str, dict[str, float]]:
    """One round of a load: every arm, in random order."""
    generator = random.Random(f"common {seed} {load.label}")
    common = generator.choices(range(100, 40_000), k=MIXED[1]) if load.hits else []
    measured = {}
    async with Server(url, timeout=3600) as server:
        for arm in random.sample(arms, len(arms)):
            if load.tokens:
                measured[arm.label] = await alone(server, arm, load)
            else:
                measured[arm.label] = await under_load(server, arm, load, rate, seed, common)
    return measured


def scaled(measured: dict[str, dict[str, float]], speed: float) -> dict[str, dict[str, float]]:
    """The rehearsed machine's seconds."""

    def value(name: str, number: float) -> float:
        return (
            number * speed if name.endswith("_s") and "per" not in name else number / speed if "per" in name else number
        )

    return {label: {name: value(name, number) for name, number in arm.items()} for label, arm in measured.items()}


def key_of(name: str, stages: int, load: Load) -> str:
    return f"{name}, P = {stages}, {load.label}"


def wanted(given: argparse.Namespace, book: Book) -> Iterator[tuple[str, int, list[Load]]]:
    """Servers to start, each with the loads that lack rounds."""
    kinds = {
        "alone": [load for load in ALONE if given.shortest <= load.tokens <= given.longest],
        "closed": CLOSED,
        "poisson": OPEN,
    }
    loads = [load for kind in given.loads.split(",") for load in kinds[kind]]
    for name in given.models.split(","):
        for stages in map(int, given.stages.split(",")):
            missing = [load for load in loads if len(book.rounds(key_of(name, stages, load))) < given.rounds]
            if missing:
                yield name, stages, missing


def capacity(book: Book, name: str, stages: int, speed: float) -> float | None:
    """Mixed prompts a second that isochunk served at 16 at a time, on the clocks; None when not measured yet."""
    rounds = book.rounds(key_of(name, stages, Load(clients=16)))
    if not rounds:
        return None
    typical = fmean(Load().lengths(7, 10_000))
    return fmean(one[OURS]["tokens_per_s"] for one in rounds) * speed / typical


def run(given: argparse.Namespace, book: Book) -> None:
    deadline = time.monotonic() + given.seconds
    arms = [arm for arm in ARMS if arm.label.startswith(tuple(given.arms.split(",")))]
    for name, stages, loads in wanted(given, book):
        if time.monotonic() > deadline:
            return
        model = MODELS[name] if given.speed is None else replace(MODELS[name], speed=given.speed)
        options = [
            *("--max-num-batched-tokens", str(LIMIT), "--max-model-len", str(max(given.longest, MIXED[1]) + 256)),
            *("--disable-log-stats", *given.options.split()),
        ]
        print(f"# {name}, {stages} stages, clocks {model.speed:g} times as fast", flush=True)
        with running_rehearsal(
            Rehearsal(profile=model.file(stages, given.log.parent), speed=model.speed),
            options,
            stages=stages,
            log=given.log,
        ) as url:
            for load in loads:
                key = key_of(name, stages, load)
                full = capacity(book, name, stages, model.speed)
                if load.part and full is None:
                    print(f"{key}: measure 16 clients first", flush=True)
                    continue
                for seed in range(len(book.rounds(key)), given.rounds):
                    if time.monotonic() > deadline:
                        return
                    measured = asyncio.run(measure(url, load, load.part * (full or 0.0), seed, arms))
                    about = {"model": name, "stages": stages, "load": asdict(load), "options": given.options}
                    about["speed"] = model.speed
                    book.add(key, about, scaled(measured, model.speed))
                print(row(key, book.rounds(key)), flush=True)


def best(rounds: Rounds, kind: str) -> str:
    """The arm of this kind with the least mean TTFT."""
    labels = [label for label in rounds[0] if label.startswith(kind)]
    return min(labels, key=lambda label: fmean(one[label]["ttft_s"] for one in rounds))


def ratios(rounds: Rounds, field: str, over: str) -> list[float]:
    return sorted(one[OURS][field] / one[over][field] for one in rounds)


def row(key: str, rounds: Rounds) -> str:
    """isochunk over the best fixed size and over the best first size of the rule: median and spread of rounds."""
    cells = [f"{fmean(one[OURS]['ttft_s'] for one in rounds):.3g} s"]
    for kind in ("fixed", "rule"):
        if not any(label.startswith(kind) for label in rounds[0]):
            cells.append("-")
            continue
        label = best(rounds, kind)
        found = ratios(rounds, "ttft_s", label)
        text = f"{median(found):.3f} ({found[0]:.3f}-{found[-1]:.3f}) of {label}"
        if "tokens_per_s" in rounds[0][OURS]:
            text += f", tokens/s {median(ratios(rounds, 'tokens_per_s', label)):.3f}"
        cells.append(text)
    predicted = [one[OURS]["ttft_s"] / one[OURS]["predicted_s"] for one in rounds if "predicted_s" in one[OURS]]
    cells.append(f"{median(predicted):.3f}" if predicted else "-")
    return f"| {key} | " + " | ".join(cells) + f" | {len(rounds)} |"


def table(book: Book) -> None:
    print("| cell | TTFT | over the best fixed size | over the rule | measured over predicted | rounds |")
    print("| --- | --- | --- | --- | --- | --- |")
    for key, cell in book.cells.items():
        print(row(key, cell["rounds"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--stages", default="2,4,8,16")
    parser.add_argument("--loads", default="alone,closed,poisson")
    parser.add_argument("--shortest", type=int, default=8192, help="shortest prompt alone")
    parser.add_argument("--longest", type=int, default=131_072, help="longest prompt alone, up to 1048576")
    parser.add_argument("--arms", default="isochunk,rule,fixed", help="beginnings of the arms' names")
    parser.add_argument("--speed", type=float, help="of the clocks, in place of the model's own")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no round after so many seconds")
    parser.add_argument("--options", default="", help="more options for vLLM, such as --no-async-scheduling")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--log", type=Path, default=Path("results/rehearsal/server.log"))
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    book = Book(given.output)
    if not given.table:
        run(given, book)
    table(book)


if __name__ == "__main__":
    main()
