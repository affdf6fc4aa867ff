"""Write docs/simulator-grid.md: isochunk against the best fixed size of each cell.

    python benchmarks/grid.py [--limit 32768]

Takes some minutes on two cores. Cells are independent; their fixed sweeps are most of the time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from multiprocessing import Pool
from pathlib import Path
from typing import NamedTuple

import numpy as np
from grid_cells import CONCURRENCY, HITS, STAGES, TOKENS, Cell, cells
from published_results import load_models, table

from isochunk.core.cost import CostModel

ROOT = Path(__file__).resolve().parent.parent
LATER, SLOWER, WORST, ALONE = 0.02, 0.03, 0.10, 0.01
LONGER = 8  # times as long a run, to tell a bad start from a bad pattern


class Outcome(NamedTuple):
    """A cell and how isochunk compares with the best fixed size, and alone with the best of all cuts."""

    cell: Cell
    size: int
    later: float
    slower: float
    above_optimum: float | None

    @property
    def good(self) -> bool:
        """Within the bounds on mean TTFT and throughput."""
        return self.later <= LATER and self.slower <= SLOWER


def measure(cell: Cell) -> Outcome:
    ttft, rate, size = cell.best_fixed()
    own_ttft, own_rate = cell.times("optimal")
    optimum = None
    if cell.concurrency == 1:
        optimum = own_ttft / min(best_cut(cell), ttft) - 1
    return Outcome(cell, size, own_ttft / ttft - 1, 1 - own_rate / rate, optimum)


def best_cut(cell: Cell, positions: int = 192) -> float:
    """TTFT of the best cut at ``positions`` places, by a dynamic programme for each longest step."""
    places = np.unique(np.linspace(cell.cached, cell.tokens, positions + 1).astype(int)).astype(float)
    chunk = places[None, :] - places[:, None]
    seconds = np.where((chunk > 0) & (chunk <= cell.limit), cell.model.seconds(chunk, places[:, None]), np.inf)
    finite = np.unique(seconds[np.isfinite(seconds)])
    longest = finite[np.linspace(0, len(finite) - 1, 80).astype(int)]
    return min(_total(np.where(seconds <= t, seconds, np.inf)) + (cell.stages - 1) * float(t) for t in longest)


def _total(seconds: np.ndarray) -> float:
    """Least sum of step times from the first place to the last."""
    total = np.full(len(seconds), np.inf)
    total[0] = 0.0
    for place in range(1, len(seconds)):
        total[place] = (total[:place] + seconds[:place, place]).min()
    return float(total[-1])


def summary(outcomes: Sequence[Outcome], name: str, key: Callable[[Cell], object]) -> list[list[str]]:
    rows = []
    for value in dict.fromkeys(key(outcome.cell) for outcome in outcomes):
        part = [outcome for outcome in outcomes if key(outcome.cell) == value]
        later = [outcome.later for outcome in part]
        rows.append(
            [
                f"{name} {value}",
                str(len(part)),
                f"{sum(outcome.good for outcome in part) / len(part):.1%}",
                str(sum(max(outcome.later, outcome.slower) > WORST for outcome in part)),
                f"{np.mean(later):+.1%}",
                f"{max(later):+.1%}",
            ]
        )
    return rows


def whole_grid(outcomes: Sequence[Outcome]) -> str:
    """One row a (model, P, tokens), one column a (concurrency, hit): how much later, in percent."""
    columns = [(c, h) for c in CONCURRENCY for h in HITS]
    found = {(o.cell.name, o.cell.stages, o.cell.tokens, o.cell.concurrency, o.cell.hit): o for o in outcomes}
    rows = []
    for model, stages, tokens in dict.fromkeys((o.cell.name, o.cell.stages, o.cell.tokens) for o in outcomes):
        cellular = [found[(model, stages, tokens, c, h)] for c, h in columns]
        marks = [f"{100 * o.later:+.1f}" if o.good else f"**{100 * o.later:+.1f}**" for o in cellular]
        rows.append([model.split("@")[0], str(stages), str(tokens), *marks])
    return table(["model", "P", "tokens", *(f"c{c} {h:.0%}" for c, h in columns)], rows)


def short_of(outcomes: Sequence[Outcome]) -> str:
    """Every cell outside the bounds, with the same cell over a longer run, and the reason."""
    rows = []
    for outcome in outcomes:
        if outcome.good:
            continue
        cell = outcome.cell
        own_ttft, own_rate = cell.times("optimal", longer=LONGER)
        ttft, rate = cell.times("fixed", outcome.size, longer=LONGER)
        long = Outcome(cell, outcome.size, own_ttft / ttft - 1, 1 - own_rate / rate, None)
        reason = "one stage" if cell.stages == 1 else "start" if long.good else "pattern"
        places = [cell.name.split("@")[0], str(cell.stages), str(cell.tokens), str(cell.concurrency), f"{cell.hit:.0%}"]
        shares = [f"{100 * share:+.1f}" for share in (outcome.later, outcome.slower, long.later, long.slower)]
        rows.append([*places, str(outcome.size), *shares, reason])
    head = ["model", "P", "tokens", "clients", "hit", "best size", "later", "slower", "later, long", "slower, long"]
    return table([*head, "reason"], rows)


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    """Heat map: later than the best fixed size, worst model of each cell."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7), layout="constrained")
    axes = figure.subplots(len(CONCURRENCY), len(HITS), sharex=True, sharey=True)
    for row, concurrency in enumerate(CONCURRENCY):
        for column, hit in enumerate(HITS):
            grid = np.array([[_worst(outcomes, p, n, concurrency, hit) for n in TOKENS] for p in STAGES])
            image = axes[row, column].imshow(100 * grid, vmin=-20, vmax=20, cmap="RdYlGn_r", aspect="auto")
            axes[row, column].set_title(f"concurrency {concurrency}, hit {hit:.0%}", fontsize=9)
            axes[row, column].set_xticks(range(len(TOKENS)), [f"{n // 1024}k" for n in TOKENS])
            axes[row, column].set_yticks(range(len(STAGES)), [f"P={p}" for p in STAGES])
    figure.colorbar(image, ax=axes, label="mean TTFT against the best fixed size of the cell, percent; worst model")
    figure.savefig(path, dpi=100)


