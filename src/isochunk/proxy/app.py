"""The proxy's routes."""

from __future__ import annotations

import hmac
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from isochunk.core.errors import ConfigError
from isochunk.proxy.client import Client
from isochunk.proxy.config import NodeSpec, ProxyConfig, Role
from isochunk.proxy.errors import ProxyError
from isochunk.proxy.fleet import Fleet
from isochunk.proxy.metrics import Metrics
from isochunk.proxy.relay import Relay
from isochunk.proxy.upstream import Upstream, end_to_end

__all__ = ["Proxy"]

_MODELS_S = 10.0


class Proxy:
    """The parts of a running proxy, and its ASGI app."""

    fleet: Fleet
    relay: Relay
    metrics: Metrics
    upstream: Upstream

    def __init__(self, config: ProxyConfig) -> None:
        self.config = config
        admin = [
            Route("/instances/add", self._add, methods=["POST"]),
            Route("/instances/remove", self._remove, methods=["POST"]),
        ]
        self.app = Starlette(
            routes=[
                Route("/v1/completions", _Generate(self), methods=["POST"]),
                Route("/v1/chat/completions", _Generate(self), methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/healthcheck", self._healthcheck),
                Route("/metrics", self._metrics),
                *(admin if config.admin_key else []),
            ],
            middleware=[Middleware(_Keys, config=config)],
            exception_handlers={HTTPException: _http_error, ProxyError: _proxy_error},
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        node_headers = {"authorization": f"Bearer {self.config.node_key}"} if self.config.node_key else {}
        self.upstream = Upstream(self.config.timeouts)
        self.fleet = Fleet(self.upstream, self.config.timeouts, node_headers)
        self.metrics = Metrics(self.fleet)
        self.relay = Relay(self.config, self.fleet, self.upstream, self.metrics)
        await self.fleet.set(self.config.nodes)
        try:
            yield
        finally:
            await self.fleet.close()
            await self.upstream.close()

    async def _healthcheck(self, request: Request) -> Response:
        ready = {role: sum(n.alive and not n.draining for n in pool) for role, pool in self.fleet.pools.items()}
        well = all(ready.values())
        body = {
            "status": "ok" if well else "unavailable",
            "prefill_instances": ready[Role.PREFILL],
            "decode_instances": ready[Role.DECODE],
            "nodes": [_describe(node) for pool in self.fleet.pools.values() for node in pool],
        }
        return JSONResponse(body, status_code=200 if well else 503)

    async def _metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _models(self, request: Request) -> Response:
        """The models of the first node that answers; all serve the same."""
        passed = dict(end_to_end(request.headers.items()))
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
                    return JSONResponse(_as_json(answer), status_code=status)
        raise ProxyError(503, "service_unavailable", "no node can say which models it serves", retry_after_s=2)

    async def _add(self, request: Request) -> Response:
        role, specs = await _instances(request)
        added = []
        for spec in specs:
            if await self.fleet.add(role, spec):
                added.append(spec.name)
        return JSONResponse({"message": f"added {len(added)} {role} nodes", "added": added, **self._names()})

    async def _remove(self, request: Request) -> Response:
        role, specs = await _instances(request)
        drained = [node.name for spec in specs if (node := self.fleet.drain(role, spec.name))]
        return JSONResponse({"message": f"{len(drained)} {role} nodes drain", "removed": drained, **self._names()})

    def _names(self) -> dict[str, list[str]]:
        return {
            f"{role}_instances": [node.name for node in pool if not node.draining]
            for role, pool in self.fleet.pools.items()
        }


class _Generate:
    """Plain ASGI: a response class of the framework would end a broken stream as if it were whole."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = Client(receive, send, self._proxy.config.timeouts.client_s)
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        await self._proxy.relay.serve(client, scope["path"], headers)


class _Keys:
    """Lets nobody in without the key, on any route; the admin routes have their own."""

    def __init__(self, app: ASGIApp, config: ProxyConfig) -> None:
        self._app = app
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            key = self._config.api_key
            if scope["path"].startswith("/instances/"):
                key = self._config.admin_key
            if key is not None and not _has_key(scope, key):
                error = ProxyError(401, "authentication_error", "send the key as 'Authorization: Bearer KEY'")
                await Client(receive, send, self._config.timeouts.client_s).fail(error)
                return
        await self._app(scope, receive, send)


def _has_key(scope: Scope, key: str) -> bool:
    given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    return hmac.compare_digest(given, b"Bearer " + key.encode())


async def _instances(request: Request) -> tuple[Role, list[NodeSpec]]:
    """From ``{"type": "prefill", "instances": "host:port"}``, where instances may be a list."""
    try:
        body = json.loads(await request.body())
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


async def _proxy_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ProxyError)
    headers = {name.decode(): value.decode() for name, value in error.headers()}
    return Response(error.body(), error.status, headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    return await _proxy_error(request, ProxyError(error.status_code, kind, error.detail))
