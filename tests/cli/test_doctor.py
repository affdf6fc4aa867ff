"""`isochunk doctor` says what is here and what the flag would do, and never ends in a traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from isochunk.cli import doctor as doctor_module
from isochunk.cli.app import app


def doctor(*arguments: str, **environ: str) -> tuple[int, dict[str, dict[str, Any]]]:
    command = [sys.executable, "-m", "isochunk", "doctor", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environ})
    assert "Traceback" not in done.stderr
    return done.returncode, {fact["what"]: fact for fact in json.loads(done.stdout)}


def test_it_says_what_is_installed_and_what_the_flag_would_do(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    code, facts = doctor(ISOCHUNK_CACHE=str(tmp_path))
    assert code == 0
    assert facts["the flag"]["found"].startswith("isochunk.vllm.")
    assert "vllm" in facts["vLLM"]["found"]
    assert facts["profiles"]["found"] == f"0 stored in {tmp_path / 'profiles'}"


def test_a_refusal_and_a_plugin_left_out_are_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    monkeypatch.setattr(doctor_module, "_version", lambda name: "0.32.0" if name == "vllm" else None)
    monkeypatch.setattr(doctor_module, "_ask", lambda options: {"vllm": "0.32.0", "refused": f"ConfigError: {options}"})
    result = CliRunner().invoke(app, ["doctor", "--json", "MODEL", "--pipeline-parallel-size", "1"])
    facts = {fact["what"]: fact for fact in json.loads(result.stdout)}
    assert result.exit_code == 1
    assert facts["plugin"]["state"] == facts["the flag"]["state"] == "fault"
    assert "VLLM_PLUGINS=other" in facts["plugin"]["found"]
    assert "'MODEL', '--pipeline-parallel-size', '1'" in facts["the flag"]["found"]


def test_a_vllm_that_does_not_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_module.sys, "executable", "/bin/false")
    assert "ended with exit code 1" in doctor_module._ask(["MODEL"])["refused"]
