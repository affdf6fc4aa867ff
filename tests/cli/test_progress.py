"""Signs of life in a log: what is done, what is left, and something said however long one thing takes."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from isochunk.cli.progress import Progress, still

LIVE = Path(__file__).parents[2] / "tools" / "signs_of_life.py"


def test_something_is_said_while_one_thing_takes_long(capfd: pytest.CaptureFixture[str]) -> None:
    said = threading.Semaphore(0)

    def line() -> str:
        said.release()
        return "still here"

    with still(line, every_s=0.01):
        for _ in range(3):
            assert said.acquire(timeout=60)
    assert capfd.readouterr().err.count("still here") >= 2


def test_without_a_terminal_progress_is_lines(capfd: pytest.CaptureFixture[str]) -> None:
    with Progress("sending", 3) as progress:
        progress.advance()
        progress.advance("third")
    first, last = capfd.readouterr().err.splitlines()
    assert first.endswith("0 of 3: sending")
    assert "2 of 3, about" in last
    assert last.endswith("left: third")


def live(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(LIVE), "trying", sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_set_up_passes_on_what_is_done_without_the_registries_noise() -> None:
    done = live("print('WARNING: Location file:///x is ignored'); print('Collecting torch')")
    assert done.returncode == 0
    assert "Collecting torch" in done.stdout
    assert "Location" not in done.stdout


def test_set_up_that_fails_shows_all_of_its_last_lines() -> None:
    done = live("print('WARNING: Location file:///x is ignored'); raise SystemExit(3)")
    assert done.returncode == 3
    assert "failed with exit code 3" in done.stdout
    assert "Location" in done.stderr
