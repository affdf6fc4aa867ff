"""Two P and two D nodes and the proxy, each in a network namespace of its own; one P node's stages sit in two.

    sudo python -m tests.e2e.namespaces --connector nixl

Needs root, iproute2, and what ``isochunk demo --pd`` needs; takes about five minutes on two cores and 16 GB. Every
prompt goes through the proxy and is computed once more on the P node that is not split; the answers must be the same,
and D nodes must compute nothing. Then one P and one D node are killed, and serving must go on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from isochunk.bench.handover import prompt_tokens
from isochunk.cli.demo_model import ENVIRON, MODEL_NAME, demo_model
from isochunk.deployment.launch import launch
from isochunk.deployment.pd_nodes import (
    Connector,
    Node,
    Role,
    need_connector,
    node_environ,
    node_options,
    proxy_command,
)
from isochunk.deployment.server import child_process, running_process
from isochunk.vllm.shared_cores import PLUGIN

HOSTS = {"p0a": "10.77.0.2", "p0b": "10.77.0.3", "p1": "10.77.0.4", "d0": "10.77.0.5", "d1": "10.77.0.6"}
HUB = "10.77.0.1"
PREFIX = "isochunk-"
PORT = 8000
SIDE_PORT = 5600
COMMON = (
    *("--dtype", "float32", "-cc.mode=2", "-cc.backend=eager", "--served-model-name", MODEL_NAME, "--port", str(PORT)),
    *("--max-model-len", "8192", "--hf-overrides", '{"max_position_embeddings": 32768}'),
)
PREFILL = ("--pipeline-parallel-size", "2", "--max-num-batched-tokens", "2048", "--no-async-scheduling")
SPLIT = ("--nnodes", "2", "--master-addr", HOSTS["p0a"], "--master-port", "29501")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@contextmanager
def namespaces() -> Iterator[None]:
    """A namespace for each host, joined by a bridge in the hub's."""
    hub = f"{PREFIX}hub"
    try:
        ip("netns", "add", hub)
        ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        ip("-n", hub, "addr", "add", f"{HUB}/24", "dev", "bridge")
        for device in ("lo", "bridge"):
            ip("-n", hub, "link", "set", device, "up")
        for name, address in HOSTS.items():
            space = f"{PREFIX}{name}"
            ip("netns", "add", space)
            ip("-n", hub, "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("-n", hub, "link", "set", name, "master", "bridge", "up")
            ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", space, "link", "set", device, "up")
        yield
    finally:
        for name in ("hub", *HOSTS):
            subprocess.run(["ip", "netns", "del", f"{PREFIX}{name}"], check=False)


def in_namespace(name: str, command: Sequence[str]) -> list[str]:
    return ["ip", "netns", "exec", f"{PREFIX}{name}", *command]


def vllm_script(folder: Path) -> None:
    """Let vLLM's CPU build find itself under the name ``vllm``, which its ``serve`` command looks for."""
    metadata = folder / "vllm-0.32.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n", encoding="utf-8")
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)


