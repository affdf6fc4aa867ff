import json

import pytest
from typer.testing import CliRunner

from isochunk.bench.fake import FakePrefill, serving
from isochunk.cli.app import app
from isochunk.core.errors import ConfigError
from tests.vllm.live.statuses import status


def run(*options):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [*map(str, options)])


def test_a_saved_status_becomes_a_page_a_picture_and_a_trace(tmp_path):
    saved = tmp_path / "status.json"
    saved.write_text(json.dumps(status()))
    page, picture, drawing, trace = (tmp_path / name for name in ("r.html", "p.png", "p.svg", "t.json"))
    result = run("report", "--recorded", saved, "-o", page, "--picture", picture, "--trace", trace)
    assert result.exit_code == 0, result.output
    text = page.read_text()
    assert "32,768" in text
    assert "2.0% off its prediction" in text
    assert "http" not in text.replace("http://www.w3.org", "")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads(trace.read_text())["traceEvents"]
    assert run("report", "--recorded", saved, "--picture", drawing).exit_code == 0
    assert "<svg" in drawing.read_text()


def test_a_comparison_and_a_running_server_are_sources_too(tmp_path):
    save, page = tmp_path / "ab.json", tmp_path / "r.html"
    with serving(FakePrefill()) as url:
        assert run("compare", "--url", url, "--lengths", "512", "--rounds", "1", "--save", save).exit_code == 0
        assert run("report", "--url", url, "-o", page).exit_code == 0
        explained = run("explain", "--url", url, "--tokens", "20000")
    assert "A prompt of 20,000 tokens" in explained.output
    assert "vLLM's own" in explained.output
    before = page.read_text()
    assert run("report", "--recorded", save, "-o", page).exit_code == 0
    assert page.read_text() != before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "name at least one file"),
        (("-o", "r.html"), "either --url of a server or --recorded"),
        (("--recorded", "none.json", "-o", "r.html"), "can't read none.json"),
        (("--recorded", "other.json", "-o", "r.html"), "neither a status"),
        (("--recorded", "empty.json", "-o", "r.html"), "no prompt that ended yet"),
        (("--recorded", "good.json", "--picture", "p.nope"), "name a .png, .svg or .pdf"),
    ],
)
def test_what_cannot_be_reported_is_said(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.json").write_text("[1]")
    (tmp_path / "empty.json").write_text(json.dumps(status(prompts=0)))
    (tmp_path / "good.json").write_text(json.dumps(status()))
    result = run("report", *options)
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)
