"""The figures of a page, each an inline SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from isochunk.core.errors import ConfigError
from isochunk.core.flowshop import busy_intervals, idle_share
from isochunk.report import ink
from isochunk.report.data import Arm, Points, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["save_timelines", "steps_figure", "timelines_figure", "ttft_figure"]

_WIDTH = 9.6  # inches; the page scales it
_LANE = 0.34  # inches a stage
_MANY = 500  # marks; more are drawn as one shape


def timelines_figure(timelines: Sequence[Timeline]) -> str:
    """Each prompt's stages as lanes, one prompt above the other on the same time axis; grey is idle."""
    with ink.drawing():
        figure = _draw_timelines(timelines)
        return ink.svg(figure, "timelines", "Busy and idle time of each pipeline stage, one prompt per policy")


def save_timelines(path: Path, timelines: Sequence[Timeline]) -> None:
    """The figure of `timelines_figure` as a file of its own; its name's ending says which kind (png, svg, pdf).

    Raises:
        ConfigError: matplotlib is not installed, does not know the ending, or can't write the file.
    """
    with ink.drawing():
        try:
            _draw_timelines(timelines).savefig(path, facecolor=ink.PAPER, dpi=200)
        except (OSError, ValueError) as error:
            raise ConfigError(f"can't write {path}: {error}; name a .png, .svg or .pdf file") from error


