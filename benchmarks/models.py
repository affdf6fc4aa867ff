"""The models that benchmarks and engine tests run: SmolLM2 with real weights, and a tiny random Qwen3."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from isochunk.cli.demo_model import ENVIRON, demo_model
from isochunk.core.profile import default_folder

__all__ = ["ENVIRON", "MODELS", "QWEN3", "isochunk_options", "options", "random_model", "tiny_qwen3"]

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 49152,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_qwen3() -> Path:
    """Folder of a Qwen3 of 8 layers with SmolLM2's tokenizer; vLLM fills in random weights."""
    return random_model(default_folder() / "models" / "tiny-qwen3", QWEN3)


def random_model(folder: Path, config: dict[str, Any]) -> Path:
    """Write a model of this configuration, without weights and with SmolLM2's tokenizer; returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in (*demo_model().glob("*token*"), *demo_model().glob("*template*")):
        shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder


def options(model: str, longest: int, *, max_tokens: int = 8192, stages: int = 2) -> list[str]:
    """vLLM's options for prompts of up to ``longest`` tokens."""
    common = [
        *("--pipeline-parallel-size", str(stages)),
        *("--max-num-batched-tokens", str(max_tokens)),
        *("--max-model-len", str(longest + 256)),
        *("--served-model-name", model, "--enable-prompt-tokens-details"),
    ]
    if model == "tiny-qwen3":
        return [*common, "--load-format", "dummy"]
    return [*common, "--hf-overrides", '{"max_position_embeddings": 32768}']


def isochunk_options(**section: Any) -> list[str]:
    """vLLM's option that holds isochunk's own: ``isochunk_options(profile="off")``."""
    return ["--additional-config", json.dumps({"scheduler_config": {"profiling_chunk_config": section}})]


MODELS = {"smollm2": demo_model, "tiny-qwen3": tiny_qwen3}
