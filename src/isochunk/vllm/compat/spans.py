"""The span that vLLM makes of a request where it traces (``--otlp-traces-endpoint``)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

from isochunk.vllm.compat.patching import patch_once

__all__ = ["add_to_spans", "is_traced", "tell_span"]

_KEY = "isochunk"  # beside traceparent and tracestate, which are all that vLLM takes from a client

_told: ContextVar[Mapping[str, Any] | None] = ContextVar("isochunk_span", default=None)


def is_traced(vllm_config: Any) -> bool:
    """Whether vLLM makes a span of each request."""
    observability = getattr(vllm_config, "observability_config", None)
    return getattr(observability, "otlp_traces_endpoint", None) is not None


def tell_span(request: Any, attributes: Mapping[str, Any]) -> None:
    """In the scheduler: have this request's span carry these attributes, in place of any told before.

    Why: the front end, often another process, makes the span with a request's last output, which no plugin can add to.
    Each output takes the request's trace headers back to it.
    Goes when: vLLM lets a scheduler plugin add to the span of a request.
    """
    request.trace_headers = {**(request.trace_headers or {}), _KEY: json.dumps(attributes)}


def add_to_spans() -> None:
    """In the front end: give each request's span what `tell_span` told of it.

    Raises:
        ConfigError: vLLM makes its spans otherwise.
    """
    from vllm.v1.engine import output_processor

    def around_request(original: Callable[..., Any]) -> Callable[..., Any]:
        def do_tracing(self: Any, engine_core_output: Any, *args: Any, **kwargs: Any) -> Any:
            token = _told.set(_taken(engine_core_output))
            try:
                return original(self, engine_core_output, *args, **kwargs)
            finally:
                _told.reset(token)

        return do_tracing

    def around_span(original: Callable[..., Any]) -> Callable[..., Any]:
        def instrument_manual(*args: Any, **kwargs: Any) -> Any:
            if (told := _told.get()) and isinstance(own := kwargs.get("attributes"), dict):
                kwargs["attributes"] = {**own, **told}
            return original(*args, **kwargs)

        return instrument_manual

    patch_once(output_processor.OutputProcessor, "do_tracing", around_request)
    patch_once(output_processor, "instrument_manual", around_span)


def _taken(output: Any) -> Mapping[str, Any] | None:
    """What was told of this output's request; its trace headers are again what the client sent."""
    headers = getattr(output, "trace_headers", None)
    if not headers or _KEY not in headers:
        return None
    output.trace_headers = {name: value for name, value in headers.items() if name != _KEY} or None
    try:
        told = json.loads(headers[_KEY])
    except (ValueError, TypeError):
        return None
    return told if isinstance(told, dict) else None
