"""Models and modes beside those of test_server, on virtual stages where the model itself does not matter.

With pipeline stages the workers of vLLM's CPU build (0.32.0) fail on LoRA adapters (`intermediate_tensors is not None`)
and on n-gram speculation (no attribute `drafter`), so these are not tried here.
"""

import base64
import io
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: these tests start real servers")

from benchmarks.models import ENVIRON, QWEN3, isochunk_options, options, random_model
from isochunk import CostModel
from isochunk.cli.rehearsed import running_rehearsal, tiny_model
from isochunk.core.errors import ConfigError
from isochunk.deployment.server import running_server
from isochunk.vllm.virtual.rehearsal import Rehearsal

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
PIXELS = 224
IMAGE_TOKENS = 32
BLIP2 = {
    "architectures": ["Blip2ForConditionalGeneration"],
    "model_type": "blip-2",
    "num_query_tokens": IMAGE_TOKENS,
    "text_config": {
        "model_type": "opt",
        "hidden_size": 256,
        "word_embed_proj_dim": 256,
        "ffn_dim": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 49280,
        "max_position_embeddings": 8192,
    },
    "vision_config": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": PIXELS,
    },
    "qformer_config": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "encoder_hidden_size": 64,
    },
    "torch_dtype": "bfloat16",
}


def chosen(folder: Path, *more: str) -> list[str]:
    return [*options("tiny-qwen3", LONGEST, max_tokens=4096), *isochunk_options(profile=str(folder / "p.json")), *more]


def status_after_twice(url: str) -> dict[str, Any]:
    """Serve one prompt of 5000 tokens twice under isochunk; what the server says after that."""
    with httpx.Client(base_url=url, timeout=300) as client:
        prompt = random.choices(range(100, 40_000), k=LONGEST)
        body = {"model": "tiny-qwen3", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        for _ in range(2):
            response = client.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            assert response.json()["usage"]["completion_tokens"] == 8
        told = dict(client.get("/isochunk/status").json())
    for prompt in told["prompts"]:
        assert prompt["cached"] + sum(prompt["chunks"]) == LONGEST
        assert prompt["predicted_ttft_s"] > 0
    assert len(told["prompts"][0]["chunks"]) > 1
    assert told["counters"]["planned"] == 2
    assert told["counters"]["fallbacks"] == 0
    return told


def virtual(folder: Path) -> Rehearsal:
    """Two stages with the costs of a tiny Qwen3 on two cores."""
    costs = folder / "costs.json"
    costs.write_text(json.dumps(CostModel(c0=0.0059, c1=18e-6, c2=20e-9, c3=0.56e-6).as_dict()))
    return Rehearsal(profile=str(costs))


def test_a_hybrid_model_is_served_in_whole_blocks_where_vllm_needs_them(tmp_path: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two pipeline stages need two cores")
    # Its costs are given: a probe takes minutes where bfloat16 is emulated.
    (tmp_path / "p.json").write_text(json.dumps({"c0": 0.02, "c1": 1e-3, "c2": 1e-7}))
    model = random_model(tmp_path / "qwen3-next", QWEN3_NEXT)
    options = chosen(tmp_path, "--enforce-eager")
    with running_server(model, options, log=tmp_path / "server.log", environ=ENVIRON) as url:
        told = status_after_twice(url)
    block = told["alignment"]
    assert block == told["block_size"]
    for prompt in told["prompts"]:
        ends = [at + chunk for at, chunk in zip(prompt["histories"], prompt["chunks"], strict=True)]
        # Of what is left behind the last whole block vLLM may make two steps by itself.
        assert all(end % block == 0 or LONGEST - end < block for end in ends)


def test_without_prefix_caching_every_token_is_computed(tmp_path: Path) -> None:
    options = chosen(tmp_path, "--no-enable-prefix-caching")
    with running_rehearsal(virtual(tmp_path), options, log=tmp_path / "server.log") as url:
        told = status_after_twice(url)
    assert [prompt["cached"] for prompt in told["prompts"]] == [0, 0]


def blip2(folder: Path) -> Path:
    """A BLIP-2 with random weights; a picture is 32 tokens at the start of the prompt."""
    from transformers import AutoTokenizer

    shutil.copytree(tiny_model(), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(folder)
    image_token = tokenizer.convert_tokens_to_ids("<image>")
    (folder / "config.json").write_text(json.dumps({**BLIP2, "image_token_index": image_token}))
    picture = {"image_processor_type": "BlipImageProcessor", "size": {"height": PIXELS, "width": PIXELS}}
    (folder / "preprocessor_config.json").write_text(json.dumps(picture))
    processor = {"processor_class": "Blip2Processor", "num_query_tokens": IMAGE_TOKENS}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    return folder


def picture_url() -> str:
    from PIL import Image

    file = io.BytesIO()
    Image.frombytes("RGB", (PIXELS, PIXELS), random.randbytes(3 * PIXELS**2)).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize("whole", [False, True])
def test_prompts_with_images_are_planned_and_what_must_stay_whole_does(tmp_path: Path, whole: bool) -> None:
    options = [
        str(blip2(tmp_path / "blip2")),
        *chosen(tmp_path, *(["--disable-chunked-mm-input"] if whole else [])),
    ]
    text = {"type": "text", "text": "word " * 2000}
    content = [text, {"type": "image_url", "image_url": {"url": picture_url()}}, text]
    body = {"model": "tiny-qwen3", "messages": [{"role": "user", "content": content}], "max_tokens": 4}
    with (
        running_rehearsal(virtual(tmp_path), options, log=tmp_path / "server.log") as url,
        httpx.Client(base_url=url, timeout=300) as client,
    ):
        response = client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        told = client.get("/isochunk/status").json()
    (prompt,) = told["prompts"]
    assert prompt["tokens"] == response.json()["usage"]["prompt_tokens"] > 4000 + IMAGE_TOKENS
    assert len(prompt["chunks"]) > 2
    assert prompt["chunks"][0] >= IMAGE_TOKENS  # the picture stands at the start
    assert told["counters"]["planned"] == 1
    assert told["counters"]["fallbacks"] == 0


def test_a_deployment_that_cannot_work_ends_with_the_reason(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"(?s)ended with exit code 1.*--pipeline-parallel-size 1: isochunk plans"),
        running_rehearsal(virtual(tmp_path), stages=1, log=tmp_path / "server.log"),
    ):
        pass
