"""One self-contained HTML page: no script, no font, no picture from elsewhere."""

from __future__ import annotations

from html import escape
from importlib.resources import files

from isochunk.report.data import Page
from isochunk.report.figures import steps_figure, timelines_figure, ttft_figure

__all__ = ["render"]


def render(page: Page) -> str:
    """The page as HTML; a part without data is left out.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    style = (files("isochunk.report") / "page.css").read_text(encoding="utf-8")
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(page.title)}</title><style>{style}</style></head><body>",
        f'<h1>{escape(page.title)}</h1><p class="headline">{escape(page.headline)}</p>',
        _table(page),
        *(f'<p class="hint">{escape(note)}</p>' for note in page.notes),
        *_figures(page),
        _facts(page),
        "</body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _figures(page: Page) -> list[str]:
    figures = []
    if page.timelines:
        hint = (
            f"The same {page.timelines[0].tokens:,} tokens on one time axis. A bar is one chunk on one stage, with "
            "its tokens; grey is a stage that waits."
        )
        figures.append(_figure("Where the stages wait", hint, timelines_figure(page.timelines)))
    if page.arms:
        hint = "A dot is one prompt, a bar the median, the dark mark what the cost model predicted for the chunks used."
        figures.append(_figure("Time to first token", hint, ttft_figure(page.arms)))
    if page.points:
        hint = "Each mark is one step on one stage. On the line the prediction is exact; the band is 10% either way."
        figures.append(_figure("Predicted and measured steps", hint, steps_figure(page.points), "narrow"))
    return figures


def _figure(heading: str, hint: str, svg: str, width: str = "wide") -> str:
    return f'<h2>{heading}</h2><p class="hint">{hint}</p><figure class="{width}">{svg}</figure>'


def _table(page: Page) -> str:
    if not page.rows:
        return ""
    head = "".join(f"<th>{escape(column)}</th>" for column in page.columns)
    rows = []
    before = None
    for cells in page.rows:
        kinds = [name for name, is_so in (("ours", "isochunk" in cells), ("group", cells[0] != before)) if is_so]
        before = cells[0]
        row = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        rows.append(f'<tr class="{" ".join(kinds)}">{row}</tr>')
    body = "\n".join(rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def _facts(page: Page) -> str:
    if not page.facts:
        return ""
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in page.facts)
    return f"<h2>What was measured</h2><dl>{items}</dl>"
