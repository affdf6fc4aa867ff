"""Run a command of the set-up so that whoever waits sees it live: what it does, how long it has taken, in any log.

    python tools/signs_of_life.py "what it does" COMMAND...

Its lines are passed on with the time of day, but for those that only tell about registries or what is there already.
After ten seconds without one, a line says what was said last. Needs no package; ends with the command's exit code.
"""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
import time

_EVERY_S = 10.0
_NOISE = ("WARNING: Location ", "Looking in ", "Requirement already satisfied", "  Using cached ", "Using cached ")
_WIDEST = 150


def main(text: str, command: list[str]) -> int:
    began = time.monotonic()
    say(text)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=read, args=(process, lines), daemon=True).start()
    last = "started"
    kept: list[str] = []
    while True:
        try:
            line = lines.get(timeout=_EVERY_S)
        except queue.Empty:
            say(f"{text}: {time.monotonic() - began:.0f} s so far, last: {last}")
            continue
        if line is None:
            break
        kept = [*kept[-30:], line]
        if line.strip() and not line.startswith(_NOISE):
            last = line.strip()[:_WIDEST]
            say(f"  {last}")
    code = process.wait()
    if code:
        say(f"{text}: failed with exit code {code}; its last lines:")
        print("".join(kept), file=sys.stderr, flush=True)
    else:
        say(f"{text}: done in {time.monotonic() - began:.0f} s")
    return code


def read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
