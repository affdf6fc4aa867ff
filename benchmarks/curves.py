"""Predicted TTFT of isochunk's plans over the best fixed size and over a dynamic programme, on measured costs.

    python -m benchmarks.curves [--longest 131072] [--silicon] [--random 100-130] [--only NAME]

The costs are a GPU's linear layers (data/gpu_linear_layers.json) with attention, history and 4 ms a step added; the
published models; with --silicon what `isochunk profile --system` estimates of others; with --random costs drawn with
these seeds (`benchmarks.random_curves`), alone. Plans and programme know the same model: this judges the planner. How
near the model is to the machine, see `benchmarks.curve_fits`.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.random_curves import random_model
from isochunk.core.cost import CostModel
from isochunk.core.curve import Curve
from isochunk.core.planner import law_target, plan, static_ttft

__all__ = ["STEP_S", "gpu_models", "least_ttft", "published_models"]

Floats = npt.NDArray[np.float64]

DATA = Path(__file__).parents[1] / "data"
STEP_S = 0.004  # scheduler, launch and hand-over of a step, which the public profiles leave out
LIMIT = 8192
LENGTHS = (2048, 4096, 8192, 16_384, 32_768, 131_072, 1 << 20)
STAGES = (2, 4, 8, 16)
_KV_HEADS = {"Llama-2-70b-hf": 8 * 128, "Llama-2-7b-hf": 4096, "phi-2": 2560}  # times head size
_BOUNDS, _ROUNDS = 24, 3


def gpu_models(stages: int, step_s: float = STEP_S) -> dict[str, CostModel]:
    """Cost of a step on one stage of each curve of the file, as the file says it is to be used."""
    models = {}
    for name, data in json.loads((DATA / "gpu_linear_layers.json").read_text())["curves"].items():
        layers = data["layers"] / stages
        linear = step_s + layers * np.maximum.accumulate(data["seconds"])
        pair = 4 * data["hidden"] / data["tp"] / 350e12 * layers
        reread = 4 * _KV_HEADS[name.split("@")[0]] / data["tp"] / 2.5e12 * layers
        models[name] = CostModel.measured(Curve(tuple(data["tokens"]), tuple(linear.tolist())), pair, reread)
    return models


def published_models(stages: int) -> dict[str, CostModel]:
    """The published models, their layers on another number of stages."""
    models = {}
    for name, data in json.loads((DATA / "published_models.json").read_text())["models"].items():
        models[name] = CostModel.of(data).scaled(data["stages"] / stages, step=1.0)
    return models


def least_ttft(model: CostModel, stages: int, tokens: int, limit: int, grid: int) -> float:
    """Least predicted TTFT of all cuts at multiples of ``grid``, by dynamic programming over bounds on the step."""
    places = math.ceil(tokens / grid)
    most = max(min(limit, tokens) // grid, 1)
    at = np.minimum(np.arange(places + 1) * float(grid), tokens)
    attention = model.work(0, tokens) - model.c1 * tokens

    def solve(bounds: Floats) -> Floats:
        least = np.full((places + 1, len(bounds)), np.inf)
        least[0] = 0.0
        for place in range(1, places + 1):
            first = max(place - most, 0)
            histories = at[first:place]
            chunks = at[place] - histories
            cost = model.line(chunks) + model.c3 * histories
            allowed = model.seconds(chunks, histories)[:, None] <= bounds
            least[place] = np.where(allowed, least[first:place] + cost[:, None], np.inf).min(axis=0)
        return np.asarray(least[-1] + attention + (stages - 1) * bounds)

    target = law_target(model, model.work(0, tokens), stages, model.step_cost(0, tokens))
    bounds = np.geomspace(0.4 * target, 3 * target, _BOUNDS)
    best = math.inf
    for _ in range(_ROUNDS):
        found = solve(bounds)
        index = int(np.argmin(found))
        best = min(best, float(found[index]))
        bounds = np.linspace(bounds[max(index - 1, 0)], bounds[min(index + 1, len(bounds) - 1)], _BOUNDS)
    return best


def best_fixed(model: CostModel, stages: int, tokens: int, limit: int) -> float:
    """Least predicted TTFT of all fixed sizes in steps of 64 tokens."""
    sizes = np.append(np.arange(64, min(tokens, limit), 64), min(tokens, limit))
    return float(static_ttft(model, 0, tokens, sizes, stages).min())


def _models(stages: int, given: argparse.Namespace) -> dict[str, CostModel]:
    if given.random:
        first, last = map(int, given.random.split("-"))
        return {f"random {seed}": random_model(seed) for seed in range(first, last + 1)}
    models = gpu_models(stages) | published_models(stages)
    if given.silicon:
        from benchmarks.silicon import silicon_models

        models |= silicon_models(stages)
    return models


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--longest", type=int, default=131_072, help="longest prompt (the programme takes its time)")
    options.add_argument("--silicon", action="store_true", help="also accelerators of others")
    options.add_argument("--random", help="first and last seed, with a dash")
    options.add_argument("--only", default="", help="part of the name of the costs to try")
    given = options.parse_args()
    print("| costs | P | over best fixed, least to most | over programme, worst | planned in, worst |")
    print("| --- | --- | --- | --- | --- |")
    for stages in STAGES:
        for name, model in _models(stages, given).items():
            if given.only not in name:
                continue
            fixed, programme, took = [], [], []
            for tokens in (length for length in LENGTHS if length <= given.longest):
                limit = LIMIT if model.curve else max(LIMIT, tokens // 8)
                began = time.perf_counter()
                ttft = plan(model, tokens, stages, max_chunk=limit, block=16).ttft_s
                took.append(time.perf_counter() - began)
                fixed.append(ttft / best_fixed(model, stages, tokens, limit))
                grid = 16 if tokens <= 8192 else 64 if tokens <= 131_072 else 256
                programme.append(ttft / least_ttft(model, stages, tokens, limit, grid))
            print(
                f"| {name} | {stages} | {min(fixed):.3f} to {max(fixed):.4f} | {max(programme):.4f} "
                f"| {1000 * max(took):.1f} ms |",
                flush=True,
            )


if __name__ == "__main__":
    main()
