"""What operators look for in a proxy."""

from __future__ import annotations

import re
import socket
import ssl
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from proxy_processes import Node, Proxy, Start, text, until

from isochunk import __version__
from isochunk.cli.proxy import read_arguments
from isochunk.core.cost import CostModel
from isochunk.core.errors import ConfigError
from isochunk.proxy.config import NodeSpec, Role
from isochunk.proxy.detour import Detour, OutputEstimate
from isochunk.proxy.nodes import Pool
from isochunk.proxy.price import NodeModel


@pytest.fixture(scope="module")
def up(start_once: Start) -> tuple[Node, Node, Proxy]:
    prefill, decode = start_once.node("prefill"), start_once.node("decode")
    keys = ("--api-key", "secret", "--admin-key", "admin", "--node-api-key", "inner")
    return prefill, decode, start_once.proxy([prefill], [decode], *keys)


def key(name: str = "secret") -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


@pytest.mark.parametrize("path", ["/health", "/healthcheck"])
def test_health_needs_no_key_and_names_no_node(up: tuple[Node, Node, Proxy], path: str) -> None:
    answer = up[2].http.get(path)
    assert answer.status_code == 200
    assert answer.json() == {"status": "ok", "prefill_instances": 1, "decode_instances": 1, "request_num": 0}


def test_the_version_is_told(up: tuple[Node, Node, Proxy]) -> None:
    assert up[2].http.get("/version", headers=key()).json()["version"] == __version__
    assert up[2].http.get("/version").status_code == 401


@pytest.mark.parametrize(
    ("path", "role"),
    [("/tokenize", "decode"), ("/v1/responses", "decode"), ("/v1/messages", "decode"), ("/v1/embeddings", "prefill")],
)
def test_what_one_node_can_answer_one_node_answers(up: tuple[Node, Node, Proxy], path: str, role: str) -> None:
    body = {"model": "mock", "input": "x"}
    answer = up[2].http.post(path, json=body, headers=key())
    assert answer.json() == {"role": role, "path": path, "body": body}
    assert up[2].http.post(path, json=body).status_code == 401
    streamed = up[2].http.post(path, json={**body, "stream": True}, headers=key())
    assert streamed.text.count("event: ") == 3
    assert streamed.text.endswith("\n\n")


def test_one_nodes_failure_is_anothers_work(start: Start) -> None:
    nodes = [start.node("decode") for _ in range(2)]
    proxy = start.proxy([start.node("prefill")], nodes)
    nodes[0].set(status=500)
    assert [proxy.http.post("/tokenize", json={}).status_code for _ in range(4)] == [200] * 4
    nodes[1].set(status=500)
    assert proxy.http.post("/tokenize", json={}).status_code == 502


def test_prefix_caches_are_reset_on_all_nodes(up: tuple[Node, Node, Proxy]) -> None:
    assert up[2].http.post("/reset_prefix_cache", headers=key()).status_code == 401
    assert up[2].http.post("/reset_prefix_cache", headers=key("admin")).json() == {"nodes": 2, "failed": 0}
    assert [node.state()["resets"] for node in up[:2]] == [1, 1]


def test_every_answer_carries_a_request_id_and_the_log_has_a_line_for_each(up: tuple[Node, Node, Proxy]) -> None:
    proxy = up[2]
    routes: list[tuple[str, str, dict[str, str]]] = [("GET", "/nope", {}), ("GET", "/health", {})]
    for method, path, headers in [*routes, ("POST", "/v1/completions", key())]:
        answer = proxy.http.request(method, path, headers={**headers, "X-Request-Id": b"mi\xe9ne"})
        identity = answer.headers["x-request-id"]
        assert re.fullmatch(r"mine-[0-9a-f]{12}", identity)
        line = f"{method} {path} {answer.status_code} {len(answer.content)} B"
        until(lambda identity=identity, line=line: any(  # type: ignore[misc]
            f"id={identity}" in one and line in one and "ACCESS 127.0.0.1" in one for one in proxy.log
        ))  # fmt: skip


def test_the_access_log_says_which_nodes_answered(start: Start) -> None:
    prefill, decode = start.node("prefill"), start.node("decode")
    proxy = start.proxy([prefill], [decode])
    assert proxy.complete().status_code == 200
    until(lambda: any(f"prefill={prefill.name} decode={decode.name}" in line for line in proxy.log))


def test_a_log_that_nobody_reads_stops_nothing(start: Start) -> None:
    prefill, decode = start.node("prefill"), start.node("decode")
    command = ["-c", "from isochunk.cli.app import main; main()", "proxy", "--port", "0"]
    ports = ["--prefiller-ports", str(prefill.port), "--decoder-ports", str(decode.port), "--lame-duck", "0.01"]
    process = subprocess.Popen(
        [sys.executable, *command, *ports], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        port = int(process.stdout.readline().rsplit(" ", 1)[1])
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            for _ in range(600):  # of 200 bytes: more than a pipe holds
                assert client.get("/" + "x" * 200).status_code == 404
            time.sleep(0.5)
            assert client.get("/health").status_code == 200
        process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


# TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    cert, private = folder / "cert.pem", folder / "key.pem"
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    )
    subprocess.run([*command.split(), "-keyout", private, "-out", cert], check=True, capture_output=True)
    return cert, private


