"""Models that are not plain attention: served under isochunk's plans on a real engine.

With pipeline stages the workers of vLLM's CPU build (0.32.0) fail on LoRA adapters (`intermediate_tensors is not None`)
and on n-gram speculation (no attribute `drafter`), so these are not tried here.
"""

import json
import os
import random
from pathlib import Path

import httpx
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: these tests start real servers")

from benchmarks.models import ENVIRON, QWEN3, options, random_model
from isochunk.cli.server import running_server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LONGEST = 5000
QWEN3_NEXT = {
    **QWEN3,
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
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
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}


def test_a_hybrid_model_is_served_in_whole_blocks_where_vllm_needs_them(tmp_path: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two pipeline stages need two cores")
    model = random_model(tmp_path / "qwen3-next", QWEN3_NEXT)
    section = {"scheduler_config": {"profiling_chunk_config": {"profile": str(tmp_path / "profile.json")}}}
    chosen = [*options("tiny-qwen3", LONGEST, max_tokens=4096), "--enforce-eager"]
    chosen += ["--additional-config", json.dumps(section)]
    with (
        running_server(model, chosen, log=tmp_path / "server.log", environ=ENVIRON) as url,
        httpx.Client(base_url=url, timeout=300) as client,
    ):
        prompt = random.choices(range(100, 40_000), k=LONGEST)
        body = {"model": "tiny-qwen3", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        response = client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["completion_tokens"] == 8
        told = client.get("/isochunk/status").json()
        chunks = told["prompts"][-1]["chunks"]
        assert sum(chunks) == LONGEST
        assert len(chunks) > 1
        assert told["counters"]["planned"] == 1
        assert told["counters"]["fallbacks"] == 0
        assert told["alignment"] == told["block_size"]
        assert all(chunk % told["alignment"] == 0 for chunk in chunks[:-1])
