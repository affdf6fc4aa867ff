import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from isochunk import CostModel
from isochunk.cli.app import app, main
from isochunk.core.errors import IsochunkError
from isochunk.core.profile import load_profile

TRUE = CostModel(0.0059, 18e-6, 20e-9, 0.56e-6)
STEPS = [(c, h) for h in (0, 2000, 16000) for c in (64, 256, 1024, 4096)]


def write(path: Path, rows: list[tuple[object, ...]], header: str = "chunk,history,seconds") -> Path:
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_fit_then_plan(tmp_path: Path) -> None:
    samples = write(tmp_path / "s.csv", [(c, h, TRUE.seconds(c, h)) for c, h in STEPS])
    told = json.loads(run("fit", samples, "-o", tmp_path / "p.json", "--json"))
    assert told["stages"]["0"]["undetermined"] == []
    assert load_profile(tmp_path / "p.json").model.c0 == pytest.approx(TRUE.c0)
    options = ("--profile", tmp_path / "p.json", "--stages", 2, "--tokens", 8192, "--block", 16)
    planned = json.loads(run("plan", *options, "--json"))
    assert set(planned) == {"policy", "chunks", "target_s", "ttft_s", "step_seconds"}
    assert sum(planned["chunks"]) == 8192
    table = run("plan", *options)
    assert str(planned["chunks"][0]) in table


def test_fit_takes_stages_apart(tmp_path: Path) -> None:
    rows = [(c, h, TRUE.scaled(1 + stage).seconds(c, h), stage) for c, h in STEPS for stage in (0, 1)]
    run("fit", write(tmp_path / "s.csv", rows, "chunk,history,seconds,stage"), "-o", tmp_path / "p.json")
    first, second = load_profile(tmp_path / "p.json").stage_models
    assert second.c1 == pytest.approx(2 * first.c1)
    planned = json.loads(run("plan", "--profile", tmp_path / "p.json", "--tokens", 8192, "--json"))
    assert sum(planned["chunks"]) == 8192


def test_a_prefix_hit_is_not_planned_again(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(json.dumps(TRUE.as_dict()))
    planned = json.loads(
        run("plan", "--profile", tmp_path / "p.json", "--stages", 2, "--tokens", 8192, "--cached", 4096, "--json")
    )
    assert sum(planned["chunks"]) == 4096


@pytest.mark.parametrize(
    ("rows", "header", "message"),
    [
        ([(64, 0, "nan")] * 6, "chunk,history,seconds", "seconds = nan"),
        ([(64, 0, -1)] * 6, "chunk,history,seconds", "seconds = -1.0"),
        ([(64, 0, 1)] * 3, "chunk,history,seconds", "3 samples are too few"),
        ([(64 * n, 0, 1) for n in range(1, 9)], "chunk,history,seconds", "no sample has history"),
        ([(64, 0, 1)] * 6, "chunk,past,seconds", "column 'history' is missing"),
        ([(64, 0, "fast")] * 6, "chunk,history,seconds", "line 2: seconds = 'fast'"),
        ([], "chunk,history,seconds", "no samples"),
        ([(64, 0, 1, 7)] * 6, "chunk,history,seconds", "line 2: more fields"),
        ([(64.5, 0, 1)] * 6, "chunk,history,seconds", "chunk = '64.5' must be a whole number"),
        ([(64, 0, 1, 2)] * 6, "chunk,history,seconds,stage", "stages \\[2\\] must be numbered from 0"),
    ],
)
def test_bad_samples_are_named_and_write_nothing(
    tmp_path: Path, rows: list[tuple[object, ...]], header: str, message: str
) -> None:
    with pytest.raises(IsochunkError, match=message):
        run("fit", write(tmp_path / "s.csv", rows, header), "-o", tmp_path / "p.json")
    assert not (tmp_path / "p.json").exists()


def test_samples_that_the_model_does_not_explain_are_named(tmp_path: Path) -> None:
    # Three cold steps of a handful.
    rows = [(c, h, TRUE.seconds(c, h) * (3 if at < 3 else 1)) for at, (c, h) in enumerate(STEPS[:9])]
    samples = write(tmp_path / "s.csv", rows)
    said = run("fit", samples, "-o", tmp_path / "p.json")
    assert "does not explain" in said
    told = json.loads(run("fit", samples, "-o", tmp_path / "p.json", "--json"))["stages"]["0"]["unexplained"]
    assert f"does not explain {len(told)} of 9 samples" in said
    assert told
    assert abs(told[0]["fitted_s"] / told[0]["seconds"] - 1) > 0.2


def test_samples_that_the_model_explains_are_not(tmp_path: Path) -> None:
    samples = write(tmp_path / "s.csv", [(c, h, TRUE.seconds(c, h)) for c, h in STEPS])
    assert "does not explain" not in run("fit", samples, "-o", tmp_path / "p.json")


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_measured_and_fitted_steps_are_drawn(tmp_path: Path, kind: str) -> None:
    rows = [(c, h, TRUE.seconds(c, h), stage) for c, h in STEPS for stage in (0, 1)]
    samples = write(tmp_path / "s.csv", rows, "chunk,history,seconds,stage")
    run("fit", samples, "-o", tmp_path / "p.json", "--figure", tmp_path / f"f.{kind}")
    assert (tmp_path / f"f.{kind}").stat().st_size > 5000
    with pytest.raises(IsochunkError, match="can't draw"):
        run("fit", samples, "-o", tmp_path / "p.json", "--figure", tmp_path / "none" / "f.svg")


def test_errors_are_one_line_and_exit_code_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["isochunk", "fit", str(tmp_path / "none.csv"), "-o", str(tmp_path / "p")])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("isochunk: can't read")
    assert error.count("\n") == 1


def test_an_unknown_policy_is_named(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(json.dumps(TRUE.as_dict()))
    with pytest.raises(IsochunkError, match="'best' must be one of optimal"):
        run("plan", "--profile", tmp_path / "p.json", "--stages", 2, "--tokens", 8, "--policy", "best")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--tokens", 10**20, "--stages", 2), f"tokens = {10**20}"),
        (("--tokens", 8192, "--stages", 10**6), "stages = 1000000"),
        (("--tokens", 8192), "stages is missing"),
    ],
)
def test_sizes_out_of_this_world_are_refused_at_once(tmp_path: Path, options: tuple[object, ...], named: str) -> None:
    (tmp_path / "p.json").write_text(json.dumps(TRUE.as_dict()))
    with pytest.raises(IsochunkError, match=named):
        run("plan", "--profile", tmp_path / "p.json", *options)


def test_the_version_is_told() -> None:
    assert run("--version").startswith("isochunk 0.")


def test_a_published_model_can_be_named() -> None:
    options = ["plan", "--profile", "kimi-k2.5-mxfp4@mi355x/pp4tp1", "--stages", "4", "--tokens", "65536", "--json"]
    told = json.loads(CliRunner().invoke(app, options).stdout)
    assert sum(told["chunks"]) == 65_536
