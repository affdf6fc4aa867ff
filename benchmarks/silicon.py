"""Whole models on other GPUs, as `isochunk.simulator.silicon` (pip install isochunk[silicon]) estimates them."""

from __future__ import annotations

import logging
from typing import Any

from isochunk.core.cost import CostModel
from isochunk.simulator.silicon import Silicon, estimate

__all__ = ["SYSTEMS", "silicon_models"]

_LLAMA = "meta-llama/Meta-Llama-3.1-70B"

SYSTEMS: dict[str, dict[str, Any]] = {
    "Llama-70B@h100/tp4": {"system": "h100_sxm", "model": _LLAMA, "tensor_parallel": 4},
    "DeepSeek-V3@h200/ep8": {
        "system": "h200_sxm",
        "model": "deepseek-ai/DeepSeek-V3",
        "tensor_parallel": 8,
        "expert_parallel": True,
    },
    "Qwen3-235B-FP8@h200/ep4": {
        "system": "h200_sxm",
        "model": "Qwen/Qwen3-235B-A22B-FP8",
        "tensor_parallel": 4,
        "expert_parallel": True,
    },
    "Llama-70B@b200/tp2": {"system": "b200_sxm", "model": _LLAMA, "tensor_parallel": 2},
    "Llama-70B@a100/tp4": {"system": "a100_sxm", "model": _LLAMA, "tensor_parallel": 4},
    "Llama-8B@l40s": {"system": "l40s", "model": "meta-llama/Meta-Llama-3.1-8B"},
    # Those above were in sight when constants were chosen.
    "Qwen3-32B@h100/tp2": {"system": "h100_sxm", "model": "Qwen/Qwen3-32B", "tensor_parallel": 2},
    "Llama-8B@b200": {"system": "b200_sxm", "model": "meta-llama/Meta-Llama-3.1-8B"},
    "Qwen3-30B@h100/ep2": {
        "system": "h100_sxm",
        "model": "Qwen/Qwen3-30B-A3B",
        "tensor_parallel": 2,
        "expert_parallel": True,
    },
    "Llama-70B@gb200/tp4": {"system": "gb200", "model": _LLAMA, "tensor_parallel": 4},
}


def silicon_models(stages: int) -> dict[str, CostModel]:
    """Cost of a step on one of ``stages`` stages, with floors, jumps and bends as they were measured."""
    logging.disable(logging.WARNING)  # the package says for each table where it falls back to other data
    return {name: estimate(Silicon(**system, stages=stages)).model for name, system in SYSTEMS.items()}
