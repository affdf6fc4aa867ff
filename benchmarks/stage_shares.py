"""A share of a core for each pipeline stage: stages on one core then take no time from one another.

Without it a stage runs as fast as the other one lets it, and a pipeline whose stages slow each other down is none.
Shares are hard limits of Linux's control groups, version 1 or 2, and need root. Linux gives them out every
10 milliseconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil  # vLLM's own dependency

from isochunk.core.errors import ConfigError

__all__ = ["share_cores"]

_PERIOD_US = 10_000
_LOOK_S = 0.2
_WORKER = "VLLM::Worker_PP"  # the title that vLLM gives to the process of a stage
_ROOTS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))  # of version 1 and version 2


@contextmanager
def share_cores(share: float) -> Iterator[dict[int, Path]]:
    """Hold every stage that this process starts inside the block, by way of its servers, to ``share`` of a core.

    Yields the control groups of the stages held so far, by process id.

    Raises:
        ConfigError: this machine does not let us limit a process.
    """
    groups: dict[int, Path] = {}
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_LOOK_S):
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    if process.pid not in groups and _WORKER in "".join(process.cmdline()):
                        groups[process.pid] = _group(process.pid, share)

    _remove(_group(None, share))  # what can't be done is said here
    watcher = threading.Thread(target=watch, name="stage shares")
    watcher.start()
    try:
        yield groups
    finally:
        over.set()
        watcher.join()
        for group in groups.values():
            _remove(group)


def _group(pid: int | None, share: float) -> Path:
    """A control group that gets ``share`` of a core, with the process in it."""
    root = next((root for root in _ROOTS if (root / "cgroup.procs").exists()), _ROOTS[-1])
    group = root / f"isochunk-stage-{pid}"
    quota_us = round(share * _PERIOD_US)
    try:
        group.mkdir(exist_ok=True)
        if (group / "cpu.max").exists():
            (group / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}", encoding="ascii")
        else:
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US), encoding="ascii")
            (group / "cpu.cfs_quota_us").write_text(str(quota_us), encoding="ascii")
        if pid is not None:
            (group / "cgroup.procs").write_text(str(pid), encoding="ascii")
    except OSError as error:
        raise ConfigError(
            f"a share of {share:g} cores for a stage can't be set: {error}; run as root where the cpu controller of "
            "Linux's control groups can be written to, or give each stage a core of its own and a share of 1"
        ) from error
    return group


def _remove(group: Path) -> None:
    for _ in range(50):  # a process that was killed stays in its group for a moment
        with suppress(OSError):
            group.rmdir()
        if not group.exists():
            return
        time.sleep(_LOOK_S)
