"""``isochunk proxy`` with another way of choosing the P node, to compare with its own.

python -m benchmarks.routing_way round_robin --prefiller-hosts ...
"""

from __future__ import annotations

import sys

from isochunk.cli.proxy import read_arguments
from isochunk.proxy import relay
from isochunk.proxy.errors import ProxyError
from isochunk.proxy.nodes import Node, Pool
from isochunk.proxy.prompt import Prompt
from isochunk.proxy.router import Choice
from isochunk.proxy.server import serve

WAYS = ("predicted_seconds", "queued_tokens", "round_robin")


def usable(pool: Pool, without: frozenset[str]) -> list[Node]:
    nodes = pool.candidates(without)
    if not nodes:
        raise ProxyError(503, "service_unavailable", "no P node")
    return nodes


def round_robin(pool: Pool, prompt: Prompt, tokens: int, without: frozenset[str] = frozenset()) -> Choice:
    return Choice(usable(pool, without)[0], tokens, 0)  # candidates begin with another node each time


def queued_tokens(pool: Pool, prompt: Prompt, tokens: int, without: frozenset[str] = frozenset()) -> Choice:
    return Choice(min(usable(pool, without), key=lambda node: node.load.tokens), tokens, 0)


def main() -> None:
    way, *arguments = sys.argv[1:]
    if way != "predicted_seconds":
        relay.choose_prefill = {"queued_tokens": queued_tokens, "round_robin": round_robin}[way]
    config, given = read_arguments(arguments)
    serve(config, host=given.host, port=given.port, log_level=given.log_level)


if __name__ == "__main__":
    main()
