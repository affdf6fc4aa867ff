import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from isochunk.cli.app import app
from isochunk.core.profile import load_profile

pytest.importorskip("aiconfigurator_core", reason="the extra 'silicon' is not installed")

LLAMA = ["--system", "h100_sxm", "--model", "meta-llama/Meta-Llama-3.1-70B", "--tensor-parallel", "4"]


def test_what_stands_on_an_estimate_says_so(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    made = CliRunner().invoke(app, ["profile", *LLAMA, "--stages", "4", "-o", str(path), "--json"])
    assert made.exit_code == 0
    assert "estimate, not a measurement" in made.stderr
    assert json.loads(made.stdout)["estimate"]["data"]
    assert load_profile(path).source == "estimate"
    for command in ("plan", "tune", "simulate"):
        shown = CliRunner().invoke(app, [command, "--profile", str(path), "--tokens", "8192", "--stages", "4"])
        assert shown.exit_code == 0, shown.output
        assert "estimate, not a measurement" in shown.stderr, command
        assert "modelled, not measured" in shown.stderr
        options = [command, "--profile", str(path), "--tokens", "8192", "--stages", "4", "--json"]
        told = json.loads(CliRunner().invoke(app, options).stdout)
        for part in told.values() if command == "simulate" else [told]:
            assert part["estimate"] == load_profile(path).fit["estimate"], command


def test_a_system_that_is_not_known_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    result = CliRunner().invoke(app, ["profile", "--system", "abacus", "--model", "x", "-o", str(path)])
    assert "--system abacus" in str(result.exception)
    assert not path.exists()
