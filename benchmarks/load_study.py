"""isochunk under load against the best fixed size and the published rule at its best size, on random cases.

    python -m benchmarks.load_study --seeds 1,2                  # train seeds: its constants are chosen on them
    python -m benchmarks.load_study --seeds 101,102              # held out, for the verdict

Each case has its own sweeps: fifteen fixed sizes, and the rule with each of those as its first chunk. They do not
depend on the law and are kept in ``results/load-study/`` (one file a seed; remove it when the simulator changes).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from benchmarks.load_cases import BLOCK, KINDS, Case, cases
from isochunk.core.steps import StepPlanner
from isochunk.simulator import simulate
from isochunk.simulator.scheduler import Queue, Steps
from isochunk.simulator.share import ChunkPolicy, Chunks, Share

ROOT = Path(__file__).resolve().parent.parent
KEPT = Path("results/load-study")
LATER, RULE_LATER = 1.03, 1.02  # a loss is more than that over the best fixed size, or the rule's best size


class Outcome(NamedTuple):
    """Mean TTFT of isochunk over that of the best fixed size, and of the rule at its best size, of one case."""

    case: Case
    size: int
    over_fixed: float
    first: int
    over_rule: float


class Fixed(ChunkPolicy):
    """As many tokens as fit in a fixed size."""

    def __init__(self, size: int) -> None:
        self._size = size

    def share(self, queue: Queue, in_flight: Steps, now: float) -> Share:
        """The same in every step."""
        return Chunks(queue.prefills, self._size, ())


class Rule(ChunkPolicy):
    """The published rule on the true costs: every step takes the time of a first chunk of ``size`` tokens."""

    def __init__(self, size: int, case: Case) -> None:
        deployment = case.deployment
        self._model = deployment.models[0]
        self._planner = StepPlanner(
            stages=deployment.stages, max_chunk=deployment.max_tokens, block=deployment.block, min_chunk=BLOCK
        )
        self._planner.use("first_chunk", size)

    def share(self, queue: Queue, in_flight: Steps, now: float) -> Share:
        """As many tokens of the queue as take that time."""
        return Chunks(queue.prefills, self._planner.tokens(self._model, queue.prefills), ())


def mean_ttft(case: Case, policy: str | Callable[[], ChunkPolicy] = "optimal") -> float:
    """Mean seconds to first token."""
    return float(simulate(case.deployment, case.workload(), policy).ttft.mean())


def sweeps(case: Case) -> dict[str, dict[int, float]]:
    """Mean TTFT of every fixed size and of the rule with every first chunk but the smallest, from which it shrinks."""
    return {
        "fixed": {size: mean_ttft(case, partial(Fixed, size)) for size in case.sizes},
        "rule": {size: mean_ttft(case, partial(Rule, size, case)) for size in case.sizes[4:]},
    }


def kept_sweeps(seed: int, some: Sequence[Case]) -> dict[str, dict[str, dict[int, float]]]:
    """The sweeps of these cases of a seed, from its file where they are there."""
    file = KEPT / f"{seed}-{_version()}.json"
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    saved = time.monotonic()
    for case in some:
        if case.name not in known:
            known[case.name] = sweeps(case)
        if time.monotonic() - saved > 20 or case is some[-1]:
            saved = time.monotonic()
            KEPT.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(known), encoding="utf-8")
    return {
        name: {policy: {int(size): ttft for size, ttft in row.items()} for policy, row in both.items()}
        for name, both in known.items()
    }


def _version() -> str:
    """Of the cases. Whoever changes what the simulator finds removes the folder."""
    return hashlib.sha256((ROOT / "benchmarks/load_cases.py").read_bytes()).hexdigest()[:12]


def study(seed: int, count: int, ttft: Callable[[Case], float] = mean_ttft) -> list[Outcome]:
    """How isochunk does in each case of a seed."""
    some = list(cases(seed, count))
    swept = kept_sweeps(seed, some)
    outcomes = []
    for case in some:
        fixed, rule = swept[case.name]["fixed"], swept[case.name]["rule"]
        size, first = min(fixed, key=fixed.__getitem__), min(rule, key=rule.__getitem__)
        own = ttft(case)
        outcomes.append(Outcome(case, size, own / fixed[size], first, own / rule[first]))
    return outcomes


def summary(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """One row a kind of arrivals, and one of all."""
    rows = []
    for kind in ("all", *KINDS):
        part = [o for o in outcomes if kind in ("all", o.case.kind)]
        if not part:
            continue
        fixed, rule = [o.over_fixed for o in part], [o.over_rule for o in part]
        rows.append(
            [
                kind,
                str(len(part)),
                *(f"{fmean(fixed):.3f}", str(sum(ratio > LATER for ratio in fixed)), f"{max(fixed):.3f}"),
                *(f"{fmean(rule):.3f}", str(sum(ratio > RULE_LATER for ratio in rule)), f"{max(rule):.3f}"),
            ]
        )
    return rows


HEAD = ["arrivals", "cases", "mean", "above 1.03", "worst", "of the rule", "above 1.02", "worst of it"]
LOSS_HEAD = ["case", "arrivals", "what", "best size", "over it", "over the rule", "reason"]
FEW = 40  # steps of a case in which one more or less decides


def losses(outcomes: Sequence[Outcome], *, all_of_them: bool = False) -> list[list[str]]:
    """The cases in which the best fixed size is ahead, or the rule too, worst first, each with a reason."""
    lost = [o for o in outcomes if o.over_fixed > LATER or (all_of_them and o.over_rule > RULE_LATER)]
    return [
        [
            *(o.case.name, o.case.kind, o.case.traits, str(o.size)),
            *(f"{o.over_fixed:.3f}", f"{o.over_rule:.3f}", reason(o)),
        ]
        for o in sorted(lost, key=lambda o: -max(o.over_fixed / LATER, o.over_rule / RULE_LATER))
    ]


def reason(outcome: Outcome) -> str:
    """What differs between isochunk's steps and those of the best fixed size."""
    case = outcome.case
    own, best = (
        [step.seconds for step in simulate(case.deployment, case.workload(), policy, record=True).recorded[0]]
        for policy in ("optimal", partial(Fixed, outcome.size))
    )
    if len(best) < FEW:
        return f"few steps ({len(own)} and {len(best)})"
    ratio = median(own) / median(best)
    if ratio > 1.1:
        return f"steps {ratio:.2f} times as long"
    return f"steps {ratio:.2f} times as long: too short" if ratio < 0.9 else "the same steps end elsewhere"


