"""A proxy while its nodes are killed, stopped, slowed and made to fail, and clients hang up: is anything lost silently?

    python -m benchmarks.proxy_chaos --minutes 30

Real processes: the proxy, mock P and D nodes. One node of each role at most is in trouble at any moment. Every request
must end in the right answer or in an error that says so; the proxy's memory and descriptors must stay flat.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

from isochunk.proxy import mock_answers

MODEL = ("--coefficients", "0.004,2e-6,0,0", "--stages", "2")
FAULTS: tuple[dict[str, Any], ...] = (
    {"status": 500}, {"status": 503, "share": 0.5}, {"status": 404}, {"status": 429}, {"hang": True}, {"empty": True},
    {"slow_s": 0.5}, {"error_event": 0}, {"error_event": 2}, {"cut_after": 2}, {"stall_after": 2}, {"half_event": 2},
)  # fmt: skip
WELL = vars(mock_answers.Knobs())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Node:
    """A mock node that can be started again at its port."""

    def __init__(self, role: str) -> None:
        self.role, self.port = role, free_port()

    async def start(self) -> None:
        """Start its process."""
        more = MODEL if self.role == "prefill" else ("--interval", "0.01")
        command = ["-m", "isochunk.proxy.mock", self.role, "--port", str(self.port), *more]
        quiet = {"stdout": asyncio.subprocess.DEVNULL, "stderr": asyncio.subprocess.DEVNULL}
        self.process = await asyncio.create_subprocess_exec(sys.executable, *command, **quiet)

    async def knobs(self, session: aiohttp.ClientSession, **knobs: Any) -> None:
        """Set faults."""
        with suppress(aiohttp.ClientError, TimeoutError):
            url = f"http://127.0.0.1:{self.port}/mock/knobs"
            async with session.post(url, json=knobs, timeout=aiohttp.ClientTimeout(5)):
                pass

    async def end(self) -> None:
        """Kill it."""
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


class Chaos:
    """The trouble, the clients, and the account."""

    def __init__(self, minutes: float, clients: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.seconds, self.ran = minutes * 60, 0.0
        self.clients = clients
        self.nodes = {role: [Node(role) for _ in range(count)] for role, count in (("prefill", 2), ("decode", 3))}
        self.port = free_port()
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.strange: list[str] = []
        self.seen: list[dict[str, float]] = []

    @property
    def over(self) -> bool:
        """Enough of it."""
        return self.ran >= self.seconds

    async def run(self) -> dict[str, Any]:
        """Do it, and tell what became of the requests."""
        await asyncio.gather(*(node.start() for role in self.nodes for node in self.nodes[role]))
        await self._start_proxy()
        try:
            timeout = aiohttp.ClientTimeout(total=900)
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
                await self._wait(session)
                tasks = [self._client(session, index) for index in range(self.clients)]
                tasks += [self._trouble(session, role) for role in self.nodes]
                tasks += [self._hang_up(), self._watch()]
                await asyncio.gather(*tasks)
                idle = await self._idle(session)
        finally:
            with suppress(ProcessLookupError):
                self.proxy.kill()
            await self.proxy.wait()
            await asyncio.gather(*(node.end() for role in self.nodes for node in self.nodes[role]))
        return self._account(idle)

    async def _start_proxy(self) -> None:
        lists: list[str] = []
        for kind, role in (("prefiller", "prefill"), ("decoder", "decode")):
            lists += [f"--{kind}-hosts", "127.0.0.1", f"--{kind}-ports", *(str(n.port) for n in self.nodes[role])]
        limits = ["--prefill-timeout", "5", "--first-token-timeout", "5", "--silence-timeout", "5"]
        limits += ["--probe-interval", "1", "--probe-timeout", "1", "--log-level", "error", "--no-access-log"]
        code = "from isochunk.cli.app import main; main()"
        command = ["-c", code, "proxy", "--port", str(self.port), *lists, *limits]
        self.proxy = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=asyncio.subprocess.DEVNULL)

    async def _wait(self, session: aiohttp.ClientSession) -> None:
        for _ in range(600):
            with suppress(aiohttp.ClientError):
                async with session.get(f"http://127.0.0.1:{self.port}/health") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.1)
        raise SystemExit("the proxy did not come up")

    async def _client(self, session: aiohttp.ClientSession, index: int) -> None:
        number = 0
        while not self.over:
            number += 1
            prompt = f"client {index} request {number} " + "word " * self.random.randrange(2000)
            outcome = await self._ask(session, prompt)
            self.counts[outcome] += 1
            await asyncio.sleep(self.random.random() * 0.6)

    async def _ask(self, session: aiohttp.ClientSession, prompt: str) -> str:
        stream = self.random.random() < 0.7
        body = {"model": "mock", "prompt": prompt, "max_tokens": self.random.randrange(1, 12), "stream": stream}
        began = time.monotonic()
        try:
            async with session.post(f"http://127.0.0.1:{self.port}/v1/completions", json=body) as response:
                text = (await response.read()).decode()
        except (aiohttp.ClientError, TimeoutError) as error:
            self.strange.append(f"{time.monotonic() - began:.1f} s: {error!r}")
            return "silent"
        if response.status != 200:
            return f"error {response.status}"
        expected = "".join(mock_answers.words(body))
        if not stream:
            said = json.loads(text)["choices"][0]["text"]
            end = True
        else:
            events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
            if '"error"' in events[-1]:
                return "error event"
            end = events[-1] == "[DONE]"
            said = "".join(json.loads(event)["choices"][0]["text"] for event in events if event != "[DONE]")
        if not end or said != expected:
            self.strange.append(f"{text[-200:]!r} for {prompt[:40]!r}")
            return "wrong" if end else "silent"
        return "right"

    async def _hang_up(self) -> None:
        """Clients that go at any moment, and such as say nothing."""
        while not self.over:
            with suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                body = json.dumps({"model": "mock", "prompt": "gone", "max_tokens": 50, "stream": True}).encode()
                head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
                writer.write((head + body)[: self.random.randrange(len(head + body) + 200)])
                await asyncio.sleep(self.random.random() * 0.3)
                writer.transport.abort()
                self.counts["hung up"] += 1
            await asyncio.sleep(0.2)

    async def _trouble(self, session: aiohttp.ClientSession, role: str) -> None:
        while not self.over:
            await asyncio.sleep(self.random.uniform(1, 4))
            node = self.random.choice(self.nodes[role])
            kind = self.random.choice(("kill", "stop", "fault", "fault"))
            seconds = self.random.uniform(1, 8)
            if kind == "kill":
                await node.end()
                await asyncio.sleep(seconds)
                await node.start()
                await asyncio.sleep(3)  # it imports, and the proxy looks
            elif kind == "stop":
                node.process.send_signal(signal.SIGSTOP)
                await asyncio.sleep(seconds)
                node.process.send_signal(signal.SIGCONT)
            else:
                fault = self.random.choice(FAULTS)
                kind = next(iter(fault))
                await node.knobs(session, **fault)
                await asyncio.sleep(seconds)
                await node.knobs(session, **WELL)
                if node.process.returncode is not None:
                    await node.start()
                    await asyncio.sleep(3)
            self.faults[f"{role} {kind}"] += 1

    async def _watch(self) -> None:
        last, next_s = time.monotonic(), 10.0
        while not self.over:
            await asyncio.sleep(0.5)
            now = time.monotonic()
            self.ran, last = self.ran + min(now - last, 1.0), now  # time in which all this was stopped does not count
            if self.ran >= next_s:
                next_s += 10.0
                with suppress(OSError):
                    self.seen.append({"s": round(self.ran), **self._weigh()})
                    if len(self.seen) % 6 == 1:
                        print(json.dumps({**self.seen[-1], **self.counts}), file=sys.stderr, flush=True)

    def _weigh(self) -> dict[str, float]:
        pid = self.proxy.pid
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        return {"mib": round(pages * os.sysconf("SC_PAGESIZE") / (1 << 20), 1), "descriptors": descriptors}

    async def _idle(self, session: aiohttp.ClientSession) -> bool:
        """Whether all that the proxy counts goes back to nothing."""
        names = ("active_requests", "node_requests", "node_tokens", "node_held")
        for _ in range(100):
            async with session.get(f"http://127.0.0.1:{self.port}/metrics") as response:
                lines = (await response.text()).splitlines()
            left = [line for line in lines if line.startswith(tuple(f"isochunk_proxy_{name}" for name in names))]
            if all(float(line.rsplit(" ", 1)[1]) == 0 for line in left):
                return True
            await asyncio.sleep(0.2)
        return False

    def _account(self, idle: bool) -> dict[str, Any]:
        asked = sum(count for name, count in self.counts.items() if name != "hung up")
        middle = self.seen[len(self.seen) // 6 :] or self.seen
        return {
            "requests": asked,
            "right": round(self.counts["right"] / max(asked, 1), 4),
            "outcomes": dict(self.counts),
            "silently_lost_or_wrong": self.counts["silent"] + self.counts["wrong"],
            "strange": self.strange[:10],
            "troubles": dict(self.faults),
            "mib": [middle[0]["mib"], middle[-1]["mib"]],
            "descriptors": [max(s["descriptors"] for s in half) for half in (middle[: len(middle) // 2 + 1], middle)],
            "back_to_idle": idle,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    result = asyncio.run(Chaos(given.minutes, given.clients, given.seed).run())
    print(json.dumps(result, indent=1))
    if result["silently_lost_or_wrong"] or not result["back_to_idle"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
