"""The HTTP routes of vLLM's API server, and its keys."""

from __future__ import annotations

from typing import Any

__all__ = ["token_is_valid"]


def token_is_valid(headers: Any, keys: list[str]) -> bool:
    """Whether the request carries one of the server's API keys.

    Why: vLLM's middleware guards only its own path prefixes; its own comparison is used for ours.
    """
    try:
        from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware
    except ModuleNotFoundError:  # form of 0.23 to 0.28
        from vllm.entrypoints.serve.utils.server_utils import AuthenticationMiddleware

    return bool(AuthenticationMiddleware(None, keys).verify_token(headers))
