"""vLLM's CPU build with P and D nodes on the same few cores: what spins there takes the cores from the others.

A plugin of vLLM that does nothing unless ``VLLM_PLUGINS`` names it: `isochunk demo --pd` does.
"""

from __future__ import annotations

import os

from isochunk.vllm import compat

__all__ = ["PLUGIN", "is_named", "register"]

PLUGIN = "isochunk_shared_cores"
_NAP_S = 200e-6


def is_named() -> bool:
    """Whether ``VLLM_PLUGINS`` names this plugin."""
    return PLUGIN in os.environ.get("VLLM_PLUGINS", "").split(",")


def register() -> None:
    """Let whatever polls sleep between two looks, and leave the threads where vLLM put them."""
    if is_named() and compat.runs_on_cpu():
        compat.nap_in_queues(_NAP_S)
        compat.nap_in_nixl(_NAP_S)
        compat.keep_cores()
        compat.device_index_of_cpu()
