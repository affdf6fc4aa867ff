"""What the proxy writes of itself: warnings, and a line for each request."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import quote

from isochunk.proxy.client import Client

__all__ = ["Journal"]

_MOST_LINES = 20_000  # that wait for a slow reader of the log; more are counted and dropped
_EVERY_S = 0.2
_LAST_S = 1.0


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
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._write_on, daemon=True)

    def take_over(self, level: str) -> None:
        """Become the handler of all loggers."""
        logging.basicConfig(level=level.upper(), handlers=[self], force=True)
        self._thread.start()

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

    def _write_on(self) -> None:
        while not self._closed.wait(_EVERY_S):
            self._write()
        self._write()

    def _write(self) -> None:
        lines, self._lines = self._lines, []
        dropped, self._dropped = self._dropped, 0
        if dropped:
            lines.append(f"{dropped} lines of the log were dropped: its reader is too slow")
        data = "".join(line + "\n" for line in lines).encode(errors="replace")
        with suppress(OSError):  # nobody is there to be told
            while data:
                data = data[os.write(2, data) :]  # not by sys.stderr, whose lock would hold up the exit

    def close(self) -> None:
        """Write what waits, unless the reader has stopped."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(_LAST_S)
        if self._thread.is_alive():  # the interpreter's own last words must not wait for the reader either
            with open(os.devnull, "w", encoding="ascii") as nowhere:
                os.dup2(nowhere.fileno(), 2)
        super().close()


def _notes(notes: Mapping[str, str]) -> str:
    return "".join(f" {name}={value}" for name, value in notes.items())
