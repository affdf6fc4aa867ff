from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isochunk.deployment.documents import Started, read_text
from isochunk.deployment.finding import Finding
from isochunk.deployment.rules import RULES, check
from tests.deployment.reading import deployment_of, found

ON = """--additional-config '{"scheduler_config": {"profiling_chunk_config": {"enabled": true}}}'"""
PROXY = "isochunk proxy --prefiller-hosts host0 --prefiller-ports 1 --decoder-hosts host1 --decoder-ports 2"
LMCACHE = "LMCacheConnectorV1"
SIDE = "VLLM_NIXL_SIDE_CHANNEL_HOST"
GUIDE = Path(__file__).parents[2] / "docs" / "pd-disaggregation.md"


def kv(role: str, connector: str = "NixlPushConnector", **more: Any) -> str:
    return "--kv-transfer-config '" + json.dumps({"kv_connector": connector, "kv_role": role, **more}) + "'"


def prefill(more: str = "", connector: str = "NixlPushConnector", **fields: Any) -> str:
    return f"isochunk serve m --port 1 --pipeline-parallel-size 2 {ON} {kv('kv_producer', connector, **fields)} {more}"


def decode(more: str = "", connector: str = "NixlPushConnector", **fields: Any) -> str:
    return f"vllm serve m --port 2 {kv('kv_consumer', connector, **fields)} {more}"


def findings(*commands: str, proxy: str = "") -> list[Finding]:
    """Of commands on machines of their own."""
    started: list[Started] = []
    for index, command in enumerate(commands):
        for each in read_text(command, "run.sh"):
            started.append(
                replace(
                    each,
                    command=replace(
                        each.command,
                        host=f"host{index}",
                        name=f"node{index}",
                        env={SIDE: f"host{index}", **each.command.env},
                    ),
                )
            )
    started += read_text(proxy, "proxy.sh") if proxy else []
    return check(deployment_of(started))


def told(found: list[Finding], level: str = "error") -> str:
    return "\n".join(f"{f.rule}: {f.node}: {f.what}; {f.remedy}" for f in found if f.level == level)


def test_a_right_deployment_has_no_findings() -> None:
    assert findings(prefill(), decode(), proxy=PROXY) == []


@pytest.mark.parametrize(
    ("commands", "message"),
    [
        ([prefill("-pp 1"), decode()], "without pipeline parallelism"),
        ([prefill(), decode("-pp 2")], "a D node with --pipeline-parallel-size 2"),
        ([prefill("--no-enable-chunked-prefill"), decode()], "chunked prefill is off"),
        ([prefill("--scheduler-cls a.B"), decode()], "--scheduler-cls a.B replaces"),
        ([prefill().replace('{"enabled"', '{"enable"'), decode()], "did you mean 'enabled'"),
        ([prefill().replace('"enabled": true', '"enabled": true, "min_chunk": 4096')
          + " --max-num-batched-tokens 4096", decode()], "min_chunk = 4096 is not below"),
        ([prefill().replace('"scheduler_config": {', '"scheduler_config": {"enable_balance_scheduling": true, '),
          decode()], "enable_balance_scheduling"),
        ([prefill(connector="NixlConnector"), decode(connector="NixlConnector")], "NixlConnector with pipeline stages"),
        ([prefill(connector="ExampleConnector"), decode(connector="ExampleConnector")], "stores the first chunk"),
        ([prefill(connector=LMCACHE), decode(connector=LMCACHE)], "LMCacheConnectorV1 with pipeline stages"),
        ([prefill(), decode(connector="MooncakeConnector")], "connector MooncakeConnector, and NixlPush"),
        ([prefill(), decode("--block-size 24")], "--block-size is 24, and 16 (not given) on node0"),
        ([prefill("--kv-cache-dtype fp8_e5m2"), decode("--kv-cache-dtype fp8")], "is fp8, and fp8_e5m2"),
        ([prefill(), decode().replace("serve m", "serve other")], "serves other, and node0 m"),
        ([prefill(), prefill()], "no decode node"),
        ([prefill(), decode(ON)], "isochunk is on for a D node"),
        ([prefill(engine_id="0"), decode(engine_id="0")], "engine_id 0 is that of node0 too"),
    ],
)  # fmt: skip
def test_an_error_is_found_and_comes_with_a_remedy(commands: list[str], message: str) -> None:
    assert message in told(findings(*commands))


@pytest.mark.parametrize(
    ("commands", "message"),
    [
        (["vllm serve m --port 1 -pp 2 --additional-config '{\"profiling_chunk_config\": {\"enabled\": true}}' "
          + kv("kv_producer"), decode()], "at the top of additional_config"),
        ([prefill("--async-scheduling"), decode()], "asynchronous scheduling on a P node"),
        ([prefill("--max-model-len 9000"), decode("--max-model-len 4000")], "is below the 9000 of node0"),
        ([prefill().replace("isochunk serve", "vllm serve"), decode()], "/isochunk/status is off"),
        (["VLLM_PLUGINS=isochunk vllm serve m --port 1 -pp 2 --additional-config "
          "'{\"profiling_chunk_config\": {\"enabled\": true}}' " + kv("kv_producer"), decode()],
         "at the top of additional_config"),
        ([prefill(connector="Own"), decode(connector="Own")], "connector 'Own' is not known"),
        ([prefill(connector="MooncakeConnector", kv_connector_extra_config={"mooncake_protocol": "tcp"}),
          decode(connector="MooncakeConnector")], "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER"),
    ],
)  # fmt: skip
def test_a_warning_is_found_and_is_no_error(commands: list[str], message: str) -> None:
    found = findings(*commands)
    assert message in told(found, "warning")
    assert told(found) == ""