def node(name: str, connector: Connector, role: Role, options: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Command and environment of one node, or of one host's part of it."""
    environ = {
        **os.environ,
        **ENVIRON,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
        **node_environ(connector, HOSTS[name], SIDE_PORT, "eth0"),
    }
    plugins = [*(["isochunk"] if role == "kv_producer" else []), PLUGIN]
    chosen = [*COMMON, "--host", HOSTS[name], *options, *node_options(connector, role)]
    command, environment = launch(str(demo_model()), chosen, environ, plugins=plugins)
    return in_namespace(name, command), environment


@contextmanager
def deployment(connector: Connector, logs: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """All nodes and the proxy, up; what can be killed by name."""
    killable: dict[str, subprocess.Popen[bytes]] = {}
    with ExitStack() as stack:

        def start(name: str, role: Role, *options: str) -> None:
            command, environment = node(name, connector, role, options)
            print(f"{time.strftime('%H:%M:%S')} starting {name}", flush=True)
            killable[name] = stack.enter_context(
                running_process(
                    command,
                    environment,
                    health=f"http://{HOSTS[name]}:{PORT}/health",
                    log=logs / f"{name}.log",
                    timeout_s=600,
                )
            )

        second = node("p0b", connector, "kv_producer", (*PREFILL, *SPLIT, "--node-rank", "1", "--headless"))
        stack.enter_context(child_process(*second, logs / "p0b.log"))
        start("p0a", "kv_producer", *PREFILL, *SPLIT, "--node-rank", "0")
        start("p1", "kv_producer", *PREFILL)
        start("d0", "kv_consumer")
        start("d1", "kv_consumer")
        prefill, decode = (
            [Node(f"http://{HOSTS[name]}:{PORT}", SIDE_PORT) for name in names]
            for names in (("p0a", "p1"), ("d0", "d1"))
        )
        command = [sys.executable, "-m", "isochunk", "proxy", *proxy_command(connector, prefill, decode, PORT)]
        health = f"http://127.0.0.1:{PORT}/healthcheck"
        stack.enter_context(running_process(command, dict(os.environ), health=health, log=logs / "proxy.log"))
        yield killable


def complete(host: str, prompt: list[int], salt: str | None = None) -> str:
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    if salt is not None:
        body["cache_salt"] = salt
    response = httpx.post(f"http://{host}:{PORT}/v1/completions", json=body, timeout=600, trust_env=False)
    response.raise_for_status()
    return str(response.json()["choices"][0]["text"])


def fresh(lengths: Sequence[int]) -> list[list[int]]:
    return [random.choices(range(100, 40_000), k=length) for length in lengths]


def through_the_proxy(prompts: list[list[int]], at_a_time: int) -> list[str]:
    with ThreadPoolExecutor(at_a_time) as pool:
        return list(pool.map(lambda prompt: complete("127.0.0.1", prompt), prompts))


def counts(name: str) -> Counter[str]:
    """Prompt tokens that a node has seen, by where they came from."""
    return Counter(prompt_tokens(f"http://{HOSTS[name]}:{PORT}"))


def inside(connector: Connector, logs: Path) -> None:
    """The hub's part: start everything, compare answers, kill nodes."""
    with deployment(connector, logs) as nodes:
        before = {name: counts(name) for name in nodes}
        prompts = fresh([60, 700, 1500, 3000, 5000, 400, 2500, 900])
        answers = through_the_proxy(prompts, at_a_time=4)
        took = {name: counts(name) - before[name] for name in nodes}
        print("prompt tokens by node:", json.dumps({name: dict(took[name]) for name in nodes}), flush=True)
        assert all(took.values()), "the proxy left a node out"
        received = sum(took[name]["external_kv_transfer"] for name in ("d0", "d1"))
        computed = sum(took[name]["local_compute"] for name in ("d0", "d1"))
        total = sum(map(len, prompts))
        assert computed <= len(prompts), f"the D nodes computed {computed} prompt tokens themselves"
        assert total - len(prompts) <= received <= total, f"{received} of {total} prompt tokens came to the D nodes"
        assert answers == [complete(HOSTS["p1"], prompt, salt="alone") for prompt in prompts]
        print(f"{len(prompts)} answers are a single node's; D nodes computed no prompt", flush=True)
        for name in ("p1", "d1"):
            os.killpg(nodes[name].pid, 9)
        prompts = fresh([500, 2000])
        answers = through_the_proxy(prompts, at_a_time=1)
        assert answers == [complete(HOSTS["p0a"], prompt, salt="alone") for prompt in prompts]
        print("with one P and one D killed, serving went on", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connector", default="nixl", help="nixl or mooncake")
    parser.add_argument("--logs", type=Path, default=Path("results/namespaces"))
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    connector = need_connector(given.connector)
    if given.inside:
        with tempfile.TemporaryDirectory() as folder:
            vllm_script(Path(folder))
            inside(connector, given.logs)
        return
    if os.geteuid() != 0:
        sys.exit("network namespaces need root: run it with sudo")
    demo_model()  # converted before anything is measured
    with namespaces():
        again = [sys.executable, "-m", "tests.e2e.namespaces", "--inside", "--connector", connector]
        again += ["--logs", str(given.logs)]
        inner = subprocess.Popen(in_namespace("hub", again))
        while inner.poll() is None:
            try:
                inner.wait()
            except KeyboardInterrupt:  # it stops its servers first
                continue
        sys.exit(inner.returncode)


if __name__ == "__main__":
    main()
