"""The HTTP routes of vLLM's API server, and its keys."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from isochunk.vllm.compat.patching import patch_once

__all__ = ["add_routes", "has_metrics", "metrics_registry", "token_is_valid"]

_SERVER = "vllm.entrypoints.openai.api_server"


def add_routes() -> None:
    """Give the API server isochunk's routes where vLLM has no endpoint plugins, without being asked to.

    Why: the group `vllm.endpoint_plugins` came with 0.26; there vLLM adds them when ``VLLM_PLUGINS`` names isochunk.
    Goes when: 0.25 does.
    """
    from vllm import plugins

    if hasattr(plugins, "load_endpoint_plugins"):
        return
    from isochunk.vllm.endpoint import IsochunkEndpoint

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def build_app(*args: Any, **kwargs: Any) -> Any:
            app = original(*args, **kwargs)
            IsochunkEndpoint().attach_router(app)
            return app

        return build_app

    main = sys.modules.get("__main__")
    run_by_name = getattr(getattr(main, "__spec__", None), "name", None) == _SERVER
    for module in (sys.modules.get(_SERVER), main if run_by_name else None):
        if module is not None:  # not the API server's process
            patch_once(module, "build_app", wrap)


def token_is_valid(headers: Any, keys: list[str]) -> bool:
    """Whether the request carries one of the server's API keys.

    Why: vLLM's middleware guards only its own path prefixes; its own comparison is used for ours.
    """
    try:
        from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware
    except ModuleNotFoundError:  # form of 0.23 to 0.28
        from vllm.entrypoints.serve.utils.server_utils import AuthenticationMiddleware

    return bool(AuthenticationMiddleware(None, keys).verify_token(headers))


def has_metrics(app: Any) -> bool:
    """Whether this server answers ``/metrics``.

    Why: vLLM's stat loggers see what its own scheduler counts, and nothing of a scheduler plugin's, so isochunk answers
    the route in its place, from the same registry and its own numbers.
    Goes when: vLLM gives a scheduler plugin a place in its metrics.
    """
    return any(getattr(route, "path", None) == "/metrics" for route in app.routes)


def metrics_registry() -> Any:
    """What vLLM's ``/metrics`` collects from: one registry for all, or that of several API processes."""
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    return get_prometheus_registry()
