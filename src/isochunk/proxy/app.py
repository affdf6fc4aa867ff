"""The proxy's routes."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from isochunk import __version__
from isochunk.core.errors import ConfigError
from isochunk.proxy.alone import ONE_NODE, Alone
from isochunk.proxy.client import Client
from isochunk.proxy.config import NodeSpec, ProxyConfig, Role
from isochunk.proxy.errors import ClientGoneError, ProxyError
from isochunk.proxy.exchange import Exchange
from isochunk.proxy.fleet import Fleet
from isochunk.proxy.metrics import Metrics
from isochunk.proxy.relay import Relay
from isochunk.proxy.specs import Nodes, check_nodes, is_here
from isochunk.proxy.stored import Stored
from isochunk.proxy.trail import Judge
from isochunk.proxy.upstream import Upstream, end_to_end

__all__ = ["Proxy", "check_itself"]

log = logging.getLogger("isochunk.proxy")

_MODELS_S = 10.0
_JSON = [(b"content-type", b"application/json")]


class _Route(NamedTuple):
    method: str
    handler: Callable[[Client], Awaitable[None]]
    key: str | None  # which opens it; None for everybody


class Proxy:
    """The parts of a running proxy; to be made inside the running event loop.

    Args:
        own: host and port that it listens on.

    Attributes:
        leaving: it is about to stop, and says so to who asks for its health.
    """

    def __init__(self, config: ProxyConfig, own: tuple[str, int]) -> None:
        self.config = config
        self.own = own
        self.leaving = False
        node_headers = {"authorization": f"Bearer {config.node_key}"} if config.node_key else {}
        self.upstream = Upstream(config.timeouts, config.node_ca)
        self._node_headers = node_headers
        self.fleet = Fleet(self.upstream, config.timeouts, node_headers)
        self.metrics = Metrics(self.fleet)
        exchange, judge = Exchange(self.upstream), Judge(self.fleet.pools, self.metrics, config.attempts)
        self.relay = Relay(config, self.fleet, exchange, self.metrics, judge)
        self._alone = Alone(config, self.fleet, exchange, judge)
        self._stored = Stored(config, self.fleet, self.upstream)
        key = config.api_key
        self._routes = {
            "/v1/completions": _Route("POST", self.relay.serve, key),
            "/v1/chat/completions": _Route("POST", self.relay.serve, key),
            "/v1/models": _Route("GET", self._models, key),
            **{path: _Route("POST", self._one_node, key) for path in ONE_NODE},
            "/version": _Route("GET", self._version, key),
            "/health": _Route("GET", self._health, None),
            "/healthcheck": _Route("GET", self._health, None),
            "/metrics": _Route("GET", self._metrics, key),
        }
        if config.admin_key:
            self._routes |= {
                "/instances": _Route("GET", self._list, config.admin_key),
                "/instances/add": _Route("POST", self._add, config.admin_key),
                "/instances/remove": _Route("POST", self._remove, config.admin_key),
                "/reset_prefix_cache": _Route("POST", self._reset, config.admin_key),
            }

    async def close(self) -> None:
        """Stop watching nodes and close the connections to them."""
        await self.fleet.close()
        await self.upstream.close()

    async def __call__(self, client: Client) -> None:
        """Answer one request.

        Raises:
            ProxyError: what it gets in place of an answer.
        """
        route = self._routes.get(client.path) or self._kept(client.path)
        key = route.key if route else self.config.api_key
        if key is not None and not _has_key(client, key):
            raise ProxyError(401, "authentication_error", "send the key as 'Authorization: Bearer KEY'")
        if route is None:
            raise ProxyError(404, "not_found_error", "there is no such route")
        if client.method != route.method and (client.method, route.method) != ("HEAD", "GET"):
            raise ProxyError(405, "invalid_request_error", f"this route takes {route.method}")
        await route.handler(client)

    def _kept(self, path: str) -> _Route | None:
        if not path.startswith("/v1/responses/"):
            return None
        return _Route("POST" if path.endswith("/cancel") else "GET", self._stored.serve, self.config.api_key)

    async def _health(self, client: Client) -> None:
        """Counts, and no addresses: it is open to everybody."""
        ready = {role: sum(n.alive and not n.draining for n in pool) for role, pool in self.fleet.pools.items()}
        well = all(ready.values()) and not self.leaving
        body = {
            "status": "ok" if well else "leaving" if self.leaving else "unavailable",
            "prefill_instances": ready[Role.PREFILL],
            "decode_instances": ready[Role.DECODE],
            "request_num": self.metrics.active,
        }
        await _answer(client, body, 200 if well else 503)

    async def _version(self, client: Client) -> None:
        await _answer(client, {"version": __version__, "server": "isochunk proxy"})

    async def _one_node(self, client: Client) -> None:
        with self.metrics.request(client.path) as counted:
            try:
                await self._alone.serve(client)
                counted.done("ok")
            except (ClientGoneError, asyncio.CancelledError):
                counted.done("client_gone" if client.gone else "error")
                raise
            except ProxyError as error:
                counted.done("broken" if client.started else "refused" if error.status < 500 else "failed")
                if error.status >= 500:
                    log.warning("request %s: %s", client.id, error)
                raise

    async def _reset(self, client: Client) -> None:
        """Have all nodes drop their prefix caches."""
        nodes = [node for pool in self.fleet.pools.values() for node in pool]
        query = f"?{client.query}" if client.query else ""
        failed = 0
        for node in nodes:
            node.prefix.clear()
            try:
                url = f"{node.url}/reset_prefix_cache{query}"
                status, _ = await self.upstream.get(url, self._node_headers, _MODELS_S, method="POST")
                failed += status != 200
            except (OSError, ValueError) as error:
                log.warning("request %s: %s node %s: %s", client.id, node.role, node.name, error)
                failed += 1
        await _answer(client, {"nodes": len(nodes), "failed": failed}, 500 if failed else 200)

    async def _metrics(self, client: Client) -> None:
        await client.answer(200, [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")], self.metrics.text())

    async def _models(self, client: Client) -> None:
        """The models of the first node that answers; all serve the same."""
        passed = dict(end_to_end(client.headers))
        key = self.config.node_key
        headers = {"authorization": f"Bearer {key}"} if key else {}
        if key is None and self.config.api_key is None and "authorization" in passed:
            headers["authorization"] = passed["authorization"]
        for role in (Role.DECODE, Role.PREFILL):
            for node in self.fleet.pools[role].candidates():
                try:
                    status, answer = await self.upstream.get(f"{node.url}/v1/models", headers, _MODELS_S)
                except (OSError, ValueError):
                    continue
                if status < 500:
                    await _answer(client, _as_json(answer), status)
                    return
        raise ProxyError(503, "service_unavailable", "no node can say which models it serves", retry_after_s=2)

    async def _list(self, client: Client) -> None:
        await _answer(client, {"nodes": [_describe(node) for pool in self.fleet.pools.values() for node in pool]})

    async def _add(self, client: Client) -> None:
        role, specs = await _instances(client)
        others = {r: tuple(node.spec for node in pool) for r, pool in self.fleet.pools.items() if r is not role}
        try:
            await asyncio.to_thread(check_itself, {role: tuple(specs)}, self.own)
            check_nodes({role: tuple(specs), **others})
        except ConfigError as error:
            raise ProxyError(400, "invalid_request_error", str(error)) from error
        added = []
        for spec in specs:
            if await self.fleet.add(role, spec, give_up_s=self.config.give_up_s):
                added.append(spec.name)
        await _answer(client, {"message": f"added {len(added)} {role} nodes", "added": added, **self._names()})

    async def _remove(self, client: Client) -> None:
        role, specs = await _instances(client)
        drained = [node.name for spec in specs if (node := self.fleet.drain(role, spec.name))]
        await _answer(client, {"message": f"{len(drained)} {role} nodes drain", "removed": drained, **self._names()})

    def _names(self) -> dict[str, list[str]]:
        names = {
            str(role): [node.name for node in pool if not node.draining] for role, pool in self.fleet.pools.items()
        }
        return {f"{start}{role}_instances": each for start in ("", "current_") for role, each in names.items()}


def check_itself(nodes: Nodes, own: tuple[str, int]) -> None:
    """Refuse a proxy as its own node.

    Raises:
        ConfigError: it is among them.
    """
    for spec in (spec for specs in nodes.values() for spec in specs):
        if is_here(spec, *own):
            raise ConfigError(f"node {spec.name} is this proxy itself")


async def _answer(client: Client, body: Any, status: int = 200) -> None:
    await client.answer(status, _JSON, json.dumps(body).encode())


def _has_key(client: Client, key: str) -> bool:
    given = (client.header("authorization") or "").encode("latin-1")
    return hmac.compare_digest(given, b"Bearer " + key.encode())


async def _instances(client: Client) -> tuple[Role, list[NodeSpec]]:
    """From ``{"type": "prefill", "instances": "host:port"}``, where instances may be a list."""
    data = await client.read()
    try:
        body = json.loads(data)
        role = Role(body["type"])
        names = body["instances"]
        names = [names] if isinstance(names, str) else names
        return role, [NodeSpec.parse(name) for name in names]
    except (ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        form = '{"type": "prefill" or "decode", "instances": ["host:port"]}'
        raise ProxyError(400, "invalid_request_error", f"expected {form}: {error!r}") from error


def _describe(node: Any) -> dict[str, Any]:
    return {
        "role": str(node.role),
        "node": node.name,
        "up": node.alive,
        "draining": node.draining,
        "requests": len(node.load),
        "has_model": node.model is not None,
    }


def _as_json(answer: Any) -> Any:
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer
