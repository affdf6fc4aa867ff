"""Which node gets a request."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass

from isochunk.proxy.errors import ProxyError
from isochunk.proxy.nodes import Node, Pool
from isochunk.proxy.prompt import Prompt

__all__ = ["Choice", "choose_any", "choose_decode", "choose_prefill", "choose_without_prefill"]

_UNPROVED = 2  # requests at once for a D node that has not proved itself, beside some that have
_FIRST = 8  # and when none has
_REQUEST = 500  # tokens of KV whose reading takes a D node as long as one more request in its step
RETRY_AFTER_S = 2  # a node that comes back is seen by the next probe


@dataclass(frozen=True, slots=True)
class Choice:
    """A P node for a request.

    Attributes:
        node: the node.
        tokens: of the prompt that it must compute.
        cached_pieces: leading pieces of the prompt that it has probably in its prefix cache.
        busy_s: predicted seconds that the request keeps it busy; 0 without a model.
        ttft_s: predicted seconds to its first token, the queue before it included; None without a model.
    """

    node: Node
    tokens: int
    cached_pieces: int
    busy_s: float = 0.0
    ttft_s: float | None = None


def choose_prefill(pool: Pool, prompt: Prompt, tokens: int, without: Container[str] = frozenset()) -> Choice:
    """The P node where the request is predicted to have its first token soonest.

    Seconds and tokens can't be compared, so queued tokens decide for all while one node has no model.

    Args:
        tokens: length of the prompt.
        without: names of nodes that have failed this request.

    Raises:
        ProxyError: 503, no node can take it.
    """
    nodes = _candidates(pool, without)
    if all(node.model is not None for node in nodes):
        return min((_priced(node, prompt, tokens) for node in nodes), key=_soonest)
    return min((_counted(node, prompt, tokens) for node in nodes), key=_queued_tokens)


def choose_decode(
    pool: Pool, without: Container[str] = frozenset(), *, wary: bool = False, patient: bool = False
) -> Node | None:
    """The D node with the least to do.

    One that has not proved itself gets few requests at once: each that it fails has cost a prefill.

    Args:
        wary: the request has been failed by a D node; only proved ones, if there are any.
        patient: wait for one to prove itself rather than trust several blindly.

    Returns:
        None when it is better to wait for news of those that are being tried.

    Raises:
        ProxyError: 503, no node can take it.
    """
    nodes = _candidates(pool, without)
    if any(node.health.proved for node in nodes):
        most = 0 if wary else _UNPROVED
        return min((n for n in nodes if n.health.proved or n.health.unanswered < most), key=_care)
    if patient and len(nodes) > 1:
        nodes = [node for node in nodes if node.health.unanswered < _FIRST]
    return min(nodes, key=_care, default=None)


def choose_without_prefill(pool: Pool, prompt: Prompt, tokens: int, most: int) -> Node | None:
    """The D node with the least to do of those that would compute at most ``most`` tokens of the prompt."""
    able = [n for n in pool.candidates() if n.health.proved and tokens - _cached(n, prompt, tokens)[1] <= most]
    return min(able, key=_care, default=None)


def choose_any(pool: Pool, without: Container[str] = frozenset()) -> Node:
    """The node with the least to do.

    Raises:
        ProxyError: 503, no node can take it.
    """
    return min(_candidates(pool, without), key=_care)


def _care(node: Node) -> int:
    return node.load.tokens + _REQUEST * len(node.load)


def _candidates(pool: Pool, without: Container[str]) -> list[Node]:
    nodes = pool.candidates(without)
    if not nodes:
        message = f"none of {len(pool)} {pool.role} nodes can take a request"
        raise ProxyError(503, "service_unavailable", message, retry_after_s=RETRY_AFTER_S)
    return nodes


def _cached(node: Node, prompt: Prompt, tokens: int) -> tuple[int, int]:
    """Pieces and tokens of the probable prefix hit."""
    pieces = node.prefix.hit(prompt.prints)
    # A whole prompt is never a hit: its last token is computed again.
    return pieces, min(math.floor(tokens * pieces / (len(prompt.prints) + 1)), tokens - 1)


def _priced(node: Node, prompt: Prompt, tokens: int) -> Choice:
    assert node.model is not None
    pieces, cached = _cached(node, prompt, tokens)
    price = node.model.price(tokens, cached)
    return Choice(node, tokens - cached, pieces, price.busy_s, node.load.backlog_s() + price.ttft_s)


def _counted(node: Node, prompt: Prompt, tokens: int) -> Choice:
    pieces, cached = _cached(node, prompt, tokens)
    busy_s = node.model.price(tokens, cached).busy_s if node.model else 0.0
    return Choice(node, tokens - cached, pieces, busy_s)


def _soonest(choice: Choice) -> float:
    assert choice.ttft_s is not None
    return choice.ttft_s


def _queued_tokens(choice: Choice) -> int:
    return choice.node.load.tokens + choice.tokens
