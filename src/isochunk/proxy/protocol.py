"""How a prompt's KV gets from P to D: what each node must be told.

Facts from vLLM's connectors. The request goes to P with one token to make and the order to keep its KV; then to D
with the place where that KV is. Both get the same ``X-Request-Id``: the push connectors match by it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from isochunk.proxy.body import Body, Pieces
from isochunk.proxy.nodes import Node

__all__ = ["Handover", "decode_body", "plan_handover", "prefill_body"]

# One token, whatever the client wants to make: P must stop for its length. A connector keeps no KV, and D
# waits for it in vain, when P stopped at an end-of-text token, so P may not see one.
_ONE_TOKEN = {"stream": False, "max_tokens": 1, "ignore_eos": True}
_NOT_FOR_P = frozenset(
    {"stream", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens", "ignore_eos", "stop",
     "stop_token_ids", "kv_transfer_params"}
)  # fmt: skip
_PLACE = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))


@dataclass(frozen=True, slots=True)
class Handover:
    """The KV parameters of one request.

    Attributes:
        for_p: what P is told.
        headers: more headers for P.
        for_d: what D is told, when it is known beforehand (Mooncake); None when P's answer says it (NIXL,
            and the Ascend plugin's Mooncake connector), which then goes to D unchanged.
    """

    for_p: dict[str, Any]
    headers: dict[str, str]
    for_d: dict[str, Any] | None = None

    def decode_params(self, answer: dict[str, Any]) -> dict[str, Any] | None:
        """What D is told after P's answer; None when P kept no KV, so that D computes the prompt itself."""
        if self.for_d is not None:
            return self.for_d
        params = answer.get("kv_transfer_params")
        return params if isinstance(params, dict) and params else None


def plan_handover(node: Node, request_id: str) -> Handover:
    """The KV parameters for a request that goes to this P node."""
    for_p = {"do_remote_decode": True, "do_remote_prefill": False}
    if node.spec.bootstrap is None:
        return Handover(for_p | _PLACE, {})
    transfer = {"transfer_id": f"xfer-{request_id}"}
    rank = random.choice(list(node.engines))
    for_d = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_bootstrap_addr": node.spec.bootstrap,
        "remote_engine_id": node.engines[rank],
    }
    headers = {"X-data-parallel-rank": str(rank)} if len(node.engines) > 1 else {}
    return Handover(for_p | transfer, headers, for_d | transfer)


def prefill_body(body: Body, handover: Handover, *, chat: bool) -> Pieces:
    """The request for P."""
    limits: dict[str, Any] = dict(_ONE_TOKEN)
    if chat:
        limits["max_completion_tokens"] = 1
    return body.edited(_NOT_FOR_P, limits | {"kv_transfer_params": handover.for_p})


def decode_body(body: Body, params: dict[str, Any] | None) -> Pieces:
    """The request for D: the client's own, and where the KV is."""
    return body.edited({"kv_transfer_params"}, {"kv_transfer_params": params} if params else {})
