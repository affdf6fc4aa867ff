"""Runs the proxy until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable

import uvicorn

from isochunk.core.errors import ConfigError, IsochunkError
from isochunk.proxy.app import Proxy
from isochunk.proxy.config import ProxyConfig, load_nodes

__all__ = ["serve"]

log = logging.getLogger("isochunk.proxy")


def serve(config: ProxyConfig, *, host: str, port: int, log_level: str = "info") -> None:
    """Serve until SIGTERM or SIGINT, then finish the requests in flight. SIGHUP reads the nodes' file again.

    Raises:
        ConfigError: the address can't be bound.
    """
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    listening = _bind(host, port)
    proxy = Proxy(config)
    server = uvicorn.Server(
        uvicorn.Config(
            proxy.app,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=int(config.timeouts.drain_s),
        )
    )
    # The server raises a signal that stopped it once more after its work: drained is done, not killed.
    signal.signal(signal.SIGTERM, lambda *_: None)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_run(server, proxy, listening))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _bind(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.socket(family)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(2048)  # who connects before the server is up waits instead of being refused
    except OSError as error:
        raise ConfigError(f"can't listen on {host}, port {port}: {error}; choose another --host or --port") from error
    print(f"isochunk proxy: listening on {host}, port {listening.getsockname()[1]}", flush=True)
    return listening


async def _run(server: uvicorn.Server, proxy: Proxy, listening: socket.socket) -> None:
    reloads: set[asyncio.Task[None]] = set()

    def reload() -> None:
        task = asyncio.create_task(_reload(proxy))
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
    await server.serve(sockets=[listening])


async def _reload(proxy: Proxy) -> None:
    """Take over the nodes' file; a file that can't be used changes nothing."""
    if proxy.config.nodes_file is None:
        log.warning("SIGHUP: there is no --nodes file to read again")
        return
    try:
        nodes = load_nodes(proxy.config.nodes_file)
    except IsochunkError as error:
        log.error("SIGHUP: the nodes stay as they are: %s", error)
        return
    await proxy.fleet.set(nodes)
    log.info("SIGHUP: nodes read again from %s", proxy.config.nodes_file)
