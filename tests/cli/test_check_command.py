from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from isochunk.cli.app import app

ON = """--additional-config '{"scheduler_config": {"profiling_chunk_config": {"enabled": true}}}'"""


def run(*words: str, text: str | None = None) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["check", *words], input=text)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.output


def test_errors_are_said_by_the_exit_code() -> None:
    assert run("--table", "isochunk", "serve", "m", "-pp", "2", "--no-enforce-eager") == (0, "0 errors, 0 warnings\n")
    assert run("--table", "isochunk", "serve", "m", "--port", "1")[0] == 1


def test_json_says_what_where_why_and_the_remedy(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("vllm serve m \\\n  --port 3 \\\n  -pp 2 --no-enable-chunked-prefill \\\n" + ON)
    code, output = run("--table", "--json", str(script))
    (first, *_) = json.loads(output)["findings"]
    assert code == 1
    assert (first["level"], first["rule"], first["option"]) == (
        "error",
        "chunked-prefill-on",
        "--enable-chunked-prefill",
    )
    assert (first["file"], first["line"]) == (str(script), 3)
    assert all(first[key] for key in ("what", "why", "remedy"))


def test_a_script_may_come_from_stdin_and_files_are_machines_of_their_own(tmp_path: Path) -> None:
    assert run("--table", "-", text="vllm serve m")[0] == 0
    for name in ("p.sh", "d.sh"):
        (tmp_path / name).write_text("vllm serve m --port 1")
    assert run("--table", str(tmp_path / "p.sh"), str(tmp_path / "d.sh"))[0] == 0
    assert run("--table", "-", text="vllm serve m --port 1 &\nvllm serve m --port 1")[0] == 1


def test_a_command_may_be_one_text_however_long() -> None:
    assert run("--table", "vllm serve m --port 3 " + "--seed 1 " * 60) == (0, "0 errors, 0 warnings\n")
    assert run("--table", "vllm", "serve", "m" * 5000)[0] == 0


def test_options_behind_a_file_are_said(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("vllm serve m")
    result = CliRunner().invoke(app, ["check", str(tmp_path / "run.sh"), "--json"])
    assert "isochunk check --json" in str(result.exception)


def test_a_model_s_configuration_is_found_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_attention_heads": 6, "max_position_embeddings": 2048}')
    (tmp_path / "d.yaml").write_text("nodes:\n- {command: vllm serve m -tp 4, model_config: config.json}\n")
    assert "does not divide the 6 attention heads" in run("--table", str(tmp_path / "d.yaml"))[1]


@pytest.mark.parametrize(
    "words", [["nothing.yaml"], ["sglang", "serve", "m"], ["--device-gib", "-1", "vllm", "serve", "m"]]
)
def test_what_can_t_be_read_ends_with_code_2(words: list[str]) -> None:
    from isochunk.core.errors import ConfigError

    result = CliRunner().invoke(app, ["check", "--table", *words])
    assert result.exit_code == 2 or isinstance(result.exception, ConfigError)
