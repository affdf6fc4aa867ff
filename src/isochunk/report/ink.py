"""Colours that follow the page's light or dark theme, and SVG text out of matplotlib figures."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from isochunk.core.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "FIT",
    "GRID",
    "IDLE",
    "INK",
    "MUTED",
    "OTHER",
    "OTHER_2",
    "OURS",
    "OURS_2",
    "PAPER",
    "drawing",
    "need_matplotlib",
    "svg",
]

# matplotlib draws with these; in the SVG each becomes a CSS variable of the page. Each is a colour that
# nothing else in a figure has.
INK = "#101011"
MUTED = "#606061"
GRID = "#d0d0d1"
PAPER = "#fefefd"
IDLE = "#e8e8e7"
OURS = "#0a7a6b"
OURS_2 = "#12978a"
OTHER = "#c05c21"
OTHER_2 = "#d9813f"
FIT = "#7a7a8b"

_VARIABLES = {
    INK: "ink",
    MUTED: "muted",
    GRID: "grid",
    PAPER: "paper",
    IDLE: "idle",
    OURS: "ours",
    OURS_2: "ours-2",
    OTHER: "other",
    OTHER_2: "other-2",
    FIT: "fit",
}


def need_matplotlib() -> Any:
    """The module, for whoever wants to know before a long measurement that a report can be drawn.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ConfigError("a report needs matplotlib: pip install 'isochunk[plot]'") from error
    return mpl


@contextmanager
def drawing() -> Iterator[None]:
    """Style of every figure.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    mpl = need_matplotlib()
    style: dict[str, Any] = {
        "svg.fonttype": "none",  # text stays text: searchable, and in the page's own font
        "svg.hashsalt": "isochunk",
        "path.simplify": False,  # a dot is a line of no length
        "font.size": 10,
        "text.color": INK,
        "axes.labelcolor": MUTED,
        "axes.edgecolor": GRID,
        "axes.facecolor": "none",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 10,
        "axes.titlelocation": "left",
        "figure.facecolor": "none",
        "grid.color": GRID,
        "grid.linewidth": 0.6,
        "xtick.color": GRID,
        "ytick.color": GRID,
        "xtick.labelcolor": MUTED,
        "ytick.labelcolor": MUTED,
        "legend.frameon": False,
    }
    with mpl.rc_context(style):
        yield


def svg(figure: Figure, name: str, description: str) -> str:
    """The figure as an ``<svg>`` element for inlining; ``name`` keeps its ids apart from other figures'."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", pad_inches=0.05, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var(--{variable})")
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text)
    # The page sets the width; the view box keeps the shape.
    text = re.sub(r'<svg([^>]*?) width="[^"]*"', r"<svg\1", text, count=1)
    text = re.sub(r'<svg([^>]*?) height="[^"]*"', r"<svg\1", text, count=1)
    return text.replace("<svg", f'<svg role="img" aria-label="{description}"', 1)
