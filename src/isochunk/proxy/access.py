"""What the proxy writes of itself: warnings, and a line for each request."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Mapping
from urllib.parse import quote

from isochunk.proxy.client import Client

__all__ = ["Journal"]

_MOST_LINES = 20_000  # that wait for a slow reader of the log; more are counted and dropped
_EVERY_S = 0.2


class Journal(logging.Handler):
    """Lines to standard error, written beside the event loop: a log that nobody reads must not stop the proxy.

    Args:
        access: write a line for each request.
    """

    def __init__(self, *, access: bool = True) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self._access = access
        self._lines: list[str] = []
        self._dropped = 0
        self._second = (0, "")

    def take_over(self, level: str) -> None:
        """Become the handler of all loggers."""
        logging.basicConfig(level=level.upper(), handlers=[self], force=True)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record until the next writing."""
        self._add(self.format(record))

    def finished(self, client: Client) -> None:
        """A request has been answered, or its client has gone."""
        if not self._access:
            return
        now = int(time.time())
        if now != self._second[0]:
            self._second = (now, time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now)))
        path = quote(client.path[:200], safe="/-._~")
        status = str(client.status) if not client.gone else f"{client.status or '-'} gone"
        seconds = time.monotonic() - client.began
        notes = _notes(client.notes)
        self._add(
            f"{self._second[1]} ACCESS {client.peer} {client.method} {path} {status} {client.sent} B "
            f"{seconds:.3f} s id={client.id}{notes}"
        )

    def _add(self, line: str) -> None:
        if len(self._lines) < _MOST_LINES:
            self._lines.append(line)
        else:
            self._dropped += 1

    async def write(self) -> None:
        """Write again and again, until cancelled."""
        while True:
            await asyncio.sleep(_EVERY_S)
            if self._lines:
                await asyncio.to_thread(self.flush)

    def flush(self) -> None:
        """Write what waits."""
        lines, self._lines = self._lines, []
        dropped, self._dropped = self._dropped, 0
        if dropped:
            lines.append(f"{dropped} lines of the log were dropped: its reader is too slow")
        if lines:
            sys.stderr.write("\n".join(lines) + "\n")
            sys.stderr.flush()


def _notes(notes: Mapping[str, str]) -> str:
    return "".join(f" {name}={value}" for name, value in notes.items())
