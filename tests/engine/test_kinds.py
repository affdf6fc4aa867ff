"""Models and options beside a plain text model: each must be served under isochunk's plans on a real engine."""

import json
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: these tests start real servers")

from benchmarks.models import ENVIRON, options, tiny_qwen3
from isochunk.cli.server import running_server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LONGEST = 5000
QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    "num_experts": 0,
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


@contextmanager
def serving(folder: Path, model: Path, *more: str) -> Iterator[httpx.Client]:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two pipeline stages need two cores")
    section = json.dumps({"scheduler_config": {"profiling_chunk_config": {"profile": str(folder / "profile.json")}}})
    chosen = [*options("tiny-qwen3", LONGEST, max_tokens=4096), "--enforce-eager", "--additional-config", section]
    with (
        running_server(model, [*chosen, *more], log=folder / "server.log", environ=ENVIRON) as url,
        httpx.Client(base_url=url, timeout=300) as client,
    ):
        yield client


def answer(client: httpx.Client, model: str, prompt: list[int], **more: Any) -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **more}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] == 8
    return str(response.json()["choices"][0]["text"])


def prompt(length: int = LONGEST) -> list[int]:
    return random.Random(length).choices(range(100, 40_000), k=length)


def the_last_prompt_was_planned(client: httpx.Client, tokens: int = LONGEST) -> dict[str, Any]:
    told = client.get("/isochunk/status").json()
    last = told["prompts"][-1]
    assert sum(last["chunks"]) + last["cached"] == tokens
    assert len(last["chunks"]) > 2
    assert told["counters"]["fallbacks"] == 0
    assert told["counters"]["planned"] >= 1
    return dict(told)


def test_a_lora_adapter_is_served_under_the_same_plans(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    adapter = tmp_path / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 64, "target_modules": ["q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    weights = {}
    for layer in range(8):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(8, 256)
        weights[f"{name}.lora_B.weight"] = torch.randn(256, 8)
    save_file(weights, adapter / "adapter_model.safetensors")
    lora = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"tuned={adapter}")
    with serving(tmp_path, tiny_qwen3(), *lora) as client:
        plain = answer(client, "tiny-qwen3", prompt())
        planned = the_last_prompt_was_planned(client)["counters"]["planned"]
        tuned = answer(client, "tuned", prompt())
        assert the_last_prompt_was_planned(client)["counters"]["planned"] == planned + 1
        assert plain != tuned
        client.post("/isochunk/policy", json={"policy": "fixed", "chunk": 1024}).raise_for_status()
        answer(client, "tuned", prompt(), cache_salt="again")


def test_a_hybrid_model_is_served_in_whole_blocks_where_vllm_needs_them(tmp_path: Path) -> None:
    model = tmp_path / "qwen3-next"
    model.mkdir()
    for file in tiny_qwen3().glob("*token*"):
        (model / file.name).write_bytes(file.read_bytes())
    (model / "config.json").write_text(json.dumps(QWEN3_NEXT))
    with serving(tmp_path, model) as client:
        answer(client, "tiny-qwen3", prompt())
        told = the_last_prompt_was_planned(client)
        chunks = told["prompts"][-1]["chunks"]
        assert told["alignment"] == told["block_size"]
        assert all(chunk % told["alignment"] == 0 for chunk in chunks[:-1])


def test_ngram_speculation_is_served(tmp_path: Path) -> None:
    speculation = json.dumps({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2})
    with serving(tmp_path, tiny_qwen3(), "--speculative-config", speculation) as client:
        answer(client, "tiny-qwen3", prompt())
        the_last_prompt_was_planned(client)
