"""P and D nodes that compute nothing: they take the predicted time and keep account, for testing a proxy.

    python -m isochunk.proxy.mock prefill --port 8100 --coefficients 0.006,1.8e-5,2e-8,5.6e-7 --stages 2
    python -m isochunk.proxy.mock decode --port 8200 --interval 0.01

A P node serves one prompt at a time, first come first served, in the seconds of its cost model, and keeps the KV of
each until a D node fetches it. A D node fetches it and streams words made from the prompt. Faults are knobs that
``POST /mock/knobs`` sets while it runs; ``GET /mock/state`` tells what it has done.
"""

from __future__ import annotations

import argparse
import socket

import uvicorn

from isochunk.core.cost import CostModel
from isochunk.proxy.mock_node import MODEL, MockNode
from isochunk.proxy.price import NodeModel

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> None:
    """Run one node until it is killed."""
    parser = argparse.ArgumentParser(prog="isochunk.proxy.mock", description=__doc__.splitlines()[0])
    parser.add_argument("role", choices=("prefill", "decode"))
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--coefficients", help="c0,c1,c2,c3 of P's cost model, in seconds")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--max-chunk", type=int, default=8192)
    parser.add_argument("--hide-model", action="store_true")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds of each prefill without --coefficients")
    parser.add_argument("--ignore-kv", action="store_true", help="D answers without fetching any KV")
    parser.add_argument("--interval", type=float, default=0.0, help="seconds between two words of D")
    parser.add_argument("--filler", type=int, default=0, help="characters added to each word of D")
    parser.add_argument("--model", default=MODEL, help="name of the model that it serves")
    parser.add_argument("--max-model-len", type=int, default=0, help="tokens that its model takes, as it tells")
    given = parser.parse_args(arguments)
    model = None
    if given.coefficients:
        cost = CostModel(*map(float, given.coefficients.split(",")))
        model = NodeModel(cost=cost, stages=given.stages, max_chunk=given.max_chunk)
    node = MockNode(
        given.role,
        model=model,
        hide_model=given.hide_model,
        delay_s=given.delay,
        ignore_kv=given.ignore_kv,
        interval_s=given.interval,
        filler=given.filler,
        name=given.model,
        longest=given.max_model_len,
    )
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind((given.host, given.port))
    listening.listen(2048)
    node.address = (given.host, listening.getsockname()[1])
    print(f"mock {given.role} node: listening on {node.address[0]}, port {node.address[1]}", flush=True)
    uvicorn.Server(uvicorn.Config(node.app, log_level="error", access_log=False)).run(sockets=[listening])


if __name__ == "__main__":
    main()
