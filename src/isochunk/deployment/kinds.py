"""What kinds of connectors and machines there are."""

from __future__ import annotations

import re

from isochunk.deployment.node import Node
from isochunk.deployment.option_table import table

__all__ = ["ASCEND", "HANDS_OVER", "KEEPS", "NIXL", "all_connectors", "handing_over", "is_ascend", "mode"]

NIXL = frozenset(("NixlConnector", "NixlPullConnector", "NixlPushConnector"))
# vLLM-Ascend's: each rank listens on a port of its own from `kv_port` on, and is told the sizes of both sides.
ASCEND = frozenset(("MooncakeConnectorV1", "MooncakeLayerwiseConnector", "MooncakeHybridConnector"))
_STORES = frozenset(("LMCacheConnectorV1", "LMCacheMPConnector", "MooncakeStoreConnector", "AscendStoreConnector",
                     "MooncakeConnectorStoreV1", "HF3FSKVConnector", "FlexKVConnectorV1", "UCMConnector",
                     "SharedStorageConnector", "ExampleConnector"))  # fmt: skip
HANDS_OVER = (
    NIXL | ASCEND | _STORES | {"MooncakeConnector", "MoRIIOConnector", "P2pNcclConnector"} | {"SfaRemoteD2HConnector"}
)
# They keep KV for their own node.
KEEPS = frozenset(("OffloadingConnector", "SimpleCPUOffloadConnector", "RecomputeCPUOffloadConnector",
                   "HiSparseConnector", "DecodeBenchConnector", "ExampleHiddenStatesConnector"))  # fmt: skip


def all_connectors() -> frozenset[str]:
    """Names that vLLM or vLLM-Ascend knows."""
    return frozenset(table()["connectors"]) | HANDS_OVER | KEEPS | {"MultiConnector"}


def is_ascend(node: Node) -> bool:
    """Whether a node runs on vLLM-Ascend."""
    named = any(connector.name in ASCEND or "Ascend" in connector.name for connector in node.connectors)
    of_environment = any(re.match(r"ASCEND|HCCL|VLLM_ASCEND", name) for name in node.env)
    return named or of_environment or node.get("quantization") == "ascend"


def handing_over(node: Node) -> frozenset[str]:
    """The connectors of a node that bring KV to another; a pulling NIXL has two names."""
    names = {"NixlConnector" if c.name == "NixlPullConnector" else c.name for c in node.connectors}
    return frozenset(names - KEEPS)


def mode(node: Node) -> str | None:
    """How NIXL brings KV over: ``push`` or ``pull``; None without NIXL."""
    names = {connector.name for connector in node.connectors} & NIXL
    return None if not names else "push" if "NixlPushConnector" in names else "pull"
