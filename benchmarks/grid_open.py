"""Print isochunk against the best fixed size for bursts, Poisson arrivals and mixed lengths.

python benchmarks/grid_open.py
"""

from __future__ import annotations

import itertools

import numpy as np
from published_results import load_models, table

from isochunk.core.cost import CostModel
from isochunk.simulator import ClosedLoop, Deployment, Lengths, OpenLoop, Workload, make_requests, poisson, simulate

MODELS = ("kimi-k2.5-mxfp4@mi355x/pp4tp1", "deepseek-v3.1-w8a8@atlas-a3/pp2tp8/hi")
MIXED = Lengths(shape="uniform", least=1000, most=65536)
ALIKE = Lengths(mean=32768)
SIZES = (512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152, 65536)


def workload(kind: str, model: CostModel, lengths: Lengths, hit: float) -> Workload:
    """``burst N``, ``load X`` of one stage's work, or ``loop N``."""
    name, number = kind.split()
    requests = make_requests(int(number) if name == "burst" else 150, lengths, prefix_hit=hit, block=16, seed=3)
    if name == "burst":
        return OpenLoop(requests)
    if name == "loop":
        return ClosedLoop(requests, int(number))
    seconds = float(np.mean([model.seconds(r.tokens - r.cached, r.cached) for r in requests]))
    return poisson(requests, float(number) / seconds, seed=5)


def later(kind: str, model: CostModel, stages: int, lengths: Lengths, hit: float) -> float:
    """How much above the best fixed size's mean TTFT isochunk's is, as a share."""
    deployment = Deployment(models=(model,) * stages, max_tokens=65536)

    def mean(policy: str, chunk: int | None = None) -> float:
        return float(simulate(deployment, workload(kind, model, lengths, hit), policy, chunk=chunk).ttft.mean())

    return mean("optimal") / min(mean("fixed", size) for size in SIZES) - 1


def main() -> None:
    models = load_models()
    rows = []
    for kind in ("burst 16", "load 0.3", "load 0.6", "load 0.85", "loop 4", "loop 16"):
        for name, lengths in (("1k-64k", MIXED), ("32k", ALIKE)):
            cases = itertools.product(MODELS, (2, 8), (0.0, 0.9))
            found = [later(kind, models[model], stages, lengths, hit) for model, stages, hit in cases]
            rows.append([kind, name, f"{np.mean(found):+.1%}", f"{min(found):+.1%}", f"{max(found):+.1%}"])
    print(table(["arrivals", "lengths", "mean", "best", "worst"], rows))


if __name__ == "__main__":
    main()
