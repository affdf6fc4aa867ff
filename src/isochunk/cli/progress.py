"""How far a command has come, on stderr, so that stdout holds results only: a bar for people, lines for a log."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

__all__ = ["EVERY_S", "Progress", "say", "still"]

EVERY_S = 10.0
"""Seconds between two lines while nothing else is said."""


def say(text: str) -> None:
    """One line with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


@contextmanager
def still(line: Callable[[], str], every_s: float = EVERY_S) -> Iterator[None]:
    """Say ``line()`` every so often while the block runs, however long one thing in it takes."""
    done = threading.Event()

    def talk() -> None:
        while not done.wait(every_s):
            say(line())

    thread = threading.Thread(target=talk, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class Progress:
    """``total`` steps, shown as a bar on a terminal and as a line every few seconds elsewhere; use it with ``with``."""

    def __init__(self, text: str, total: int) -> None:
        from rich import progress
        from rich.console import Console

        console = Console(stderr=True)
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(text, total=total)
        self._text, self._done, self._total = text, 0, total
        self._began = time.monotonic()
        self._lines = still(self._line) if not console.is_terminal else None

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        self._bar.start()
        if self._lines is not None:
            say(self._line())
            self._lines.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._lines is not None:
            self._lines.__exit__(None, None, None)
            say(self._line())
        self._bar.stop()

    def advance(self, text: str | None = None) -> None:
        """One step done; ``text`` replaces the one shown."""
        self._done += 1
        self._text = text or self._text
        self._bar.update(self._task, advance=1, description=text)

    def _line(self) -> str:
        left = ""
        if 0 < self._done < self._total:
            seconds = (time.monotonic() - self._began) / self._done * (self._total - self._done)
            left = f", about {seconds:.0f} s left"
        return f"{self._done} of {self._total}{left}: {self._text}"
