from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isochunk.cli.proxy import read_arguments
from isochunk.core.errors import ConfigError
from isochunk.proxy.config import NodeSpec, Role, Timeouts, load_nodes, parse_nodes
from isochunk.proxy.limits import Limits
from isochunk.proxy.specs import is_here
from isochunk.proxy.upstream import end_to_end

NODES = ["--prefiller-hosts", "p", "--prefiller-ports", "1", "--decoder-hosts", "d", "--decoder-ports", "2"]


def test_the_published_proxys_command_line_is_understood(caplog: pytest.LogCaptureFixture) -> None:
    line = (
        "--host 0.0.0.0 --port 9000 --prefiller-hosts a b --prefiller-port 8100 8101 "
        "--decoder-host c d --decoder-ports 8200 8201 --max-retries 5 --retry-delay 0.1 --workers 2"
    )
    config, given = read_arguments(line.split())
    assert config.nodes == {
        Role.PREFILL: (NodeSpec("a", 8100), NodeSpec("b", 8101)),
        Role.DECODE: (NodeSpec("c", 8200), NodeSpec("d", 8201)),
    }
    assert (given.host, given.port, config.attempts) == ("0.0.0.0", 9000, 5)
    assert config.retry_delay_s == 0.1
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == ["--workers"]


def test_it_listens_on_loopback_and_has_no_admin_routes_by_default() -> None:
    config, given = read_arguments(NODES)
    assert (given.host, config.admin_key, config.api_key) == ("127.0.0.1", None, None)


def test_one_host_serves_for_all_ports() -> None:
    config, _ = read_arguments([*NODES[:3], "1", "2", *NODES[4:]])
    assert config.nodes[Role.PREFILL] == (NodeSpec("p", 1), NodeSpec("p", 2))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--prefiller-hosts", "a", "b"], "2 --prefiller-hosts do not fit 1"),
        (["--prefiller-bootstrap-ports", "1", "2"], "2 --prefiller-bootstrap-ports for 1 P nodes"),
        (["--prefiller-ports", "99999"], "port 99999"),
        (["--max-retries", "0"], "attempts = 0"),
        (["--deadline", "-1"], "deadline = -1"),
        (["--silence-timeout", "0"], "silence_s = 0"),
        (["--nodes", "/nowhere.yaml"], "can't read the nodes"),
    ],
)
def test_a_wrong_option_is_named(more: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_arguments([*NODES, *more])


def test_no_nodes_at_all_is_an_error_unless_they_can_be_added() -> None:
    with pytest.raises(ConfigError, match="no decode nodes: give --decoder-hosts"):
        read_arguments(NODES[:4])
    assert read_arguments(["--admin-key", "k"])[0].nodes == {Role.PREFILL: (), Role.DECODE: ()}


def test_nodes_come_from_yaml(tmp_path: Path) -> None:
    file = tmp_path / "nodes.yaml"
    file.write_text("prefill:\n  - {host: a, port: 1, bootstrap: 'http://a:8998', kv_tokens: 5}\ndecode: ['[::1]:2']\n")
    nodes = load_nodes(file)
    assert nodes[Role.PREFILL] == (NodeSpec("a", 1, "http://a:8998", 5),)
    assert nodes[Role.DECODE][0].name == "[::1]:2"


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {"prefil": []},
        {"prefill": "a:1"},
        {"prefill": ["a"]},
        {"prefill": [1]},
        {"prefill": [{"host": "a"}]},
        {"prefill": [{"host": "a", "port": "1"}]},
        {"prefill": [{"host": "a", "port": 1, "weight": 2}]},
        {"prefill": [{"host": "a", "port": 1, "bootstrap": "a:8998"}]},
        {"prefill": [{"host": "a", "port": 1, "kv_tokens": 0}]},
        {"prefill": ["a:0"]},
        {"prefill": ["user@a:1"]},
        {"prefill": ["http://user:secret@a:1"]},
        {"prefill": ["a:1/path"]},
        {"prefill": ["http://a:1/v1"]},
        {"prefill": ["a:1?x=y"]},
        {"prefill": ["ftp://a:1"]},
        {"prefill": ["file:///etc/passwd:1"]},
        {"prefill": ["a b:1"]},
        {"prefill": ["a\r\nX: y:1"]},
        {"prefill": ["::1:8000"]},
        {"prefill": ["a:1", "a:1"]},
        {"prefill": ["a:1"], "decode": ["A:1"]},
        {"prefill": [{"host": ["a"], "port": 1}]},
        {"prefill": [{"host": "a", "port": True}]},
        {"prefill": [{"host": "a", "port": 1, "kv_tokens": "many"}]},
        {"prefill": [{"host": "a", "port": 1, "tls": "yes"}]},
        {"prefill": [{"host": "a", "port": 1, "bootstrap": "http://u@a:8998"}]},
        {"prefill": [{"host": "a", "port": 1, "bootstrap": 8998}]},
        {1: []},
    ],
)
def test_nodes_of_another_form_are_refused(data: Any) -> None:
    with pytest.raises(ConfigError):
        parse_nodes(data)


def test_a_node_may_speak_https() -> None:
    assert NodeSpec.parse("https://a:8443").url == "https://a:8443"
    assert NodeSpec.parse("http://a:8000/").url == "http://a:8000"
    assert NodeSpec.parse("HTTPS://[::1]:1").url == "https://[::1]:1"


@pytest.mark.parametrize(
    ("node", "listening", "same"),
    [
        (("127.0.0.1", 80), ("127.0.0.1", 80), True),
        (("localhost", 80), ("127.0.0.1", 80), True),
        (("localhost", 80), ("0.0.0.0", 80), True),
        (("127.0.0.1", 81), ("127.0.0.1", 80), False),
        (("127.0.0.2", 80), ("127.0.0.1", 80), False),
        (("192.0.2.1", 80), ("0.0.0.0", 80), False),
        (("no-such-host.invalid", 80), ("0.0.0.0", 80), False),
    ],
)
def test_a_proxy_knows_itself(node: tuple[str, int], listening: tuple[str, int], same: bool) -> None:
    assert is_here(NodeSpec(*node), *listening) is same


def test_limits_are_checked_when_they_are_made() -> None:
    with pytest.raises(ConfigError, match="connect_s = 0 must be above 0"):
        Timeouts(connect_s=0)
    with pytest.raises(ConfigError, match="body_bytes = 0"):
        Limits(body_bytes=0)


def test_headers_of_one_connection_are_left_out() -> None:
    headers = [("Connection", "keep-alive, X-Mine"), ("Keep-Alive", "1"), ("X-Mine", "1"), ("TE", "x"), ("X-Ok", "1")]
    assert end_to_end(headers) == [("x-ok", "1")]