def _worst(outcomes: Sequence[Outcome], stages: int, tokens: int, concurrency: int, hit: float) -> float:
    return max(
        o.later
        for o in outcomes
        if (o.cell.stages, o.cell.tokens, o.cell.concurrency, o.cell.hit) == (stages, tokens, concurrency, hit)
    )


def page(outcomes: Sequence[Outcome], limit: int) -> str:
    keys: list[tuple[str, Callable[[Cell], object]]] = [
        ("all", lambda _: "cells"),
        ("P =", lambda cell: cell.stages),
        ("tokens", lambda cell: cell.tokens),
        ("concurrency", lambda cell: cell.concurrency),
        ("hit", lambda cell: cell.hit),
        ("model", lambda cell: cell.name),
    ]
    rows = [row for name, key in keys for row in summary(outcomes, name, key)]
    alone = [o.above_optimum for o in outcomes if o.above_optimum is not None]
    head = ["cells", "number", "within bounds", "worse than 10%", "mean", "worst"]
    text = (ROOT / "benchmarks" / "grid_page.md").read_text()
    return text.format(
        limit=limit,
        summary=table(head, rows),
        alone=f"{max(alone):.2%}",
        alone_bad=sum(share > ALONE for share in alone),
        alone_count=len(alone),
        grid=whole_grid(outcomes),
        short=short_of(outcomes),
        longer=LONGER,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--limit", type=int, default=32768, help="max_num_batched_tokens of every cell")
    limit = parser.parse_args().limit
    models: dict[str, CostModel] = load_models()
    with Pool() as pool:
        outcomes = pool.map(measure, cells(models, limit), chunksize=8)
    draw(outcomes, ROOT / "docs" / "simulator-grid.png")
    (ROOT / "docs" / "simulator-grid.md").write_text(page(outcomes, limit), encoding="utf-8")


if __name__ == "__main__":
    main()
