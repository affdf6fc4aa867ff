import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from isochunk.bench.fake import FakePrefill, serving
from isochunk.cli.app import app
from isochunk.core.errors import ConfigError

# A test run in the background of a shell inherits an ignored SIGINT, and would pass it on.
ISOCHUNK = [
    sys.executable,
    "-c",
    "import signal as s; s.signal(s.SIGINT, s.default_int_handler); from isochunk.cli.app import main; main()",
]


@pytest.fixture
def fake() -> FakePrefill:
    return FakePrefill()


@pytest.fixture
def url(fake: FakePrefill) -> Iterator[str]:
    with serving(fake) as url:
        yield url


def run(url, *options):
    # Wide enough for the table however wide the spreads are that the machine gives.
    runner = CliRunner(env={"COLUMNS": "120"})
    return runner.invoke(app, ["compare", "--url", url, *options], catch_exceptions=True)


def test_table_verdict_report_and_results_come_out(url, tmp_path):
    report, save = tmp_path / "r.html", tmp_path / "r.json"
    options = ("--lengths", "512,4096", "--rounds", "3", "--report", str(report), "--save", str(save))
    result = run(url, *options)
    assert result.exit_code == 0, result.output
    assert "first chunk 8192" in result.output
    data = json.loads(save.read_text())
    assert data["verdict"] in result.stdout.replace("\n", " ")
    assert len(data["samples"]) == 3 * 2 * 3
    page = report.read_text()
    assert data["summary"][0]["label"] in page
    assert "Where the stages wait" in page


def test_json_is_alone_on_stdout(url):
    result = run(url, "--lengths", "512", "--rounds", "1", "--policies", "optimal", "--sweep", "128,256", "--json")
    labels = [row["label"] for row in json.loads(result.stdout)["summary"]]
    assert labels == ["isochunk", "fixed 128", "fixed 256"]


def test_automatic_sweep_doubles_up_to_the_servers_size(url):
    result = run(url, "--lengths", "300", "--rounds", "1", "--policies", "optimal", "--sweep", "auto", "--json")
    labels = [row["label"] for row in json.loads(result.stdout)["summary"]]
    assert labels == ["isochunk", "fixed 128", "fixed 256", "fixed 8192"]  # 512 to 4096 can't differ from 8192


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lengths", "1k"], "--lengths '1k' must be whole numbers"),
        (["--policies", "best"], "policy 'best' must be one of"),
        (["--sweep", "9000"], "fixed size 9000 must be from 1 to 8192"),
        (["--lengths", "100000"], "length 100000 must be from 1 to 65535"),
    ],
)
def test_wrong_options_are_named(url, options, message):
    result = run(url, *options)
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)


@pytest.mark.parametrize("option", ["--report", "--save"])
def test_file_that_cannot_be_written_is_named_before_anything_is_measured(url, fake, tmp_path, option):
    result = run(url, "--lengths", "64", "--rounds", "1", option, str(tmp_path / "no" / "file"))
    assert isinstance(result.exception, ConfigError)
    assert "can't write" in str(result.exception)
    assert not fake.received


class Interrupting(FakePrefill):
    """Presses Ctrl-C in the client's terminal during the fifth prompt."""

    client: subprocess.Popen[str]

    async def _prefill(self, tokens, cached, request_id, alone):
        if len(self.received) == 5:
            os.kill(self.client.pid, signal.SIGINT)
        await super()._prefill(tokens, cached, request_id, alone)


def test_ctrl_c_puts_the_policy_back():
    fake = Interrupting()
    fake.policy, fake.chunk = "first_chunk", 2048
    with serving(fake) as url:
        command = [*ISOCHUNK, "compare", "--url", url, "--rounds", "50"]
        fake.client = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        _, errors = fake.client.communicate(timeout=60)
    assert fake.client.returncode != 0
    assert "Traceback" not in errors
    assert (fake.policy, fake.chunk) == ("first_chunk", 2048)


def test_error_is_one_line_and_exit_code_2():
    with serving(FakePrefill(isochunk=False)) as url:
        command = [*ISOCHUNK, "compare", "--url", url]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("isochunk: ")
    assert "runs no isochunk" in done.stderr
    assert done.stderr.count("\n") == 1
