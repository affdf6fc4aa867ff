import json

import pytest
from typer.testing import CliRunner

from isochunk.bench.fake import FakePrefill, serving
from isochunk.cli.app import app
from isochunk.core.errors import ConfigError, ServerError


@pytest.fixture
def url():
    with serving(FakePrefill(isochunk=False)) as url:  # a load needs no isochunk on the server
        yield url


def run(url, *options):
    return CliRunner().invoke(app, ["bench", "--url", url, *options])


def test_table_and_one_json_line_a_request_come_out(url, tmp_path):
    path = tmp_path / "requests.jsonl"
    result = run(url, "--requests", "6", "--input", "uniform:64:256", "--output", "3", "--save", str(path))
    assert result.exit_code == 0, result.output
    assert "first token, s" in result.stdout
    assert "between tokens, s" in result.stdout
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    assert [entry["index"] for entry in lines] == list(range(6))
    assert all(64 <= entry["tokens"] <= 256 and len(entry["gaps_s"]) == 2 for entry in lines)


def test_json_is_alone_on_stdout_and_names_the_seed(url):
    result = run(url, "--requests", "4", "--input", "64", "--rate", "200", "--cards", "2", "--seed", "9", "--json")
    summary = json.loads(result.stdout)
    assert (summary["requests"], summary["seed"], summary["cards"]) == (4, 9, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--input", "long"], "input lengths 'long'"),
        (["--rate", "2", "--concurrency", "2"], "either a concurrency or a rate"),
        (["--shared", "1"], "shared = 1.0"),
    ],
)
def test_wrong_options_are_named(url, options, message):
    result = run(url, *options)
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)


class Flaky(FakePrefill):
    """Fails every request from the third on."""

    async def _answer(self, prompt, output, request_id):
        if len(self.received) > self.good:
            yield 'data: {"error": {"message": "out of memory"}}\n\n'
        async for event in super()._answer(prompt, output, request_id):
            yield event


def test_some_failures_are_warned_of_and_set_the_exit_code():
    fake = Flaky()
    fake.good = 2
    with serving(fake) as url:
        result = run(url, "--requests", "4", "--input", "64", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["failed"] == 2
    assert "2 of 4 requests failed" in result.stderr


def test_nothing_but_failures_is_an_error():
    fake = Flaky()
    fake.good = 0
    with serving(fake) as url:
        result = run(url, "--requests", "2", "--input", "64")
    assert isinstance(result.exception, ServerError)
    assert "out of memory" in str(result.exception)
