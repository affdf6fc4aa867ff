"""What a page shows, as plain data; whoever makes a page fills these in."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Arm", "Page", "Points", "Timeline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One prompt's way through the pipeline.

    Attributes:
        chunks: tokens of each step.
        entered_s: when each step entered the pipeline, on any clock.
        measured_s: seconds of each step on one stage.
        ours: drawn in isochunk's colour.
    """

    label: str
    tokens: int
    stages: int
    chunks: tuple[int, ...]
    entered_s: tuple[float, ...]
    measured_s: tuple[float, ...]
    ours: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Steps with their measured and predicted seconds; ``kind`` is ``fit``, ``other``, ``rule`` or ``ours``."""

    label: str
    kind: str
    measured_s: tuple[float, ...]
    predicted_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """The samples of one policy at one prompt length, in seconds."""

    label: str
    tokens: int
    ttft_s: tuple[float, ...]
    predicted_s: float | None = None
    ours: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One report.

    Attributes:
        headline: the sentence a person quotes.
        facts: name and value of what was measured on; shown as a list.
        columns: header of the table.
        rows: cells of the table; the first is a label.
        notes: sentences under the table, such as what was left out.
        timelines: drawn above each other on one time axis.
    """

    title: str
    headline: str
    facts: tuple[tuple[str, str], ...] = ()
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()
    timelines: tuple[Timeline, ...] = ()
    points: tuple[Points, ...] = ()
    arms: tuple[Arm, ...] = ()
