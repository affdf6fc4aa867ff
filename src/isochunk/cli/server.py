"""A vLLM server as a child process: started, waited for with progress, and always stopped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from isochunk.core.errors import ConfigError

__all__ = ["free_port", "running_server"]

_MARKS = {
    "Starting to load model": "loading the model",
    "Warming up model": "compiling and warming up",
    "isochunk: probing": "probing: what does a prefill step cost here?",
    "isochunk: using the stored profile": "using the stored profile",
    "isochunk: the probe took": "starting the HTTP server",
}
_STOP_S = 20.0


def free_port() -> int:
    """A port on the loopback address that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
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
) -> Iterator[str]:
    """Start ``isochunk serve``'s command, yield its URL when it answers, stop it with all its processes.

    Raises:
        ConfigError: it ended, or did not answer in time; with the end of its log.
    """
    from isochunk.vllm.launch import launch

    port = free_port()
    options = ["--host", "127.0.0.1", "--port", str(port), *options]
    command, environment = launch(str(model), options, {**os.environ, **(environ or {})})
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            _wait(process, port, log, time.monotonic() + timeout_s, progress)
            yield f"http://127.0.0.1:{port}"
        finally:
            _stop(process)


def _wait(
    process: subprocess.Popen[bytes], port: int, log: Path, deadline: float, progress: Callable[[str], None]
) -> None:
    said = "starting vLLM"
    progress(said)
    while not _answers(port):
        if process.poll() is not None or time.monotonic() > deadline:
            ended = f"ended with exit code {process.returncode}" if process.poll() is not None else "did not answer"
            raise ConfigError(f"vLLM {ended}; the end of {log}:\n{_tail(log)}")
        text = log.read_text(encoding="utf-8", errors="replace")
        reached = [(text.rfind(mark), what) for mark, what in _MARKS.items() if mark in text]
        if reached and max(reached)[1] != said:
            said = max(reached)[1]
            progress(said)
        time.sleep(0.5)


def _answers(port: int) -> bool:
    import httpx

    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200
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
