"""Whole models on other GPUs, as `aiconfigurator-core` (pip install isochunk[silicon]) says they were measured."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from benchmarks.curves import STEP_S

__all__ = ["SYSTEMS", "seconds"]


def _experts(cards: int) -> dict[str, int]:
    return {"tp_size": cards, "moe_tp_size": 1, "moe_ep_size": cards}


SYSTEMS: dict[str, tuple[str, str, dict[str, int]]] = {
    "Llama-70B@h100/tp4": ("meta-llama/Meta-Llama-3.1-70B", "h100_sxm", {"tp_size": 4}),
    "DeepSeek-V3@h200/tp8": ("deepseek-ai/DeepSeek-V3", "h200_sxm", _experts(8)),
    "Qwen3-235B-FP8@h200/tp4": ("Qwen/Qwen3-235B-A22B-FP8", "h200_sxm", _experts(4)),
    "Llama-70B@b200/tp2": ("meta-llama/Meta-Llama-3.1-70B", "b200_sxm", {"tp_size": 2}),
    "Llama-70B@a100/tp4": ("meta-llama/Meta-Llama-3.1-70B", "a100_sxm", {"tp_size": 4}),
    "Llama-8B@l40s/tp1": ("meta-llama/Meta-Llama-3.1-8B", "l40s", {"tp_size": 1}),
}


@cache
def _engine(name: str) -> Any:
    from aiconfigurator_core.sdk.engine import EngineHandle

    logging.disable(logging.WARNING)  # it says for each table where it falls back to other data
    model, system, sizes = SYSTEMS[name]
    return EngineHandle.compile(model, system, "vllm", **sizes)


def seconds(name: str, stages: int) -> Callable[[float, float], float]:
    """Seconds of a step (chunk, history) on one of ``stages`` stages."""
    engine = _engine(name)

    @cache
    def at(chunk: float, history: float) -> float:
        total = engine.predict_prefill_latency(1, int(history + chunk), int(history))
        return STEP_S + float(total) / 1000 / stages

    return at


def sampled(name: str, stages: int, chunks: list[int], histories: list[int]) -> np.ndarray:
    """`seconds` of all pairs, shape (chunks, histories)."""
    at = seconds(name, stages)
    return np.array([[at(c, h) for h in histories] for c in chunks])
