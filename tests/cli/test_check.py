from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from isochunk.cli.app import app
from isochunk.cli.command_line import parse_server
from isochunk.cli.deployment import Deployment
from isochunk.cli.deployment_file import load_deployment
from isochunk.cli.finding import Finding
from isochunk.cli.rules import check
from isochunk.core.errors import ConfigError

ON = """--additional-config '{"scheduler_config": {"profiling_chunk_config": {"enabled": true}}}'"""
GUIDE = Path(__file__).parents[2] / "docs" / "pd-disaggregation.md"


def kv(role: str, connector: str = "NixlPushConnector", **more: Any) -> str:
    return "--kv-transfer-config '" + json.dumps({"kv_connector": connector, "kv_role": role, **more}) + "'"


def prefill(more: str = "", connector: str = "NixlPushConnector", **fields: Any) -> str:
    return f"isochunk serve m --port 1 --pipeline-parallel-size 2 {ON} {kv('kv_producer', connector, **fields)} {more}"


def decode(more: str = "", connector: str = "NixlPushConnector", **fields: Any) -> str:
    return f"vllm serve m --port 2 {kv('kv_consumer', connector, **fields)} {more}"


def findings(*commands: str, proxy: str = "", **fields: Any) -> list[Finding]:
    hosts = [{"host": f"host{index}"} for index in range(len(commands))]
    servers = [parse_server(c, name=f"node{i}", **hosts[i], **fields) for i, c in enumerate(commands)]
    return check(Deployment(servers=tuple(servers), proxy=tuple(proxy.split())))


def told(found: list[Finding], level: str = "error") -> str:
    return "\n".join(f"{f.where}: {f.what}; {f.remedy}" for f in found if f.level == level)


def test_a_right_deployment_has_no_findings() -> None:
    assert findings(prefill(), decode(), proxy="isochunk proxy --prefiller-port 1 --decoder-ports 2") == []


def test_a_command_line_is_read_in_all_its_spellings() -> None:
    server = parse_server(
        "#!/bin/sh\nexport A=1\nB='2 3' /opt/bin/vllm serve /models/m -pp 4 --tensor_parallel_size=2 \\\n"
        " --max-num-batched-tokens 8K --no-enable-chunked-prefill --trust-remote-code # a comment\n"
        " --kv-transfer-config.kv_role kv_producer --kv-transfer-config.kv_connector_extra_config.num_workers 2"
    )
    assert (server.model, server.role, server.env) == ("/models/m", "prefill", {"A": "1", "B": "2 3"})
    assert (server.size("pipeline"), server.size("tensor"), server.size("data")) == (4, 2, 1)
    assert server.number("max-num-batched-tokens") == 8192
    assert server.options["enable-chunked-prefill"] is False
    assert server.extra == {"num_workers": 2}


def test_the_module_form_is_read() -> None:
    server = parse_server("python -m vllm.entrypoints.openai.api_server --model m --port 3")
    assert (server.model, server.options["port"]) == ("m", "3")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("sglang serve m", "no 'vllm serve MODEL'"),
        ("vllm serve", "names no model"),
        ("vllm serve m --additional-config '{'", "is not JSON"),
        ("vllm serve 'm", "check the quotes"),
    ],
)
def test_what_is_no_command_is_an_error(command: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_server(command)


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
        (["vllm serve m --port 1 -pp 2 --additional-config '{\"profiling_chunk_config\": {\"enabled\": true}}' "
          + kv("kv_producer"), decode()], "at the top of additional_config"),
        ([prefill(connector="NixlConnector"), decode(connector="NixlConnector")], "number of KV layers must match"),
        ([prefill(connector="ExampleConnector"), decode(connector="ExampleConnector")], "stores the first chunk"),
        ([prefill(connector="LMCacheConnectorV1"), decode()], "without a word"),
        ([prefill(), decode(connector="MooncakeConnector")], "connector MooncakeConnector, and NixlPush"),
        ([prefill(), decode("--block-size 32")], "--block-size is 32, and None on node0"),
        ([prefill(), decode("--kv-cache-dtype fp8")], "their KV does not mean the same"),
        ([prefill(), decode().replace("serve m", "serve other")], "serves other, and node0 m"),
        ([prefill(), decode().replace("kv_consumer", "kv_consumer_x")], "no decode node"),
        ([prefill(engine_id="0"), decode(engine_id="0")], "engine_id 0 is used 2 times"),
    ],
)  # fmt: skip
def test_an_error_is_found_and_comes_with_a_remedy(commands: list[str], message: str) -> None:
    assert message in told(findings(*commands))


@pytest.mark.parametrize(
    ("commands", "message"),
    [
        ([prefill("--async-scheduling"), decode()], "asynchronous scheduling on a P node"),
        ([prefill("--max-model-len 8192 --max-num-batched-tokens 16384"), decode()], "is longer than --max-model-len"),
        ([prefill("--max-model-len 9000"), decode("--max-model-len 4000")], "computed and then refused"),
        ([prefill().replace("isochunk serve", "vllm serve"), decode()], "/isochunk/status is off"),
        ([prefill(), decode(ON)], "isochunk is on for a D node"),
        ([prefill().replace("isochunk serve", "vllm serve").replace(ON, ""), decode()], "2 stages and isochunk is off"),
        ([prefill(connector="Own"), decode(connector="Own")], "connector 'Own' is not known"),
        ([prefill(connector="MooncakeConnector", kv_connector_extra_config={"mooncake_protocol": "tcp"}),
          decode(connector="MooncakeConnector")], "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER"),
    ],
)  # fmt: skip
def test_a_warning_is_found_and_is_no_error(commands: list[str], message: str) -> None:
    found = findings(*commands)
    assert message in told(found, "warning")
    assert told(found) == ""


