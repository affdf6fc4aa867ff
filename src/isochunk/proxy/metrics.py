"""What the proxy counts, in Prometheus's text form."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from isochunk.proxy.fleet import Fleet

__all__ = ["Metrics"]

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_RATIOS = (0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2, 4)


class _Outcome:
    value = "error"  # what it stays when something unforeseen ends the request

    def done(self, value: str) -> None:
        self.value = value


class Metrics:
    """Counters of the requests; the nodes' gauges are read when they are asked for.

    Attributes:
        active: requests in the proxy now.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.active = 0
        self._registry = CollectorRegistry()
        self._registry.register(_NodeGauges(fleet))
        registry = self._registry
        self._active = Gauge("isochunk_proxy_active_requests", "Requests in the proxy now.", registry=registry)
        self._requests = Counter(
            "isochunk_proxy_requests", "Requests that ended.", ["path", "outcome"], registry=registry
        )
        self._seconds = Histogram(
            "isochunk_proxy_request_seconds", "Whole time of a request.", buckets=_SECONDS, registry=registry
        )
        self._prefill = Histogram(
            "isochunk_proxy_prefill_seconds",
            "From a request's dispatch to the P node's answer.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._ratio = Histogram(
            "isochunk_proxy_prefill_measured_over_predicted",
            "Measured over predicted seconds of prefill, queue included.",
            buckets=_RATIOS,
            registry=registry,
        )
        self._failures = Counter(
            "isochunk_proxy_node_failures", "Attempts that a node failed.", ["node"], registry=registry
        )
        self._recomputed = Counter(
            "isochunk_proxy_recomputed", "Requests for which P kept no KV, so that D computed the prompt.",
            registry=registry,
        )  # fmt: skip
        self._resubmitted = Counter(
            "isochunk_proxy_resubmitted", "Requests that a D node gave up in the middle.", registry=registry
        )
        self._skipped = Counter(
            "isochunk_proxy_prefill_skipped", "Requests that went to a D node without P.", registry=registry
        )
        self._missed = Counter(
            "isochunk_proxy_missed_prefix_pieces",
            "Pieces of prompts that were taken for cached and were not.",
            registry=registry,
        )

    @contextmanager
    def request(self, path: str) -> Iterator[_Outcome]:
        """Count one request for as long as the context lasts."""
        outcome = _Outcome()
        began = time.monotonic()
        self._active.inc()
        self.active += 1
        try:
            yield outcome
        finally:
            self._active.dec()
            self.active -= 1
            self._requests.labels(path, outcome.value).inc()
            self._seconds.observe(time.monotonic() - began)

    def prefilled(self, seconds: float, predicted_s: float | None) -> None:
        """A P node has answered."""
        self._prefill.observe(seconds)
        if predicted_s:
            self._ratio.observe(seconds / predicted_s)

    def failed(self, node: str) -> None:
        """A node has failed a request."""
        self._failures.labels(node).inc()

    def recomputed(self) -> None:
        """A P node kept no KV."""
        self._recomputed.inc()

    def resubmitted(self) -> None:
        """A D node gave a request up in the middle, and it goes through P again."""
        self._resubmitted.inc()

    def skipped(self) -> None:
        """A D node computes the prompt itself, because P is not worth the way."""
        self._skipped.inc()

    def missed(self, pieces: int) -> None:
        """A prefix hit was smaller than it was taken for."""
        self._missed.inc(pieces)

    def text(self) -> bytes:
        """All metrics, ``text/plain; version=0.0.4``."""
        return generate_latest(self._registry)


class _NodeGauges(Collector):
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """One sample a node of each gauge."""
        labels = ["role", "node"]
        up = GaugeMetricFamily("isochunk_proxy_node_up", "1 when the node can take requests.", labels=labels)
        active = GaugeMetricFamily("isochunk_proxy_node_requests", "Requests the node works on.", labels=labels)
        tokens = GaugeMetricFamily("isochunk_proxy_node_tokens", "Tokens of those requests.", labels=labels)
        backlog = GaugeMetricFamily("isochunk_proxy_node_backlog_seconds", "Predicted work left.", labels=labels)
        holding = GaugeMetricFamily("isochunk_proxy_node_held", "Prompts whose KV it keeps for D.", labels=labels)
        ejected = GaugeMetricFamily("isochunk_proxy_node_ejected", "1 while it is left out.", labels=labels)
        for role, pool in self._fleet.pools.items():
            for node in pool:
                key = [str(role), node.name]
                up.add_metric(key, float(node.alive and not node.draining))
                active.add_metric(key, len(node.load))
                tokens.add_metric(key, node.load.tokens)
                backlog.add_metric(key, node.load.backlog_s())
                holding.add_metric(key, node.holding)
                ejected.add_metric(key, float(node.health.ejected))
        yield from (up, active, tokens, backlog, holding, ejected)
