"""Whatever somebody gives to be checked, it ends in findings or in a message, never in a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from isochunk.core.errors import IsochunkError
from tests.deployment.reading import found

RIGHT = Path(__file__).parent / "data" / "right"
SOURCES = {path.name: path.read_text() for path in sorted(RIGHT.iterdir()) if path.is_file()}

WORDS = st.sampled_from(
    [
        "vllm serve",
        "m",
        "isochunk",
        "--port",
        "-1",
        "8000",
        "--kv-transfer-config",
        "'{",
        "}'",
        "\\",
        "\n",
        "$X",
        "${X:-1}",
        "$((",
        "))",
        "$(",
        ")",
        "`",
        "for",
        "in",
        "do",
        "done",
        "if",
        "fi",
        "{",
        "}",
        "(",
        "f()",
        "&",
        "|",
        "<<EOF",
        "EOF",
        "#",
        "A=1",
        "A=(",
        "export",
        "docker run",
        "-e",
        "--gpus",
        "ssh h",
        '"vllm serve m"',
        "bash -c",
        "'",
        '"',
        "--max-model-len",
        "128k",
        "-tp",
        "-O3",
        "--",
        "-cc.mode",
        "--additional-config.a.b",
        "case",
        "esac",
        "function",
        "1e999",
        "\ue000",
        "--config",
        "python -m vllm.entrypoints.openai.api_server",
        "--prefiller-ports",
        "toy_proxy_server.py",
        "<x>",
        "...",
        "\x00",
        "é",
    ]
)
KEYS = st.sampled_from(
    [
        "prefill",
        "decode",
        "proxy",
        "nodes",
        "command",
        "env",
        "host",
        "services",
        "kind",
        "spec",
        "containers",
        "args",
        "image",
        "name",
        "items",
        "ports",
        "deploy",
        "resources",
        "limits",
        "device_gib",
        "devices",
        "model_config",
        "metadata",
        "labels",
        "environment",
        "modelCommand",
        "entrypoint",
        "kv_connector",
        "kv_role",
        "nvidia.com/gpu",
        "value",
        "valueFrom",
        "network_mode",
    ]
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(
        [
            "vllm serve m --port 1",
            'vllm serve m -tp 2 --kv-transfer-config \'{"kv_connector":"NixlConnector","kv_role":"kv_producer"}\'',
            "vllm/vllm-openai:v0.1",
            "isochunk proxy --prefiller-ports 1",
        ]
    ),
)
TREES = st.recursive(
    LEAVES, lambda below: st.lists(below, max_size=4) | st.dictionaries(KEYS, below, max_size=5), max_leaves=25
)


def ends_well(text: str, file: str) -> None:
    try:
        findings = found(text, file, RIGHT)
    except IsochunkError:
        return
    json.dumps([finding.as_dict() for finding in findings])
    assert all(finding.what and finding.why and finding.remedy for finding in findings)


@settings(max_examples=400)
@given(st.lists(WORDS | st.text(max_size=5), max_size=30).map(" ".join))
def test_any_script_ends_well(text: str) -> None:
    ends_well(text, "run.sh")
    ends_well(f"vllm serve m {text}", "run.sh")


@settings(max_examples=300)
@given(TREES)
def test_any_yaml_ends_well(tree: Any) -> None:
    ends_well(yaml.safe_dump(tree), "d.yaml")


@settings(max_examples=300)
@given(st.sampled_from(sorted(SOURCES)), st.data())
def test_a_spoilt_deployment_ends_well(name: str, data: st.DataObject) -> None:
    text = SOURCES[name]
    begin = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(begin, min(len(text), begin + 60)))
    ends_well(text[:begin] + data.draw(WORDS | st.text(max_size=6)) + text[end:], name)


JSON = st.recursive(
    LEAVES,
    lambda below: (
        st.lists(below, max_size=3)
        | st.dictionaries(
            KEYS
            | st.sampled_from(
                [
                    "connectors",
                    "kv_connector_extra_config",
                    "kv_port",
                    "engine_id",
                    "prefill",
                    "decode",
                    "tp_size",
                    "dp_size",
                    "pp_size",
                    "scheduler_config",
                    "profiling_chunk_config",
                    "enabled",
                    "rope_scaling",
                    "factor",
                    "original_max_position_embeddings",
                    "method",
                ]
            ),
            below,
            max_size=4,
        )
    ),
    max_leaves=15,
)


@settings(max_examples=300)
@given(JSON, st.sampled_from(["kv-transfer-config", "additional-config", "hf-overrides", "speculative-config"]))
def test_any_json_of_an_option_ends_well(value: Any, option: str) -> None:
    text = json.dumps(value)
    command = ["vllm", "serve", "Qwen/Qwen3-8B", "--max-model-len", "200k", f"--{option}", text]
    ends_well(json.dumps({"prefill": [{"command": command}], "decode": [{"command": command}]}), "d.json")
