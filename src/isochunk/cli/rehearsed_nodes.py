"""Several rehearsed P nodes with the proxy in front, and D nodes that compute nothing behind it."""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from isochunk.cli.rehearsed import MODEL_NAME, running_rehearsal
from isochunk.core.errors import ConfigError
from isochunk.deployment.pd_nodes import Node, running_proxy
from isochunk.deployment.server import free_port, running_process
from isochunk.vllm.virtual.rehearsal import Rehearsal

__all__ = ["Nodes", "running_nodes", "serve_nodes"]

_PRODUCER = {
    "kv_connector": "VirtualConnector",
    "kv_connector_module_path": "isochunk.vllm.virtual.connector",
    "kv_role": "kv_producer",
}
_STARTERS = 2  # nodes that start at a time: importing vLLM takes a core


@dataclass(frozen=True, slots=True)
class Nodes:
    """URLs of a rehearsed deployment."""

    proxy: str
    prefill: tuple[str, ...]


@contextmanager
def running_nodes(
    rehearsal: Rehearsal,
    arguments: Sequence[str] = (),
    *,
    nodes: int,
    logs: Path,
    stages: int | None = None,
    decode_nodes: int = 1,
    port: int | None = None,
) -> Iterator[Nodes]:
    """P nodes on virtual stages, mock D nodes, and ``isochunk proxy`` in front; all end at the end.

    Args:
        arguments: each P node's model and vLLM options (`rehearsed`).
        port: the proxy's; a free one when left out.

    Raises:
        ConfigError: one of them ended, or did not answer in time.
    """
    own = any(option.partition("=")[0] == "--kv-transfer-config" for option in arguments)
    arguments = [*arguments, *([] if own else ["--kv-transfer-config", json.dumps(_PRODUCER)])]
    with ExitStack() as stack:

        def start(number: int) -> str:
            one = replace(rehearsal, channel=f"isochunk-{secrets.token_hex(8)}")
            log = logs / f"P{number}.log"
            return stack.enter_context(running_rehearsal(one, arguments, stages=stages, log=log, timeout_s=900.0))

        # The first one measures alone, and keeps what it found for the others.
        prefill = [start(1)]
        with ThreadPoolExecutor(_STARTERS) as pool:
            prefill += pool.map(start, range(2, nodes + 1))
        name = _served_name(arguments)
        decode = [stack.enter_context(_decoder(name, logs / f"D{number + 1}.log")) for number in range(decode_nodes)]
        places = ([Node(url, 0) for url in urls] for urls in (prefill, decode))
        proxy = stack.enter_context(running_proxy("nixl", *places, log=logs / "proxy.log", port=port))
        yield Nodes(proxy, tuple(prefill))


def serve_nodes(
    rehearsal: Rehearsal, arguments: Sequence[str], *, stages: int | None, nodes: int, decode_nodes: int
) -> None:
    """Run them until somebody ends this process.

    Raises:
        ConfigError: one of them did not start.
    """
    rest, port = _without_place(arguments)
    logs = Path("results/rehearsal")
    print(f"isochunk: starting {nodes} P nodes and {decode_nodes} mock D nodes, logs in {logs}", file=sys.stderr)
    with running_nodes(
        rehearsal, rest, nodes=nodes, logs=logs, stages=stages, decode_nodes=decode_nodes, port=port
    ) as where:
        print(f"proxy {where.proxy}", *(f"P node {url}" for url in where.prefill), sep="\n", flush=True)
        try:
            signal.pause()
        except KeyboardInterrupt:
            return


@contextmanager
def _decoder(name: str, log: Path) -> Iterator[str]:
    port = free_port()
    mock = ["-m", "isochunk.proxy.mock", "decode", "--ignore-kv", "--model", name]
    command = [sys.executable, *mock, "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    with running_process(command, dict(os.environ), health=f"{url}/health", log=log):
        yield url


def _served_name(arguments: Sequence[str]) -> str:
    """What the P nodes call their model."""
    for index, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name == "--served-model-name":
            return value if equals else arguments[index + 1]
    return arguments[0] if arguments and not arguments[0].startswith("-") else MODEL_NAME


def _without_place(arguments: Sequence[str]) -> tuple[list[str], int | None]:
    """The arguments without ``--port`` and ``--host``, which are the proxy's here, and the port."""
    rest: list[str] = []
    port = None
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name not in ("--port", "--host"):
            rest.append(word)
            continue
        value = value if equals else next(words, "")
        if name == "--port":
            if not value.isdigit():
                raise ConfigError(f"--port {value!r} must be a whole number")
            port = int(value)
        elif value not in ("127.0.0.1", "localhost"):
            raise ConfigError(f"--host {value}: rehearsed nodes listen on the loopback address only; leave it out")
    return rest, port
