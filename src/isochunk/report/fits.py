"""Measured steps against a fitted model, as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from isochunk.core.cost import CostModel
from isochunk.core.errors import ConfigError
from isochunk.report import ink

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_fit"]

Samples = tuple[CostModel, Sequence[float], Sequence[float], Sequence[float]]

_WIDTH, _HEIGHT = 9.6, 3.4  # inches; the height is of one stage
_POINTS = 400
_NEAR = 0.1  # part of the longest history within which a sample stands beside a line


def draw_fit(path: Path, stages: Mapping[int, Samples]) -> None:
    """Draw each stage's samples (model, chunks, histories, seconds): on the left the steps, on the right how far off.

    Raises:
        ConfigError: matplotlib is not installed, or the file can't be written.
    """
    with ink.drawing():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(_WIDTH, _HEIGHT * len(stages)), layout="constrained", facecolor=ink.PAPER)
        axes = figure.subplots(len(stages), 2, squeeze=False)
        for (stage, samples), (left, right) in zip(sorted(stages.items()), axes, strict=True):
            _steps(left, samples, f"stage {stage}: " if len(stages) > 1 else "")
            _misses(right, samples)
        try:
            figure.savefig(path)
        except (OSError, ValueError) as error:  # no such folder, or no such kind of picture
            raise ConfigError(f"can't draw {path}: {error}") from error


def _steps(axis: Axes, samples: Samples, prefix: str) -> None:
    model, *columns = samples
    chunk, history, seconds = (np.asarray(column, dtype=float) for column in columns)
    at = np.geomspace(chunk.min(), chunk.max() + 1, _POINTS)
    longest = float(history.max())
    for place, colour in ((0.0, ink.OURS), (longest, ink.OTHER)):
        near = np.abs(history - place) <= _NEAR * longest
        axis.plot(at, model.seconds(at, place), color=colour, label=f"fitted after {place:.0f} tokens")
        axis.plot(chunk[near], seconds[near], "o", markersize=4, color=colour, label="measured near it")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("new tokens of the step")
    axis.set_ylabel("seconds")
    axis.set_title(f"{prefix}measured and fitted steps")
    axis.legend(fontsize=8)
    axis.grid(visible=True)


def _misses(axis: Axes, samples: Samples) -> None:
    model, *columns = samples
    chunk, history, seconds = (np.asarray(column, dtype=float) for column in columns)
    off = 100 * (model.seconds(chunk, history) / seconds - 1)
    drawn = axis.scatter(chunk, off, c=history, s=18, cmap="viridis")
    axis.axhline(0, color=ink.FIT)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("new tokens of the step")
    axis.set_ylabel("fitted over measured, % off")
    axis.set_title(f"how far the model is off: {np.median(np.abs(off)):.1f}% at the median")
    axis.grid(visible=True)
    axis.figure.colorbar(drawn, ax=axis, label="history, tokens")