def test_a_node_without_a_connector_is_an_error_where_its_role_is_known() -> None:
    server = parse_server("vllm serve m -pp 2", role="prefill")
    assert "no --kv-transfer-config" in told(check(Deployment(servers=(server,))))
    assert "kv-transfer-config" not in told(findings("vllm serve m -pp 2"))


SIZES = {"prefill": {"tp_size": 1, "dp_size": 1, "pp_size": 2}, "decode": {"tp_size": 1, "dp_size": 1}}


def test_ascend_sizes_must_be_those_of_the_nodes() -> None:
    def both(sizes: Any, of_d: str = "") -> str:
        more = {"connector": "MooncakeConnectorV1", "kv_connector_extra_config": sizes}
        return told(findings(prefill(**more), decode(of_d, **more)))

    assert both(SIZES) == ""
    assert "decode.tp_size is 1, and node1 has --tensor-parallel-size 2" in both(SIZES, "-tp 2")
    wrong = {**SIZES, "prefill": {"tp_size": 1, "dp_size": 1}}
    assert "prefill.pp_size is missing, and node0 has --pipeline-parallel-size 2" in both(wrong)
    assert 'add "decode": {"tp_size": 1, "dp_size": 1, "pp_size": 1}' in both({"prefill": SIZES["prefill"]})


def test_ports_may_be_shared_by_hosts_and_not_on_one() -> None:
    servers = [parse_server(c.replace("--port 2", "--port 1"), name=c[:4]) for c in (prefill(), decode())]
    text = told(check(Deployment(servers=tuple(servers))))
    assert "--port 1 is used 2 times on localhost" in text
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT 5600 is used 2 times" in text


def test_the_proxy_must_know_the_nodes() -> None:
    text = told(findings(prefill(), decode(), proxy="isochunk proxy --prefiller-ports 1 --decoder-ports 3"))
    assert "--decoder-ports 3, and the decode nodes listen on 2" in text
    mooncake = [prefill(connector="MooncakeConnector"), decode(connector="MooncakeConnector")]
    line = "isochunk proxy --prefiller-ports 1 --decoder-ports 2"
    assert "--prefiller-bootstrap-ports" in told(findings(*mooncake, proxy=line))
    assert told(findings(*mooncake, proxy=line + " --prefiller-bootstrap-ports 8998")) == ""


CONFIG = {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 32768, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def test_a_budget_too_large_for_the_memory_is_found(config: Path) -> None:
    def text(budget: int) -> str:
        command = f"isochunk serve m -tp 4 -pp 2 {ON} --max-model-len 32768 --max-num-batched-tokens {budget}"
        server = parse_server(command, device_gib=24, model_config=config)
        return told(check(Deployment(servers=(server,))))

    assert text(4096) == ""
    assert re.search(r"a step of 32768 tokens needs about \d+\.\d GiB a device", text(32768))


def test_a_long_context_needs_scaling_and_permission(config: Path) -> None:
    def text(more: str, env: str = "") -> str:
        command = f"{env} isochunk serve m -pp 2 {ON} --max-model-len 131072 {more}"
        return told(check(Deployment(servers=(parse_server(command, model_config=config),))))

    def yarn(factor: int) -> str:
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 32768}
        return "--hf-overrides '" + json.dumps({"rope_scaling": scaling}) + "'"

    allow = "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1"
    assert "scale them by yarn" in text("", allow)
    assert "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1" in text(yarn(4))
    assert "raise the factor to 4" in text(yarn(2), allow)
    assert text(yarn(4), allow) == ""


def test_the_command_says_errors_by_its_exit_code(tmp_path: Path) -> None:
    runner = CliRunner()
    good = runner.invoke(app, ["check", "isochunk", "serve", "m", "-pp", "2", "--no-enforce-eager"])
    assert (good.exit_code, good.output) == (0, "0 errors, 0 warnings\n")
    bad = runner.invoke(app, ["check", "--json", "isochunk", "serve", "m", "--port", "1"])
    assert bad.exit_code == 1
    assert json.loads(bad.output)["findings"][0]["level"] == "error"
    script = tmp_path / "run.sh"
    script.write_text("vllm serve m\n")
    assert "warning: run.sh: a P node without" in runner.invoke(app, ["check", str(script)]).output
    assert runner.invoke(app, ["check", "-"], input="vllm serve m").exit_code == 0


@pytest.mark.parametrize("text", ["[]", "prefil: []", "prefill: x", "prefill: [{port: 1}]", "prefill: [1]", "a: ["])
def test_a_yaml_of_another_form_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "d.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        load_deployment(path)


def test_every_deployment_in_the_guide_passes(tmp_path: Path) -> None:
    examples = re.findall(r"```yaml\n(prefill:.*?)```", GUIDE.read_text(), re.DOTALL)
    deployments = [example for example in examples if "command" in example]
    assert len(deployments) == 3
    for example in deployments:
        path = tmp_path / "d.yaml"
        path.write_text(example)
        assert check(load_deployment(path)) == []
