"""Servers as child processes: started, waited for with progress, and always stopped."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from isochunk.core.errors import ConfigError
from isochunk.deployment.launch import launch

__all__ = ["child_process", "free_port", "running_process", "running_server"]

_MARKS = {
    "Starting to load model": "loading the model",
    "Warming up model": "compiling and warming up",
    "isochunk: probing": "probing: what does a prefill step cost here?",
    "isochunk: using the stored profile": "using the stored profile",
    "isochunk: the probe took": "starting the HTTP server",
}
_PROBE = re.compile(r"isochunk: (probing, .*)")
_HOST = "127.0.0.1"
_OPEN = "ISOCHUNK_OPEN_POLICY"  # servers of our own, on loopback: whoever measures them may change their policy
_STOP_S = 20.0
_SIGN_OF_LIFE_S = 10.0


def free_port() -> int:
    """A port on the loopback address that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


@contextmanager
def running_server(
    model: Path,
    options: Sequence[str],
    *,
    log: Path,
    timeout_s: float = 900.0,
    environ: dict[str, str] | None = None,
    progress: Callable[[str], None] = lambda text: None,
    plugins: Sequence[str] = ("isochunk",),
) -> Iterator[str]:
    """Start ``isochunk serve``'s command, yield its URL when it answers, stop it with all its processes.

    Args:
        plugins: vLLM plugins to load (`launch`).

    Raises:
        ConfigError: it ended, or did not answer in time; with the end of its log.
    """
    port = free_port()
    options = ["--host", _HOST, "--port", str(port), *options]
    command, environment = launch(str(model), options, {_OPEN: "1", **os.environ, **(environ or {})}, plugins=plugins)
    progress("starting vLLM")
    url = f"http://{_HOST}:{port}"
    with running_process(command, environment, health=f"{url}/health", log=log, timeout_s=timeout_s, progress=progress):
        yield url


@contextmanager
def running_process(
    command: Sequence[str],
    environment: dict[str, str],
    *,
    health: str,
    log: Path,
    timeout_s: float = 60.0,
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server, wait until ``health`` answers 200, and stop it with all its processes.

    Raises:
        ConfigError: it ended, or did not answer in time; with the end of its log.
    """
    with child_process(command, environment, log) as process:
        _wait(process, health, log, time.monotonic() + timeout_s, progress)
        yield process


@contextmanager
def child_process(command: Sequence[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is ended, with all its children, at the end; its output goes to ``log``.

    Also when this one is told to end by SIGTERM or SIGHUP, unless somebody else handles these signals.
    """
    _leave_when_told()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        # A process group of its own, to end all of it, but no session: Linux shares the cores out by session, and
        # servers that shared them in that way were seen to get none for half a minute (Linux 6.18).
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        try:
            yield process
        finally:
            _stop(process)


def _leave_when_told() -> None:
    """Have these signals end this process as an exception does, by way of what must be cleaned up."""
    if threading.current_thread() is threading.main_thread():
        for sign in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(sign) is signal.SIG_DFL:
                signal.signal(sign, _leave)


def _leave(sign: int, frame: object) -> None:
    sys.exit(128 + sign)


def _wait(
    process: subprocess.Popen[bytes], health: str, log: Path, deadline: float, progress: Callable[[str], None]
) -> None:
    said, since, next_sign = "starting", time.monotonic(), time.monotonic() + _SIGN_OF_LIFE_S
    while not _answers(health):
        if process.poll() is not None or time.monotonic() > deadline:
            ended = f"ended with exit code {process.returncode}" if process.poll() is not None else "did not answer"
            raise ConfigError(f"the server {ended}; the end of {log}:\n{_tail(log)}")
        text = log.read_text(encoding="utf-8", errors="replace")
        reached = [(text.rfind(mark), what) for mark, what in _MARKS.items() if mark in text]
        if reached and max(reached)[1] != said:
            said, since = max(reached)[1], time.monotonic()
            progress(said)
            next_sign = since + _SIGN_OF_LIFE_S
        elif (now := time.monotonic()) >= next_sign:
            probed = _PROBE.findall(text)
            progress(f"still {probed[-1] if probed and said.startswith('probing') else said}, for {now - since:.0f} s")
            next_sign = now + _SIGN_OF_LIFE_S
        time.sleep(0.5)


def _answers(url: str) -> bool:
    import httpx

    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server's process group: first as Ctrl-C would, then for certain."""
    for sign, patience in ((signal.SIGINT, _STOP_S), (signal.SIGKILL, _STOP_S)):
        try:
            os.killpg(process.pid, sign)
            process.wait(patience)
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
    process.wait()
