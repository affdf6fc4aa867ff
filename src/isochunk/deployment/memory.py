"""Whether a step of so many tokens fits a device: an estimate from the model's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from isochunk.deployment.node import Node

__all__ = ["MemoryNeed", "memory_need"]

_GIB = 1 << 30
_BYTES = {"float32": 4, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}
_HIDDEN_COPIES = 6  # residual, its norm, attention's inputs and output, what goes to the next stage


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """GiB of one device: what it has for serving, and what the three large parts take."""

    available_gib: float
    weights_gib: float
    activations_gib: float
    kv_gib: float

    @property
    def total_gib(self) -> float:
        """All parts together."""
        return self.weights_gib + self.activations_gib + self.kv_gib


def memory_need(node: Node, budget: int, length: int | None) -> MemoryNeed | None:
    """Memory of a step of ``budget`` tokens and of the KV of one prompt of ``length``; None when too little is known.

    Weights are counted from the layers' shapes, activations as the largest tensors that live at once in a layer.
    """
    config = node.shape.config
    if node.device_gib is None or not {"hidden_size", "num_hidden_layers", "num_attention_heads"} <= set(config):
        return None
    dtype = str(node.given.get("dtype") or config.get("torch_dtype") or config.get("dtype"))
    width = _BYTES.get(dtype, 2)
    stages, tensor = node.size("pipeline") or 1, node.size("tensor") or 1
    layers = -(-int(config["num_hidden_layers"]) // stages)
    quantized = node.get("quantization") is not None or "quantization_config" in config
    weight_width = 1 if quantized else width
    weights = layers * _layer_weights(config) + _embedding(config)
    utilisation = float(node.get("gpu_memory_utilization") or 0.9)
    kv_width = _BYTES.get(str(node.get("kv_cache_dtype") or dtype), width)
    return MemoryNeed(
        available_gib=node.device_gib * utilisation,
        weights_gib=weights * weight_width / tensor / _GIB,
        activations_gib=budget * _live_values(config, tensor) * width / _GIB,
        kv_gib=(length or budget) * layers * _kv_values(config, tensor) * kv_width / _GIB,
    )


def _head(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _kv_heads(config: Mapping[str, Any]) -> int:
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])


def _experts(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Experts of a layer, those a token passes, and the width of one; a dense model is one expert."""
    many = int(config.get("n_routed_experts") or config.get("num_experts") or config.get("num_local_experts") or 0)
    dense = int(config.get("intermediate_size") or 4 * config["hidden_size"])
    if not many:
        return 1, 1, dense
    return many, int(config.get("num_experts_per_tok", 2)), int(config.get("moe_intermediate_size") or dense)


def _layer_weights(config: Mapping[str, Any]) -> int:
    hidden, head = int(config["hidden_size"]), _head(config)
    attention = hidden * head * (2 * int(config["num_attention_heads"]) + 2 * _kv_heads(config))
    many, _, width = _experts(config)
    return attention + 3 * hidden * width * many


def _embedding(config: Mapping[str, Any]) -> int:
    return int(config.get("vocab_size", 0)) * int(config["hidden_size"])


def _live_values(config: Mapping[str, Any], tensor: int) -> float:
    """Values a token that live at once where the layer needs most."""
    _, passed, width = _experts(config)
    attention = _head(config) * (2 * int(config["num_attention_heads"]) + 2 * _kv_heads(config)) / tensor
    return _HIDDEN_COPIES * int(config["hidden_size"]) + max(attention, 3 * passed * width / tensor)


def _kv_values(config: Mapping[str, Any], tensor: int) -> float:
    """Values of KV a token and layer on one device; MLA keeps one latent vector and does not split it."""
    if config.get("kv_lora_rank"):
        return float(config["kv_lora_rank"] + config.get("qk_rope_head_dim", 0))
    return 2 * _head(config) * max(_kv_heads(config) / tensor, 1)