def _draw_timelines(timelines: Sequence[Timeline]) -> Figure:
    from matplotlib.figure import Figure

    heights = [timeline.stages for timeline in timelines]
    figure = Figure(figsize=(_WIDTH, sum(heights) * _LANE + 0.55 * len(timelines) + 0.4), layout="constrained")
    axes = figure.subplots(len(timelines), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    longest = 0.0
    for axis, timeline in zip(axes, timelines, strict=True):
        longest = max(longest, _lanes(axis, timeline))
    for axis, timeline in zip(axes, timelines, strict=True):
        _chunk_labels(axis, timeline, longest)
    axes[-1].set_xlim(0, longest * 1.005)
    axes[-1].set_xlabel("seconds since the prompt entered the engine")
    return figure


def _lanes(axis: Axes, timeline: Timeline) -> float:
    busy = busy_intervals(timeline.entered_s, timeline.measured_s, timeline.stages)
    end = busy[-1][-1][1]
    shades = (ink.OURS, ink.OURS_2) if timeline.ours else (ink.OTHER, ink.OTHER_2)
    _bars(axis, [[(0.0, end)]] * timeline.stages, ink.IDLE)
    for odd, shade in enumerate(shades):
        _bars(axis, [intervals[odd::2] for intervals in busy], shade)
    axis.set_yticks(range(timeline.stages), [f"stage {stage + 1}" for stage in range(timeline.stages)])
    axis.set_ylim(timeline.stages - 0.5, -0.5)
    axis.tick_params(length=0)
    axis.spines[["left", "bottom"]].set_visible(False)
    axis.set_title(
        f"{timeline.label}: first token after {f'{end:#.3g}'.rstrip('.')} s, {len(timeline.chunks)} "
        f"{'chunk' if len(timeline.chunks) == 1 else 'chunks'}, stages idle {idle_share(busy):.0%} of the time"
    )
    return end


def _bars(axis: Axes, stages: Sequence[Sequence[tuple[float, float]]], colour: str) -> None:
    """Bars on the lanes of these stages as one shape: a shape each takes a browser seconds at ten thousand."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Shape

    corners = [
        corner
        for stage, intervals in enumerate(stages)
        for start, end in intervals
        for corner in ((start, stage - 0.42), (end, stage - 0.42), (end, stage + 0.42), (start, stage + 0.42), (0, 0))
    ]
    if corners:
        codes = [Shape.MOVETO, Shape.LINETO, Shape.LINETO, Shape.LINETO, Shape.CLOSEPOLY] * (len(corners) // 5)
        axis.add_patch(PathPatch(Shape(corners, codes), facecolor=colour, linewidth=0))


def _chunk_labels(axis: Axes, timeline: Timeline, longest: float) -> None:
    """The chunk's tokens inside each bar that is wide enough for them, upright in a narrow one of the first stage."""
    character = longest * 0.0085
    for stage, intervals in enumerate(busy_intervals(timeline.entered_s, timeline.measured_s, timeline.stages)):
        for (start, end), chunk in zip(intervals, timeline.chunks, strict=True):
            text = str(chunk)
            upright = end - start < (len(text) + 0.6) * character
            if not upright or (stage == 0 and end - start > 1.5 * character):
                axis.text(
                    (start + end) / 2,
                    stage,
                    text,
                    color=ink.PAPER,
                    ha="center",
                    va="center",
                    fontsize=6.5 if upright else 8,
                    rotation=90 if upright else 0,
                )


def steps_figure(points: Sequence[Points]) -> str:
    """Predicted against measured seconds of each step, with the diagonal and a band of 10% around it."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    looks = {
        "fit": ("o", ink.FIT, "none"),
        "other": ("s", ink.OTHER, "none"),
        "rule": ("^", ink.OTHER, "none"),
        "ours": ("o", ink.OURS, ink.OURS),
    }
    with ink.drawing():
        figure = Figure(figsize=(5.4, 4.6), layout="constrained")
        axis = figure.subplots()
        values = [t for series in points for t in (*series.measured_s, *series.predicted_s) if t > 0]
        low, high = min(values) / 1.3, max(values) * 1.3
        axis.plot([low, high], [low, high], color=ink.MUTED, linewidth=1)
        axis.fill_between([low, high], [low * 0.9, high * 0.9], [low * 1.1, high * 1.1], color=ink.IDLE, linewidth=0)
        for series in points:
            marker, edge, face = looks[series.kind]
            many = len(series.measured_s) > _MANY
            if many:
                _dots(axis, series, edge)
            axis.scatter(
                [] if many else series.measured_s,
                [] if many else series.predicted_s,
                s=14,
                marker=marker,
                edgecolors=edge,
                facecolors=face,
                linewidths=0.8,
                label=series.label,
                zorder=3,
            )
        axis.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), aspect="equal")
        for side in (axis.xaxis, axis.yaxis):
            side.set_major_locator(LogLocator(subs=(1, 2, 5)))
            side.set_major_formatter("{x:g}")
            side.set_minor_formatter(NullFormatter())
        axis.set(xlabel="measured seconds of a step", ylabel="predicted seconds of a step")
        axis.grid(True)
        axis.legend(loc="upper left", fontsize=9, labelcolor=ink.INK)
        return ink.svg(figure, "steps", "Predicted against measured step times; the band is plus and minus 10%")


def _dots(axis: Axes, series: Points, colour: str) -> None:
    """Very many marks as one shape: a line of no length a mark, which round ends make a dot."""
    across = [value for seconds in series.measured_s for value in (seconds, seconds, math.nan)]
    up = [value for seconds in series.predicted_s for value in (seconds, seconds, math.nan)]
    axis.plot(across, up, color=colour, linewidth=4, solid_capstyle="round", zorder=3)


def ttft_figure(arms: Sequence[Arm]) -> str:
    """Time to first token of every sample, a panel a prompt length, with medians and predictions."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    lengths = sorted({arm.tokens for arm in arms})
    labels = list(dict.fromkeys(arm.label for arm in arms))
    with ink.drawing():
        figure = Figure(figsize=(_WIDTH, 0.3 * len(labels) + 1.0), layout="constrained")
        axes = figure.subplots(1, len(lengths), sharey=True, squeeze=False)[0]
        for axis, tokens in zip(axes, lengths, strict=True):
            for arm in (arm for arm in arms if arm.tokens == tokens):
                _samples(axis, arm, labels.index(arm.label))
            axis.set_title(f"{tokens:,} tokens")
            axis.set_xlim(left=0)
            axis.xaxis.set_major_locator(MaxNLocator(4))
            axis.xaxis.set_major_formatter("{x:g}")
            axis.set_xlabel("TTFT, seconds")
            axis.grid(True, axis="x")
            axis.tick_params(length=0)
            axis.spines["left"].set_visible(False)
        axes[0].set_yticks(range(len(labels)), labels)
        axes[0].set_ylim(len(labels) - 0.5, -0.5)
        return ink.svg(figure, "ttft", "Time to first token of each policy at each prompt length")


def _samples(axis: Axes, arm: Arm, row: int) -> None:
    colour = ink.OURS if arm.ours else ink.OTHER
    axis.barh(row, median(arm.ttft_s), height=0.62, color=colour, alpha=0.35, linewidth=0)
    axis.scatter(arm.ttft_s, [row] * len(arm.ttft_s), s=12, color=colour, zorder=3, linewidths=0)
    if arm.predicted_s is not None:
        axis.plot([arm.predicted_s] * 2, [row - 0.42, row + 0.42], color=ink.INK, linewidth=1.4, zorder=4)
