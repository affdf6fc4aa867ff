"""Starts Python processes quickly: imports everything once, then forks for each.

Run as a script with a socket's descriptor; every message is the arguments, with the descriptor for the output beside.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

__all__ = ["Forked"]

_MOST = 1 << 16


def _serve(channel: socket.socket) -> None:
    import isochunk.cli.app
    import isochunk.proxy.mock
    import isochunk.proxy.server

    running: set[int] = set()
    while True:
        ready, _, _ = select.select([channel], [], [], 0.01)
        for pid in list(running):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                running.discard(pid)
                channel.send(json.dumps([pid, os.waitstatus_to_exitcode(status)]).encode())
        if not ready:
            continue
        data, descriptors, _, _ = socket.recv_fds(channel, _MOST, 1)
        if not data:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            return
        module, *arguments = json.loads(data)
        pid = os.fork()
        if pid == 0:
            channel.close()
            os.dup2(descriptors[0], 1)
            os.dup2(descriptors[0], 2)
            os.close(descriptors[0])
            sys.argv = [module, *arguments]
            main = isochunk.proxy.mock.main if module == "mock" else isochunk.cli.app.main
            code = 0
            try:
                main()
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
            except BaseException:  # noqa: BLE001  a process ends here
                traceback.print_exc()
                code = 1
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
        os.close(descriptors[0])
        running.add(pid)
        channel.send(json.dumps([pid, None]).encode())


class _Zygote:
    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ISOCHUNK_")}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", str(Path(__file__)), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
        )
        theirs.close()
        self._ended: dict[int, int] = {}

    def fork(self, arguments: list[str], output: int) -> int:
        socket.send_fds(self._channel, [json.dumps(arguments).encode()], [output])
        while True:
            pid, code = json.loads(self._channel.recv(_MOST))
            if code is None:
                return int(pid)
            self._ended[pid] = code

    def code(self, pid: int) -> int | None:
        while pid not in self._ended and select.select([self._channel], [], [], 0)[0]:
            ended, code = json.loads(self._channel.recv(_MOST))
            self._ended[ended] = code
        return self._ended.get(pid)


@functools.cache
def _zygote() -> _Zygote:
    return _Zygote()


class Forked:
    """What `subprocess.Popen` is, as far as the tests need it; for one thread."""

    def __init__(self, arguments: list[str]) -> None:
        reading, writing = os.pipe()
        self.pid = _zygote().fork(arguments, writing)
        os.close(writing)
        self.stdout = os.fdopen(reading)

    def poll(self) -> int | None:
        return _zygote().code(self.pid)

    def wait(self, seconds: float) -> int:
        end = time.monotonic() + seconds
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), seconds)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
