"""Headless Chromium, driven over its DevTools protocol's pipe: colours, keys, sizes, pictures."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

__all__ = ["CHROMIUM", "FLAGS", "Page", "browsing"]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)
READY = "document.body?.dataset.ready"
_KEYS = {"Tab": 9, "Enter": 13, " ": 32, "ArrowRight": 39, "ArrowDown": 40, "ArrowLeft": 37, "ArrowUp": 38}


class Page:
    """One page of a browser; each call waits for its answer."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = send, receive
        self._left = b""
        self._calls = 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A method of the protocol; events that come meanwhile are dropped."""
        self._calls += 1
        message = {"id": self._calls, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._calls:
                assert "error" not in answer, answer["error"]
                return dict(answer["result"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            read = os.read(self._receive, 1 << 20)
            assert read, "the browser is gone"
            self._left += read
        message, _, self._left = self._left.partition(b"\0")
        return dict(json.loads(message))

    def show(self, url: str, *, width: int = 1200, dark: bool = False, ready: str = READY) -> None:
        """Open a page and wait until ``ready`` is true in it."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call("Page.navigate", url=url)
        self.until(ready)

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        told = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait until an expression is true in the page."""
        frames = f"const go = () => ({condition}) ? done(true) : requestAnimationFrame(go); go();"
        self.run(f"new Promise((done) => {{ {frames} }})")

    def press(self, key: str, *, shift: bool = False) -> None:
        """A key goes down and up again."""
        code = _KEYS.get(key, ord(key[0].upper()))
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        common = {"key": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def picture(self, path: Path) -> None:
        """The whole page as PNG."""
        told = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(told["data"]))


@contextmanager
def browsing(folder: Path) -> Iterator[Page]:
    """A browser of its own, whose profile is in the folder; ended at the end."""
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed (Debian's package chromium)")
    to_read, to_send = os.pipe()
    received, to_write = os.pipe()
    # The protocol's pipe is 3 for commands and 4 for answers; dup first, since either may be one of the two already.
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_read, to_write)]
    moved = ["sh", "-c", f'exec "$@" 3</dev/fd/{ends[0]} 4>/dev/fd/{ends[1]}', "sh"]
    command = [*moved, CHROMIUM, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={folder}"]
    process = subprocess.Popen(command, pass_fds=ends, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for end in (*ends, to_read, to_write):
        os.close(end)
    try:
        yield Page(to_send, received)
    finally:
        process.kill()
        process.wait()
        os.close(to_send)
        os.close(received)