def picture(outcomes: Sequence[Outcome], path: Path) -> None:
    """All ratios in order, over the best fixed size and over the rule at its best size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for label, ratios in (
        ("over the best fixed size", [o.over_fixed for o in outcomes]),
        ("over the published rule at its best first size", [o.over_rule for o in outcomes]),
    ):
        axes.plot([100 * at / len(ratios) for at in range(len(ratios))], sorted(ratios), label=label)
    axes.axhline(1.0, color="black", linewidth=0.6)
    axes.set(xlabel="percent of the cases", ylabel="mean TTFT of isochunk", ylim=(0.4, 1.25))
    axes.legend()
    figure.savefig(path, dpi=110)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1,2")
    parser.add_argument("--count", type=int, default=300, help="cases of each seed")
    parser.add_argument("--losses", type=int, default=30, help="print so many")
    parser.add_argument("--rule", action="store_true", help="count cases in which only the rule is ahead as losses too")
    parser.add_argument("--picture", type=Path, help="where to draw all ratios")
    given = parser.parse_args()
    outcomes = [o for seed in given.seeds.split(",") for o in study(int(seed), given.count)]
    print(table(HEAD, summary(outcomes)))
    print()
    print(table(LOSS_HEAD, losses(outcomes, all_of_them=given.rule)[: given.losses]))
    if given.picture:
        picture(outcomes, given.picture)


if __name__ == "__main__":
    main()