@pytest.mark.parametrize(
    ("commands", "message"),
    [
        (
            [
                "HCCL_OP_EXPANSION_MODE=AIV "
                + prefill().replace('"enabled": true', '"enabled": true, "max_queue_delay": 1.0'),
                decode(),
            ],
            "max_queue_delay on a P node of vLLM-Ascend",
        ),
        ([prefill("--max-model-len 8192 --max-num-batched-tokens 16384"), decode()], "is longer than --max-model-len"),
        ([prefill().replace("isochunk serve", "vllm serve").replace(ON, ""), decode()], "2 stages and isochunk is off"),
    ],
)
def test_advice_is_a_note(commands: list[str], message: str) -> None:
    noted = findings(*commands)
    assert message in told(noted, "note")
    assert told(noted) == told(noted, "warning") == ""


def test_a_node_without_a_connector_is_an_error_where_its_role_is_known() -> None:
    assert "no --kv-transfer-config" in told(found("prefill: [vllm serve m -pp 2]\n", "d.yaml"))
    assert "kv-transfer-config" not in told(found("vllm serve m -pp 2"))


SIZES = {"prefill": {"tp_size": 1, "dp_size": 1, "pp_size": 2}, "decode": {"tp_size": 1, "dp_size": 1}}


def test_ascend_sizes_must_be_those_of_the_nodes() -> None:
    def both(sizes: Any, of_d: str = "") -> str:
        more = {"connector": "MooncakeConnectorV1", "kv_connector_extra_config": sizes}
        return told(findings(prefill("-tp 2", **more), decode(f"-tp 2 {of_d}", **more)))

    right = {"prefill": {"tp_size": 2, "dp_size": 1, "pp_size": 2}, "decode": {"tp_size": 2, "dp_size": 1}}
    assert both(right) == ""
    assert "decode.tp_size is 2, and node1 has --tensor-parallel-size 1" in both(right, "-tp 1")
    assert "prefill.pp_size is missing, and node0 has --pipeline-parallel-size 2" in both(
        {**right, "prefill": {"tp_size": 2, "dp_size": 1}}
    )
    assert 'add "decode": {"tp_size": 2, "dp_size": 1, "pp_size": 1}' in both({"prefill": right["prefill"]})


def test_ports_may_be_shared_by_hosts_and_not_on_one() -> None:
    both = f"{prefill()} &\n{decode().replace('--port 2', '--port 1')}"
    text = told(found(both))
    assert "--port 1: 1 is taken by --port of node 1" in text
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT 5600: 5600 is taken" in text
    assert told(findings(prefill(), decode().replace("--port 2", "--port 1"))) == told(findings(prefill(), decode()))


def test_ports_of_data_parallel_ranks_count() -> None:
    def text(base: int) -> str:
        p = f"VLLM_NIXL_SIDE_CHANNEL_PORT=5600 {prefill('-dp 2')}"
        return told(found(f"{p} &\nVLLM_NIXL_SIDE_CHANNEL_PORT={base} {decode()}"))

    assert "VLLM_NIXL_SIDE_CHANNEL_PORT 5601: 5601 is taken" in text(5601)
    assert text(5602) == ""


def test_the_proxy_must_know_the_nodes() -> None:
    text = told(findings(prefill(), decode(), proxy=PROXY.replace("ports 2", "ports 3")))
    assert "--decoder-ports names host1:3, and node1 listens on host1:2" in text
    mooncake = [prefill(connector="MooncakeConnector"), decode(connector="MooncakeConnector")]
    assert "--prefiller-bootstrap-ports" in told(findings(*mooncake, proxy=PROXY))
    assert told(findings(*mooncake, proxy=PROXY + " --prefiller-bootstrap-ports 8998")) == ""


CONFIG = {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 32768, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_a_budget_too_large_for_the_memory_is_found(model: Path) -> None:
    def text(budget: int) -> str:
        command = f"isochunk serve {model} -tp 4 -pp 2 {ON} --max-model-len 32768 --max-num-batched-tokens {budget}"
        return told(found(json.dumps({"nodes": [{"command": command, "device_gib": 23}]}), "d.json"))

    assert text(4096) == ""
    assert re.search(r"a step of 32768 tokens needs about \d+\.\d GiB a device", text(32768))


def test_a_long_context_needs_scaling_and_permission(model: Path) -> None:
    def text(more: str, env: str = "") -> str:
        return told(found(f"{env} isochunk serve {model} -pp 2 {ON} --max-model-len 131072 {more}"))

    def yarn(factor: int) -> str:
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 32768}
        return "--hf-overrides '" + json.dumps({"rope_scaling": scaling}) + "'"

    allow = "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1"
    assert "scale them by yarn" in text("", allow)
    assert "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1" in text(yarn(4))
    assert "raise the factor to 4" in text(yarn(2), allow)
    assert text(yarn(4), allow) == ""


def test_every_rule_has_a_name_of_its_own_and_says_what_it_states() -> None:
    names = [rule.name for rule in RULES]
    assert len(set(names)) == len(names)
    assert all(rule.states.endswith(".") for rule in RULES)


def test_every_deployment_in_the_guide_passes() -> None:
    examples = re.findall(r"```yaml\n(prefill:.*?)```", GUIDE.read_text(), re.DOTALL)
    deployments = [example for example in examples if "command" in example]
    assert len(deployments) == 3
    for example in deployments:
        assert found(example, "d.yaml") == []
