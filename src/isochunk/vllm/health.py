"""Whether isochunk does what it was enabled for: said in the log, in the status and as an HTTP answer."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = ["IN_A_ROW", "Attempt", "Health"]

logger = logging.getLogger("vllm.isochunk")

IN_A_ROW = 8  # times that the same thing fails, one after the other, before isochunk says that it is broken


@dataclass(slots=True)
class Attempt:
    """One try; ``idle`` when there was nothing to do in it, which is no success."""

    idle: bool = False


class Health:
    """Counts what went wrong. What fails now and then leaves a step to vLLM; what always fails plans nothing at all.

    Attributes:
        failed: errors of isochunk's since the start.
        last_error: the last of them.
        reasons: how many there were of each kind.
    """

    def __init__(self) -> None:
        self.failed = 0
        self.last_error: str | None = None
        self.reasons: Counter[str] = Counter()
        self._in_a_row: Counter[str] = Counter()

    @property
    def broken(self) -> list[str]:
        """What failed each of the last times."""
        return [what for what, times in self._in_a_row.items() if times >= IN_A_ROW]

    @contextmanager
    def attempt(self, what: str) -> Iterator[Attempt]:
        """Do something that must not stop serving: an error is counted and said, and ends here."""
        attempt = Attempt()
        try:
            yield attempt
        except Exception as error:  # noqa: BLE001 - whatever is wrong in isochunk, vLLM goes on with its own chunks
            self._fault(what, error)
        else:
            if not attempt.idle and self._in_a_row.pop(what, 0) >= IN_A_ROW:
                logger.warning("isochunk: %s works again", what)

    def _fault(self, what: str, error: Exception) -> None:
        self.failed += 1
        self.reasons[what] += 1
        self._in_a_row[what] += 1
        self.last_error = f"{what} failed: {type(error).__name__}: {error}"
        if self.failed == 1:
            logger.error("isochunk: %s failed; vLLM's own chunks are used for such steps", what, exc_info=error)
        if self._in_a_row[what] == IN_A_ROW:
            logger.error(
                "isochunk DOES NOT WORK: %s failed each of the last %d times (%s: %s); vLLM serves with its own "
                "chunks. Please report it, and disable isochunk until it is mended",
                what,
                IN_A_ROW,
                type(error).__name__,
                error,
                exc_info=error,
            )

    def as_dict(self) -> dict[str, Any]:
        """Plain data for the status and the health route."""
        return {
            "ok": not self.broken,
            "broken": self.broken,
            "failed": self.failed,
            "reasons": dict(self.reasons),
            "last_error": self.last_error,
        }
