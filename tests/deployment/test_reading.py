from __future__ import annotations

import json
from pathlib import Path

import pytest

from isochunk.core.errors import ConfigError
from tests.deployment.reading import found, node, read


def test_a_command_line_is_read_in_all_its_spellings() -> None:
    made = node(
        "#!/bin/sh\nexport A=1\nB='2 3' /opt/bin/vllm serve /models/m -pp 4 --tensor_parallel_size=2 \\\n"
        " --max-num-batched-tokens 8K --no-enable-chunked --trust-remote-code --max-model-len auto \\\n"
        " --kv-transfer-config.kv_role kv_producer --kv-transfer-config.kv_connector NixlPushConnector # a comment\n"
    )
    assert (made.model, made.role, dict(made.env)) == ("/models/m", "prefill", {"A": "1", "B": "2 3"})
    assert (made.size("pipeline"), made.size("tensor"), made.size("data")) == (4, 2, 1)
    assert made.number("max_num_batched_tokens") == 8192
    assert made.number("max_model_len") == -1
    assert made.get("enable_chunked_prefill") is False
    assert [connector.name for connector in made.connectors] == ["NixlPushConnector"]
    assert made.lines["max_num_batched_tokens"].line == 4


@pytest.mark.parametrize(
    "text",
    [
        "python3 -m vllm.entrypoints.openai.api_server --model m --port 3",
        "python -u -m vllm.entrypoints.cli.main serve m --port 3",
        "CUDA_VISIBLE_DEVICES=0 nohup vllm serve m --port 3 > log.txt 2>&1 &",
        "env A=1 numactl -N 0 vllm serve --model m --port=3",
        "bash -c 'cd /x && vllm serve m --port 3'",
        "ssh -p 22 me@there 'vllm serve m --port 3'",
        "docker run --rm -it --gpus all -v /a:/b --network host vllm/vllm-openai:latest --model m --port 3",
        "docker run --gpus all --entrypoint vllm vllm/vllm-openai serve m --port 3",
        "M=m; P=3\nvllm serve $M --port ${P}",
        'ARGS=(\n  --port 3\n)\nvllm serve m "${ARGS[@]}"',
        "start() {\n vllm serve $1 --port $2 &\n}\nstart m 3",
        "for i in 3; do vllm serve m --port $i; done",
        "for ((i=0; i<1; i++)); do\n vllm serve m --port $((i + 3))\ndone",
        "if true; then\n vllm serve m --port 3\nfi",
    ],
)
def test_a_server_is_found_in_what_starts_it(text: str) -> None:
    made = node(text)
    assert (made.model, made.port) == ("m", 3)


COMPOSE = """
services:
  prefill:
    image: vllm/vllm-openai:latest
    command: --model m --port 8100 --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_producer"}'
    environment: [CUDA_VISIBLE_DEVICES=0, "VLLM_NIXL_SIDE_CHANNEL_HOST=prefill"]
    ports: ["8100:8100"]
    deploy: {resources: {reservations: {devices: [{driver: nvidia, count: 1, capabilities: [gpu]}]}}}
  web: {image: nginx}
"""
POD = """
apiVersion: v1
kind: Pod
metadata: {name: p, labels: {llm-d.ai/role: prefill}}
spec:
  containers:
  - name: vllm
    image: vllm/vllm-openai:latest
    command: ["/bin/sh", "-c"]
    args:
    - |
      exec vllm serve m \\
        --port 8100 \\
        --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'
    env:
    - name: CUDA_VISIBLE_DEVICES
      value: "0"
    - name: VLLM_NIXL_SIDE_CHANNEL_HOST
      valueFrom: {fieldRef: {fieldPath: status.podIP}}
    resources: {limits: {nvidia.com/gpu: "1"}}
"""


@pytest.mark.parametrize("text", [COMPOSE, POD])
def test_containers_are_read_with_role_environment_and_devices(text: str) -> None:
    made = node(text, "d.yaml")
    assert (made.model, made.port, made.role, made.devices) == ("m", 8100, "prefill", 1)
    assert made.env["CUDA_VISIBLE_DEVICES"] == "0"
    assert found(text, "d.yaml") == []


def test_a_list_of_words_with_numbers_is_a_command() -> None:
    text = "kind: Pod\nspec: {containers: [{name: d, image: vllm/vllm-openai, args: [serve, m, --port, 3]}]}"
    assert node(text.replace("args", "command: [vllm], args"), "d.yaml").port == 3


