"""Runs the proxy until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import ssl
from collections.abc import Callable

from isochunk.core.errors import ConfigError, IsochunkError
from isochunk.proxy.access import Journal
from isochunk.proxy.app import Proxy, check_itself
from isochunk.proxy.config import ProxyConfig, load_nodes
from isochunk.proxy.limits import Gate, raise_descriptors
from isochunk.proxy.listener import Listener
from isochunk.proxy.sweep import sweep

__all__ = ["serve"]

log = logging.getLogger("isochunk.proxy")


def serve(
    config: ProxyConfig, *, host: str, port: int, log_level: str = "info", tls: ssl.SSLContext | None = None
) -> None:
    """Serve until SIGTERM or SIGINT, then finish the requests in flight. SIGHUP reads the nodes' file again.

    Raises:
        ConfigError: the address can't be bound.
    """
    journal = Journal(access=config.access_log)
    connections = raise_descriptors(config.limits.connections)
    journal.take_over(log_level)
    listening = _bind(host, port)
    own = (host, listening.getsockname()[1])
    check_itself(config.nodes, own)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_run(config, listening, own, connections, tls, journal))
    finally:
        journal.close()


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


async def _run(
    config: ProxyConfig,
    listening: socket.socket,
    own: tuple[str, int],
    connections: int,
    tls: ssl.SSLContext | None,
    journal: Journal,
) -> None:
    loop = asyncio.get_running_loop()
    stop = _Stop(loop)
    proxy = Proxy(config, own)
    gate = Gate(config.limits, connections)
    if gate.connections < config.limits.connections:
        log.warning("%d clients at most: the limit of open files is too low for more", gate.connections)
    listener = Listener(proxy, gate, patience_s=config.timeouts.client_s, finished=journal.finished)
    reloads: set[asyncio.Task[None]] = set()

    def reload() -> None:
        task = loop.create_task(_reload(proxy))
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    loop.add_signal_handler(signal.SIGHUP, reload)
    await proxy.fleet.set(config.nodes)
    server = await loop.create_server(
        listener.connection,
        sock=listening,
        ssl=tls,
        backlog=2048,
        ssl_handshake_timeout=config.limits.head_s if tls else None,
    )
    sweeping = loop.create_task(sweep())
    await stop.asked.wait()
    if not stop.at_once.is_set():
        proxy.leaving = True
        log.info("stopping: refusing health for %g s, then connections", config.timeouts.lame_duck_s)
        await stop.hurried(config.timeouts.lame_duck_s)
    server.close()
    await listener.drain(config.timeouts.drain_s)
    sweeping.cancel()
    await proxy.close()


class _Stop:
    """The signals to stop: SIGTERM gives load balancers time to see it, SIGINT or a second one does not."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.asked = asyncio.Event()
        self.at_once = asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, self._ask)
        loop.add_signal_handler(signal.SIGINT, self._ask, True)

    def _ask(self, at_once: bool = False) -> None:
        if at_once or self.asked.is_set():
            self.at_once.set()
        self.asked.set()

    async def hurried(self, seconds: float) -> None:
        """Wait so long, or until a second signal."""
        try:
            async with asyncio.timeout(seconds):
                await self.at_once.wait()
        except TimeoutError:
            pass


async def _reload(proxy: Proxy) -> None:
    """Take over the nodes' file; a file that can't be used changes nothing."""
    if proxy.config.nodes_file is None:
        log.warning("SIGHUP: there is no --nodes file to read again")
        return
    try:
        nodes = load_nodes(proxy.config.nodes_file)
        await asyncio.to_thread(check_itself, nodes, proxy.own)
        for role, pool in proxy.fleet.pools.items():
            if any(not node.draining for node in pool) and not nodes.get(role):
                raise ConfigError(f"it names no {role} node, so that nothing could be served")
    except IsochunkError as error:
        log.error("SIGHUP: the nodes stay as they are: %s", error)
        return
    await proxy.fleet.set(nodes)
    log.info("SIGHUP: nodes read again from %s", proxy.config.nodes_file)