def test_both_sides_speak_https(start: Start, certificate: tuple[Path, Path]) -> None:
    cert, private = certificate
    files = ("--ssl-certfile", str(cert), "--ssl-keyfile", str(private))
    # Another proxy stands for an HTTPS node of the /tokenize kind.
    inner = start.proxy([start.node("prefill")], [start.node("decode")], *files)
    outer = start.proxy([], [], "--admin-key", "admin", "--node-ca-file", str(cert), *files)
    with httpx.Client(base_url=f"https://{outer.name}", verify=ssl.create_default_context(cafile=cert)) as client:
        for role in ("prefill", "decode"):
            name = f"https://{inner.name}" if role == "decode" else start.node("prefill").name
            request = {"type": role, "instances": [name]}
            assert client.post("/instances/add", json=request, headers=key("admin")).status_code == 200
        until(lambda: client.get("/health").status_code == 200)
        assert client.post("/tokenize", json={"a": 1}).json()["role"] == "decode"


def test_who_ends_tls_is_gone(start: Start, certificate: tuple[Path, Path]) -> None:
    cert, private = certificate
    prefill = start.node("prefill", "--delay", "60")
    files = ("--ssl-certfile", str(cert), "--ssl-keyfile", str(private))
    proxy = start.proxy([prefill], [start.node("decode")], *files)
    context = ssl.create_default_context(cafile=cert)
    body = b'{"model": "mock", "prompt": "hello"}'
    plain = socket.create_connection(("127.0.0.1", proxy.port))
    with context.wrap_socket(plain, server_hostname="127.0.0.1") as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        until(lambda: prefill.state()["active"] == 1)
        with suppress(OSError):
            client.unwrap()
        until(lambda: prefill.state()["cancelled"] == 1)
    until(lambda: any("gone" in line for line in proxy.log))
    assert not any("eof" in line for line in proxy.log)


def test_a_wrong_certificate_is_named() -> None:
    from isochunk.cli.proxy import _tls

    nodes = ["--prefiller-ports", "1", "--decoder-ports", "2"]
    with pytest.raises(ConfigError, match="nowhere"):
        _tls(read_arguments([*nodes, "--ssl-certfile", "/nowhere"])[1])


# P left out


def pool_with(cost: CostModel, stages: int) -> Pool:
    pool = Pool(Role.PREFILL)
    node = pool.add(NodeSpec("host", 1))
    assert node is not None
    node.alive, node.model = True, NodeModel(cost=cost, stages=stages)
    return pool


def test_the_threshold_comes_from_ps_model_and_the_hand_over() -> None:
    detour = Detour("auto")
    pool = pool_with(CostModel(0.01, 1e-5, 0.0), 2)
    assert detour.threshold(pool) in (999, 1000)
    for seconds in (0.5, 0.04, 0.9):
        detour.handed_over(seconds)
    assert detour.threshold(pool) in (2999, 3000)
    assert detour.threshold(Pool(Role.PREFILL)) == 0
    assert Detour(70).threshold(pool) == 70
    assert not Detour(None).wanted


def test_p_is_left_out_for_prompts_that_are_short_or_that_d_holds(start: Start) -> None:
    prefill, decode = start.node("prefill"), start.node("decode")
    proxy = start.proxy([prefill], [decode], "--skip-prefill", "600")

    def at_p() -> int:
        return int(prefill.state()["prefills"])

    long = "a long beginning " * 2000
    assert proxy.complete(prompt="short").status_code == 200  # no D node has proved itself yet
    assert at_p() == 1
    assert text(proxy.complete(prompt="short", stream=True))
    assert at_p() == 1
    assert proxy.complete(prompt=long).status_code == 200
    assert at_p() == 2
    assert proxy.complete(prompt=long + " and a little more").status_code == 200
    assert (at_p(), decode.state()["local_prefills"]) == (2, 2)
    assert proxy.metric("isochunk_proxy_prefill_skipped_total") == 2


def test_when_d_can_not_compute_a_prompt_p_does(start: Start) -> None:
    prefill, nodes = start.node("prefill"), [start.node("decode") for _ in range(2)]
    proxy = start.proxy([prefill], nodes, "--skip-prefill", "600")
    assert [proxy.complete().status_code for _ in range(4)] == [200] * 4
    for node in nodes:
        node.set(status=500)
    assert proxy.complete().status_code == 502
    nodes[0].set(status=0)
    assert proxy.complete().status_code == 200


def test_the_length_of_answers_is_learnt_and_bounded_by_what_is_wanted() -> None:
    outputs = OutputEstimate()
    assert outputs.tokens(None) == 256
    for _ in range(200):
        outputs.learn(1000)
    assert outputs.tokens(None) == pytest.approx(1000, rel=0.02)
    assert (outputs.tokens(50), outputs.tokens(10_000)) == (50, pytest.approx(1000, rel=0.02))
    before = outputs.tokens(None)
    outputs.learn(10**9)
    assert outputs.tokens(None) == pytest.approx(before, rel=0.06)


# The published proxy's ways


def test_a_node_that_never_comes_up_is_removed_when_that_was_asked_for(start: Start) -> None:
    prefill, decode, gone = start.node("prefill"), start.node("decode"), start.node("decode")
    waits = ("--max-waiting-retries", "2", "--waiting-retry-interval", "0.1")
    proxy = start.proxy([prefill], [decode], "--admin-key", "admin", *waits)
    name = gone.name
    gone.kill()
    request = {"type": "decode", "instances": [name]}
    answer = proxy.http.post("/instances/add", json=request, headers=key("admin")).json()
    assert answer["current_decode_instances"] == [decode.name, name]
    until(lambda: len(proxy.http.get("/instances", headers=key("admin")).json()["nodes"]) == 2)
    until(lambda: any("did not come up" in line for line in proxy.log))