def test_several_commands_of_one_script_are_all_nodes() -> None:
    proxy = "python toy_proxy_server.py --prefiller-ports 1 --decoder-ports 2"
    made = read(f"vllm serve m --port 1 &\nvllm serve m --port 2 &\n{proxy}")
    assert [each.role for each in made.nodes] == ["prefill", "decode"]


def test_what_only_the_shell_knows_is_unknown_and_no_fault() -> None:
    text = """vllm serve $MODEL --port "$1" -tp $TP --kv-transfer-config \
    '{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_port": "'$PORT'"}' "$@" """
    made = node(text)
    assert (made.model, made.size("tensor"), made.kv["kv_port"]) == ("unknown/model", None, None)
    assert made.whole is False
    assert found(text) == []


def test_a_config_file_stands_in_its_option_s_place(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("model: other\nport: 3\ntensor-parallel-size: 2\nenable-chunked-prefill: false\n")
    made = node("vllm serve m --config c.yaml -tp 4", near=tmp_path)
    assert (made.model, made.port, made.size("tensor")) == ("m", 3, 4)
    assert made.get("enable_chunked_prefill") is False
    assert node("vllm serve --config c.yaml", near=tmp_path).model == "other"


@pytest.mark.parametrize(
    ("text", "rule", "line"),
    [
        ("vllm serve m\n  --port 3", "cut-off", 2),
        ("vllm serve m \\ \n  --port 3", "blank-after-backslash", 1),
        ("vllm serve m \\\n # why\n --port 3", "cut-off", 3),
        ("VLLM_NIXL_SIDE_CHANNEL_PORT=5601\nvllm serve m", "not-exported", 1),
        ("vllm serve m \\\n --tensor-paralel-size 3", "unknown-option", 2),
        ("vllm serve m \\\n --max 3", "bad-value", 2),
        ("vllm serve m \\\n --port x", "bad-value", 2),
        ("vllm serve m --dtype int5", "bad-value", 1),
        ("vllm serve m --additional-config {'a': 1}", "not-json", 1),
        ('vllm serve m --kv-transfer-config \'{"kv_conector": "x"}\'', "bad-value", 1),
        ("vllm serve m other", "stray-word", 1),
        ("vllm serve m --config=c.yaml", "config-file", 1),
        ("vllm serve --port 3", "model-named", 1),
        ("python -m vllm.entrypoints.openai.api_server m", "model-named", 1),
        ("python -m vllm.entrypoints.openai.api_server --model m --headless", "headless-module", 1),
    ],
)
def test_a_fault_of_writing_is_named_with_its_line(text: str, rule: str, line: int) -> None:
    faults = [finding for finding in found(text) if finding.level == "error"]
    assert [(finding.rule, finding.line) for finding in faults] == [(rule, line)]
    assert faults[0].remedy


def test_a_backslash_in_a_folded_block_is_named() -> None:
    text = "prefill:\n- command: >\n    vllm serve m \\\n    --port 3\n"
    assert [f.rule for f in found(text, "d.yaml") if f.rule == "folded-backslash"] == ["folded-backslash"]
    assert not [f for f in found(text.replace(">", "|"), "d.yaml") if f.rule == "folded-backslash"]


@pytest.mark.parametrize(
    ("text", "message"),
    [("sglang serve m", "no 'vllm serve MODEL'"), ("vllm serve 'm", "is never closed"), ("echo $(", "closes")],
)
def test_what_is_no_command_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(text)


@pytest.mark.parametrize(
    "text", ["[]", "prefil: []", "prefill: x", "prefill: [{port: 1}]", "prefill: [1]", "a: [", "1", "null", "&a [*a]",
             "prefill: [{command: vllm serve m, hots: x}]", "prefill: [{command: vllm serve m, device_gib: -1}]",
             "services: [1]", "kind: Pod", "prefill: [{command: vllm serve m, env: 3}]"],
)  # fmt: skip
def test_a_yaml_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        read(text, "d.yaml")


def test_a_finding_is_plain_data() -> None:
    (finding,) = found("vllm serve m\n  --port 3")
    assert json.loads(json.dumps(finding.as_dict()))["file"] == "run.sh"


def test_what_vllm_dropped_is_no_fault_on_ascend_which_is_built_on_earlier_versions() -> None:
    more = """--max-num-partial-prefills 2 --kv-transfer-config \
    '{"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both", "kv_rank": 0, "kv_parallel_size": 2}'"""
    assert [finding.rule for finding in found(f"vllm serve m {more}")] == ["unknown-option"] * 2
    assert found(f"HCCL_BUFFSIZE=256 vllm serve m {more}") == []
