import copy
import json
import re
from itertools import pairwise

import pytest
from typer.testing import CliRunner

from isochunk.bench.fake import FakePrefill, serving
from isochunk.cli.app import app
from isochunk.core.errors import ConfigError, IsochunkError
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
        (("--recorded", "folder", "-o", "r.html"), "can't read folder"),
        (("--recorded", "binary.json", "-o", "r.html"), "can't read binary.json"),
        (("--recorded", "cut.json", "-o", "r.html"), "can't read cut.json"),
        (("--recorded", "empty.json", "-o", "r.html"), "no prompt that ended yet"),
        (("--recorded", "good.json", "--picture", "p.nope"), "name a .png, .svg or .pdf"),
    ],
)
def test_what_cannot_be_reported_is_said(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.json").write_text("[1]")
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary.json").write_bytes(bytes(range(256)))
    (tmp_path / "cut.json").write_text(json.dumps(status())[:1000])
    (tmp_path / "empty.json").write_text(json.dumps(status(prompts=0)))
    (tmp_path / "good.json").write_text(json.dumps(status()))
    result = run("report", *options)
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)


def test_prompts_whose_ids_are_not_told_are_numbered(tmp_path):
    saved, page, trace = (tmp_path / name for name in ("status.json", "r.html", "t.json"))
    told = status(prompts=2)
    for prompt in told["prompts"]:
        prompt["request_id"] = None
    saved.write_text(json.dumps(told))
    result = run("report", "--recorded", saved, "-o", page, "--trace", trace)
    assert result.exit_code == 0, result.output
    assert "None" not in page.read_text().split("<table")[1].split("</table")[0]
    events = json.loads(trace.read_text())["traceEvents"]
    assert {"prompt 1", "prompt 2"} < {event["args"].get("name") for event in events}


def places(value, at=()):
    """Every place in nested data."""
    yield at
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in pairs:
        yield from places(inner, (*at, name))


def test_whatever_is_wrong_in_a_recorded_file_is_said_in_words(tmp_path):
    saved, trace = tmp_path / "status.json", tmp_path / "t.json"
    whole = status(prompts=1, tokens=150)
    refused = 0
    for place in places(whole):
        for other in (None, "x", -1, 0, 1e308, [], "gone"):
            told = copy.deepcopy({"root": whole})
            inner = told
            for step in ("root", *place)[:-1]:
                inner = inner[step]
            last = ("root", *place)[-1]
            if other == "gone":
                del inner[last]
            else:
                inner[last] = other
            saved.write_text(json.dumps(told.get("root")))
            result = run("report", "--recorded", saved, "--trace", trace)
            refused += isinstance(result.exception, IsochunkError)
            assert result.exception is None or isinstance(result.exception, IsochunkError), (place, other, result)
    assert refused > 100


class Odd:
    """A server that answers this, whatever it is asked."""

    def __init__(self, body, code=200, kind="application/json"):
        async def answer(scope, receive, send):
            start = {"type": "http.response.start", "status": code, "headers": [(b"content-type", kind.encode())]}
            await send(start)
            await send({"type": "http.response.body", "body": body})

        self.app = answer


@pytest.mark.parametrize("command", ["report", "explain"])
@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        (b"<html>", 200, "not a JSON object"),
        (b"null", 200, "not a JSON object"),
        (b"[1, 2]", 200, "not a JSON object"),
        (b"", 302, "not a JSON object"),
        (b"{}", 200, "is no status that this version"),
        (json.dumps(status() | {"model": {"c9": 1}}).encode(), 200, "coefficient c0 is missing"),
        (b'{"detail": "Not Found"}', 404, "runs no isochunk"),
        (b'{"error": "Unauthorized"}', 401, "--api-key"),
        (b"oops", 500, "answered 500: oops"),
    ],
)
def test_a_server_that_is_no_isochunk_is_told_apart(tmp_path, command, body, code, message):
    with serving(Odd(body, code)) as url:
        options = ["-o", tmp_path / "r.html"] if command == "report" else ["--tokens", 100]
        result = run(command, "--url", url, *options)
    assert isinstance(result.exception, IsochunkError), result
    assert message in str(result.exception)


def test_a_coefficient_of_a_newer_version_stops_nothing():
    told = status()
    told["model"]["c4"] = 1.0
    with serving(Odd(json.dumps(told).encode())) as url:
        assert run("explain", "--url", url, "--tokens", 100).exit_code == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tokens", 0), "tokens = 0"),
        (("--tokens", -5), "tokens = -5"),
        (("--tokens", 10**30), "tokens = 1000000000000000000000000000000"),
        (("--tokens", 100, "--cached", 100), "cached = 100"),
        (("--tokens", 100, "--cached", -1), "cached = -1"),
    ],
)
def test_lengths_that_no_prompt_has_are_said(options, message):
    with serving(Odd(json.dumps(status()).encode())) as url:
        result = run("explain", "--url", url, *options)
    assert isinstance(result.exception, IsochunkError), result
    assert message in str(result.exception)


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 64, 8191, 8192, 8193, 1_000_000])
@pytest.mark.parametrize("stages", [2, 16])
def test_every_length_is_explained(tokens, stages):
    with serving(Odd(json.dumps(status(stages=stages)).encode())) as url:
        result = run("explain", "--url", url, "--tokens", tokens)
        again = run("explain", "--url", url, "--tokens", tokens, "--json")
    assert result.exit_code == 0, result
    assert f"A prompt of {tokens:,} tokens" in result.output
    told = json.loads(again.output)
    assert sum(told["chunks"]) == tokens
    assert told["ttft_s"] <= min(each["ttft_s"] for each in told["alternatives"] if "fixed" in each["label"]) * 1.0001


def test_a_report_of_ten_thousand_steps_has_each_and_few_shapes(tmp_path):
    saved, page = tmp_path / "status.json", tmp_path / "r.html"
    told = status(stages=16, prompts=32, tokens=440_000)
    saved.write_text(json.dumps(told))
    assert run("report", "--recorded", saved, "-o", page).exit_code == 0
    text = page.read_text()
    steps = sum(len(prompt["chunks"]) for prompt in told["prompts"])
    assert steps > 9000
    assert text.count("<path") + text.count("<use") < 100
    moves = [path.count("M ") for path in re.findall(r'<path[^>]* d="([^"]*)"', text)]
    assert steps in moves  # the dots
    bars = 16 * len(told["prompts"][0]["chunks"])
    assert any(one + other == bars for one, other in pairwise(moves))  # of the two shades
