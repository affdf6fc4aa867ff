import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
from typer.testing import CliRunner

from isochunk.bench.fake import FakePrefill, serving
from isochunk.cli.app import app
from isochunk.core.cost import CostModel
from isochunk.core.errors import ConfigError, ServerError

# A test run in the background of a shell inherits an ignored SIGINT, and would pass it on.
ISOCHUNK = [
    sys.executable,
    "-c",
    "import signal as s; s.signal(s.SIGINT, s.default_int_handler); from isochunk.cli.app import main; main()",
]
TRUTH = CostModel(1e-3, 5e-6, 3e-9, 3e-9)
WRONG = CostModel(2.5e-4, 1.25e-6, 7.5e-10, 7.5e-10)


def run(url, *options):
    return CliRunner().invoke(app, ["calibrate", "--url", url, *options])


@pytest.fixture
def url():
    with serving(FakePrefill(model=WRONG, truth=TRUTH)) as url:
        yield url


def test_tables_counters_and_verdict_come_out(url):
    result = run(url, "--tokens", "2048")
    assert result.exit_code == 0, result.output
    for text in ("engine, s", "before", "stored", "traffic", "75.0%", "refits +", "The model was changed"):
        assert text in result.stdout


def test_json_is_alone_on_stdout(url):
    result = run(url, "--tokens", "2048", "--requests", "4", "--seed", "9", "--json")
    data = json.loads(result.stdout)
    assert (data["tokens"], data["seed"], len(data["requests"])) == (2048, 9, 4)
    assert data["before"]["coefficients"] == WRONG.as_dict()
    assert data["after"]["median_error"] < 0.05 < data["before"]["median_error"]
    assert data["counters"]["refits"] >= 1


def test_no_clean_prompt_sets_the_exit_code(url):
    options = ("--tokens", "512", "--requests", "1", "--seed", "3")
    assert run(url, *options).exit_code == 0
    again = run(url, *options)
    assert again.exit_code == 1
    assert "left out" in again.stdout
    assert "prefix hit" in again.stderr


@pytest.mark.parametrize("tokens", ["0", "65536"])
def test_length_out_of_range_is_named(url, tokens):
    result = run(url, "--tokens", tokens)
    assert isinstance(result.exception, ConfigError)
    assert f"length {tokens} must be from 1 to 65535" in str(result.exception)


class Interrupting(FakePrefill):
    """Presses Ctrl-C in the client's terminal during the third prompt."""

    client: subprocess.Popen[str]

    async def _prefill(self, tokens, cached, request_id, alone):
        if len(self.received) == 3:
            os.kill(self.client.pid, signal.SIGINT)
        await super()._prefill(tokens, cached, request_id, alone)


def test_ctrl_c_puts_the_policy_back():
    fake = Interrupting()
    fake.policy, fake.chunk = "first_chunk", 2048
    with serving(fake) as url:
        command = [*ISOCHUNK, "calibrate", "--url", url, "--tokens", "512", "--requests", "50"]
        fake.client = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        shown, errors = fake.client.communicate(timeout=60)
    assert fake.client.returncode != 0
    assert "ended early, 2 prompts are kept: interrupted" in errors
    assert "Cost model, seconds" in shown
    assert "Traceback" not in errors
    assert len(fake.received) == 3
    assert (fake.policy, fake.chunk) == ("first_chunk", 2048)


@contextmanager
def proxy(prefill_url, decode_url):
    """The proxy's own command in front of both; gives its URL."""
    ports = [url.rpartition(":")[2] for url in (prefill_url, decode_url)]
    prefill, decode = (
        [f"--{role}-hosts", "127.0.0.1", f"--{role}-ports", port]
        for role, port in zip(("prefiller", "decoder"), ports, strict=True)
    )
    process = subprocess.Popen(
        [*ISOCHUNK, "proxy", "--port", "0", *prefill, *decode],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        line = next(line for line in process.stdout if "listening on" in line)
        yield f"http://127.0.0.1:{line.split()[-1]}"
    finally:
        process.terminate()
        process.communicate(timeout=30)


def test_p_node_is_calibrated_through_the_proxy():
    prefill, decode = FakePrefill(model=WRONG, truth=TRUTH), FakePrefill(isochunk=False)
    with serving(prefill) as node, serving(decode) as decode_url, proxy(node, decode_url) as url:
        refused = run(url, "--tokens", "2048")
        result = run(url, "--node", node, "--tokens", "2048", "--json")
    assert isinstance(refused.exception, ServerError)
    assert "of a proxy, ask the P node behind it" in str(refused.exception)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["after"]["median_error"] < 0.05
    assert len(prefill.received) == len(decode.received) == 5
