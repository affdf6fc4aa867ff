"""A progress bar on stderr, so that stdout holds results only."""

from __future__ import annotations

from typing import Self

__all__ = ["Progress"]


class Progress:
    """A bar of ``total`` steps; use it with ``with``."""

    def __init__(self, text: str, total: int) -> None:
        from rich import progress
        from rich.console import Console

        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task(text, total=total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def advance(self, text: str | None = None) -> None:
        """One step done; ``text`` replaces the one shown."""
        self._bar.update(self._task, advance=1, description=text)
