import json
from typing import Any

import pytest
from typer.testing import CliRunner

from isochunk.cli.app import app
from isochunk.cli.rehearsed import MODEL_NAME, rehearsed, tiny_model
from isochunk.core.errors import ConfigError
from isochunk.vllm.virtual.rehearsal import Rehearsal, rehearsal_of

pytest.importorskip("vllm", reason="vLLM is not installed: its command can't be built")

KIMI = Rehearsal(profile="kimi-k2.5-mxfp4@mi355x/pp4tp1")


def after(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


def section(command: list[str]) -> dict[str, Any]:
    config = json.loads(after(command, "--additional-config"))
    return dict(config["scheduler_config"]["profiling_chunk_config"])


def test_without_a_model_the_tiny_one_is_served_on_the_stages_of_the_profile() -> None:
    command, environment = rehearsed(KIMI, [], {})
    assert after(command, "--model") == str(tiny_model())
    assert after(command, "--pipeline-parallel-size") == "4"
    assert after(command, "--served-model-name") == MODEL_NAME
    assert section(command)["enabled"] is True
    assert rehearsal_of(environment) == KIMI
    # Clocks need no cores and no memory.
    assert "VLLM_CPU_OMP_THREADS_BIND" not in environment
    assert "VLLM_CPU_KVCACHE_SPACE" not in environment


def test_a_deployments_own_command_is_kept() -> None:
    options = ["-pp", "8", "--tensor-parallel-size", "8", "--max-model-len", "9000", "--enable-prefix-caching"]
    command, _ = rehearsed(KIMI, ["/models/kimi", *options, "--distributed-executor-backend", "ray"], {})
    assert after(command, "--model") == "/models/kimi"
    assert [word for word in command if word in options] == options
    assert "--pipeline-parallel-size" not in command
    assert "ray" not in command
    assert command.count("--distributed-executor-backend") == 1


def test_the_users_own_section_has_the_last_word() -> None:
    own = {"scheduler_config": {"profiling_chunk_config": {"enabled": False, "max_probe_seconds": 3}}}
    command, _ = rehearsed(KIMI, ["--additional-config", json.dumps(own)], {})
    assert section(command) == {"enabled": False, "max_probe_seconds": 3}


def test_stages_are_named_once() -> None:
    assert after(rehearsed(KIMI, [], {}, stages=16)[0], "--pipeline-parallel-size") == "16"
    with pytest.raises(ConfigError, match="say the same"):
        rehearsed(KIMI, ["--pipeline-parallel-size=4"], {}, stages=4)


def test_a_profile_that_does_not_tell_its_stages_needs_the_option(tmp_path: Any) -> None:
    path = tmp_path / "bare.json"
    path.write_text('{"c0": 0.01, "c1": 1e-5, "c2": 1e-9}')
    with pytest.raises(ConfigError, match="add --stages"):
        rehearsed(Rehearsal(profile=str(path)), [], {})


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--profile", "nothing.json"], "--profile nothing.json is no file and no published profile"),
        (["/nowhere/model", "--profile", KIMI.profile], "MODEL /nowhere/model is no folder"),
        (["--profile", KIMI.profile, "--speed", "0"], "--speed 0"),
        (["--profile", KIMI.profile, "--kv-tokens", "0"], "--kv-tokens 0"),
        (["--profile", KIMI.profile, "--trouble", "flood"], "--trouble flood"),
        (["--profile", KIMI.profile, "--stages", "65"], "--stages 65 (--pipeline-parallel-size) is more than the 64"),
        (["--profile", KIMI.profile, "--enable-lora"], "--enable-lora needs real workers"),
        (["--profile", KIMI.profile, "--profiler-config.profiler", "torch"], "--profiler-config needs real workers"),
        (["--profile", KIMI.profile, "--nodes", "2", "--port", "x"], "--port 'x'"),
        (["--profile", KIMI.profile, "--nodes", "2", "--host", "0.0.0.0"], "--host 0.0.0.0"),
    ],
)
def test_a_wrong_option_is_named_before_anything_starts(arguments: list[str], named: str) -> None:
    result = CliRunner().invoke(app, ["rehearse", *arguments])
    assert result.exit_code != 0
    assert named in str(result.exception)
