"""What is known of a model: from its ``config.json``, or by its name when it is a well-known one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isochunk.core.errors import ConfigError
from isochunk.deployment.command import locate

__all__ = ["ModelShape", "read_shape"]

# Attention heads, KV heads, layers, positions; 1 KV head stands for one latent vector (MLA). By the published configs.
_KNOWN: tuple[tuple[str, int, int, int, int], ...] = (
    (r"llama-?3(\.\d)?-(405b).*", 128, 8, 126, 131072),
    (r"(meta-)?llama-3\.[13]-70b.*|deepseek-r1-distill-llama-70b.*", 64, 8, 80, 131072),
    (r"(meta-)?llama-3\.1-8b.*|deepseek-r1-distill-llama-8b.*", 32, 8, 32, 131072),
    (r"(meta-)?llama-3\.2-1b.*", 32, 8, 16, 131072),
    (r"(meta-)?llama-3\.2-3b.*", 24, 8, 28, 131072),
    (r"meta-llama-3-8b.*", 32, 8, 32, 8192),
    (r"meta-llama-3-70b.*", 64, 8, 80, 8192),
    (r"meta-llama-3\.1-405b.*", 128, 8, 126, 131072),
    (r"qwen2\.5-72b.*", 64, 8, 80, 32768),
    (r"qwen2\.5-32b.*", 40, 8, 64, 32768),
    (r"qwen2\.5-14b.*", 40, 8, 48, 32768),
    (r"qwen2\.5-7b.*", 28, 4, 28, 32768),
    (r"qwen2\.5-3b.*", 16, 2, 36, 32768),
    (r"qwen2\.5-1\.5b.*", 12, 2, 28, 32768),
    (r"qwen2\.5-0\.5b.*", 14, 2, 24, 32768),
    (r"qwen3-0\.6b.*", 16, 8, 28, 40960),
    (r"qwen3-1\.7b.*", 16, 8, 28, 40960),
    (r"qwen3-4b", 32, 8, 36, 40960),
    (r"qwen3-8b.*", 32, 8, 36, 40960),
    (r"qwen3-14b.*", 40, 8, 40, 40960),
    (r"qwen3-32b.*", 64, 8, 64, 40960),
    (r"qwen3-30b-a3b(-fp8)?", 32, 4, 48, 40960),
    (r"qwen3-30b-a3b-(instruct|thinking)-2507.*", 32, 4, 48, 262144),
    (r"qwen3-coder-30b-a3b.*", 32, 4, 48, 262144),
    (r"qwen3-235b-a22b(-fp8|-w8a8)?", 64, 4, 94, 40960),
    (r"qwen3-235b-a22b-(instruct|thinking)-2507.*", 64, 4, 94, 262144),
    (r"qwen3-coder-480b-a35b.*", 96, 8, 62, 262144),
    (r"deepseek-(v3|r1)(\.1)?(-0324|-0528|-base|-terminus|[-_]?w8a8|[-_]?w4a8)*", 128, 1, 61, 163840),
    (r"deepseek-v3\.2.*", 128, 1, 61, 163840),
    (r"deepseek-v2-lite.*", 16, 1, 27, 163840),
    (r"mixtral-8x7b.*", 32, 8, 32, 32768),
    (r"mixtral-8x22b.*", 48, 8, 56, 65536),
    (r"gpt-oss-120b.*", 64, 8, 36, 131072),
    (r"gpt-oss-20b.*", 64, 8, 24, 131072),
    (r"kimi-k2-(instruct|base).*", 64, 1, 61, 131072),
    (r"glm-4\.5-air.*", 96, 8, 46, 131072),
    (r"glm-4\.5(-fp8)?", 96, 8, 92, 131072),
)
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length",
            "max_target_positions", "max_sequence_length", "max_seq_length", "seq_len")  # fmt: skip
# Their `max_position_embeddings` holds the factor already, in vLLM as in transformers.
_SCALED = frozenset(("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"))


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model; None where they are not known.

    Attributes:
        heads, kv_heads, layers: of the text model; one KV head for a model with one latent vector (``latent``).
        positions: longest context, with what rope scaling adds, as vLLM computes it.
        config: the ``config.json``, where it was read.
    """

    heads: int | None = None
    kv_heads: int | None = None
    layers: int | None = None
    positions: int | None = None
    latent: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)


def read_shape(model: str | None, told: str | None, overrides: Any, near: Path) -> ModelShape:
    """The shape of a model.

    Args:
        told: path of its ``config.json``; None looks in the model's folder.
        overrides: its ``--hf-overrides``.
        near: folder from which relative paths count.

    Raises:
        ConfigError: the told file can't be read.
    """
    name = told or (f"{model}/config.json" if model else None)
    path = locate(name, near) if name else None
    config = _read(path, needed=told is not None) if path is not None else {}
    overrides = overrides if isinstance(overrides, Mapping) else {}
    return from_config(config, overrides) if config else _by_name(model or "", overrides)


def _read(path: Path, *, needed: bool) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if needed:
            raise ConfigError(f"can't read the model's configuration {path}: {error}") from None
        return {}
    return data if isinstance(data, dict) else {}


def _by_name(model: str, overrides: Mapping[str, Any]) -> ModelShape:
    name = re.split(r"[/\\]", model.rstrip("/"))[-1].lower()
    for pattern, heads, kv_heads, layers, positions in _KNOWN:
        if re.fullmatch(pattern, name):
            longer = from_config({"max_position_embeddings": positions}, overrides).positions
            return ModelShape(heads, kv_heads, layers, longer, latent=kv_heads == 1)
    return ModelShape()


def from_config(config: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> ModelShape:
    """The shape that a ``config.json`` says, under ``--hf-overrides``."""
    text = config.get("text_config")
    merged = {**config, **(text if isinstance(text, Mapping) else {}), **(overrides or {})}
    heads = _int(merged.get("num_attention_heads"))
    latent = bool(_int(merged.get("kv_lora_rank")))
    kv_heads = 1 if latent else _int(merged.get("num_key_value_heads")) or heads
    layers = _int(merged.get("num_hidden_layers"))
    return ModelShape(heads, kv_heads, layers, _positions(merged), latent, merged)


def _int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _positions(config: Mapping[str, Any]) -> int | None:
    """Longest context, as `vllm.config.model._get_and_verify_max_len` derives it."""
    lengths = [length for key in _LENGTHS if (length := _int(config.get(key))) is not None]
    if not lengths:
        return None
    longest: float = _int(config.get("model_max_length")) or min(lengths)
    if "gemma3" in str(config.get("model_type")):
        return int(longest)
    factor = 1.0
    for rope in _ropes(config):
        kind = rope.get("rope_type") or rope.get("type") or "default"
        scale = rope.get("factor")
        if kind not in _SCALED and isinstance(scale, (int, float)) and not isinstance(scale, bool):
            factor = float(scale)
    product = longest * factor
    return int(product) if 0 < product < float("inf") else None


def _ropes(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.get(key)
        if isinstance(rope, Mapping) and rope:
            inside = [each for each in rope.values() if isinstance(each, Mapping)]
            return inside or [rope]
    return []
