"""Real processes on loopback: mock nodes and the proxy's own command."""

from __future__ import annotations

import functools
import json
import queue
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
from zygote import Forked

__all__ = ["MODEL_ARGUMENTS", "Node", "Process", "Proxy", "Start", "text", "until"]

MODEL_ARGUMENTS = ("--coefficients", "0.005,2e-5,1e-9,1e-8", "--stages", "2")


class Process:
    """A server process that has said where it listens."""

    def __init__(self, *arguments: str) -> None:
        self.log: list[str] = []
        self.popen = Forked(list(arguments))
        self._ports: queue.Queue[int] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @functools.cached_property
    def port(self) -> int:
        """Waited for only when it is asked for, so that processes start at the same time."""
        try:
            return self._ports.get(timeout=30)
        except queue.Empty:
            raise AssertionError("".join(self.log)) from None

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    @functools.cached_property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=f"http://{self.name}", timeout=30)

    def _read(self) -> None:
        for line in self.popen.stdout:
            self.log.append(line)
            if "listening on" in line:
                self._ports.put(int(line.rsplit(" ", 1)[1]))

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait(10)

    def stop(self) -> int:
        if "http" in self.__dict__:
            self.http.close()
        if self.popen.poll() is None:
            self.popen.kill()
        code = self.popen.wait(10)
        self._reader.join(10)
        self.popen.stdout.close()
        return code

    def signal(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)


class Node(Process):
    """A mock node."""

    def __init__(self, role: str, *arguments: str) -> None:
        super().__init__("mock", role, *arguments)

    def state(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.http.get("/mock/state").json()
        return answer

    def set(self, **knobs: Any) -> None:
        assert self.http.post("/mock/knobs", json=knobs).status_code == 200


class Proxy(Process):
    """The proxy's command."""

    def __init__(self, *arguments: str) -> None:
        super().__init__("isochunk", "proxy", "--port", "0", *arguments)

    def complete(self, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"model": "mock", "prompt": "hello", "max_tokens": 3, **fields})

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry these labels."""
        total = 0.0
        for line in self.http.get("/metrics").text.splitlines():
            sample, _, value = line.rpartition(" ")
            if sample.split("{")[0] == name and all(f'{k}="{v}"' in sample for k, v in labels.items()):
                total += float(value)
        return total

    def is_idle(self) -> bool:
        names = ("active_requests", "node_requests", "node_tokens", "node_backlog_seconds", "node_held")
        return all(self.metric(f"isochunk_proxy_{name}") == 0 for name in names)


def until(condition: Callable[[], Any], seconds: float = 15.0) -> None:
    """Wait for a condition."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.02)


def text(response: httpx.Response) -> str:
    """The answer's text, streamed or not."""
    if "event-stream" not in response.headers["content-type"]:
        return str(response.json()["choices"][0]["text"])
    events = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


class Start:
    """Starts processes and stops them at the end."""

    def __init__(self) -> None:
        self._processes: list[Process] = []

    def node(self, role: str, *arguments: str) -> Node:
        node = Node(role, *arguments)
        self._processes.append(node)
        return node

    def proxy(self, prefill: list[Node], decode: list[Node], *arguments: str) -> Proxy:
        lists: list[str] = []
        for kind, nodes in (("prefiller", prefill), ("decoder", decode)):
            if nodes:
                lists += [f"--{kind}-hosts", "127.0.0.1", f"--{kind}-ports", *(str(n.port) for n in nodes)]
        proxy = Proxy(*lists, *arguments)
        self._processes.append(proxy)
        return proxy

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.stop()
