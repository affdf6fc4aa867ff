"""What goes wrong behind, in front of and inside the proxy: the client gets an answer or an error, never less."""

from __future__ import annotations

import json
import signal
import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from proxy_processes import Node, Process, Proxy, Start, text, until

SLOW = ("--coefficients", "0.25,1e-6,0,0")  # a prefill takes 0.25 s, long enough to act while it runs


@pytest.fixture(autouse=True)
def threads() -> Any:
    with ThreadPoolExecutor(32) as pool:
        yield pool


def in_background(pool: ThreadPoolExecutor, proxy: Proxy, **fields: Any) -> Future[httpx.Response]:
    return pool.submit(proxy.complete, **fields)


def is_error(response: httpx.Response, *statuses: int) -> bool:
    return response.status_code in statuses and bool(response.json()["error"]["message"])


def last_event(response: httpx.Response) -> Any:
    return json.loads(response.text.strip().rsplit("data: ", 1)[1])


# P dies


def test_a_prefill_node_that_died_before_a_request_is_replaced(start: Start) -> None:
    dead, well, decode = start.node("prefill"), start.node("prefill"), start.node("decode")
    proxy = start.proxy([dead, well], [decode])
    dead.kill()
    assert [proxy.complete(prompt=f"{i}").status_code for i in range(6)] == [200] * 6
    assert well.state()["requests"] == 6
    until(proxy.is_idle)


@pytest.mark.parametrize("moment", ["before", "during"])
def test_a_prefill_node_that_dies_on_a_request_is_replaced(start: Start, moment: str) -> None:
    nodes = [start.node("prefill", *SLOW) for _ in range(2)]
    proxy = start.proxy(nodes, [start.node("decode")])
    nodes[0].set(die=moment)
    answers = [proxy.complete(prompt=f"{i}", stream=True) for i in range(2)]
    assert [text(answer) != "" for answer in answers] == [True, True]
    assert nodes[0].popen.wait(10) == 1
    until(proxy.is_idle)


def test_a_prefill_node_killed_in_mid_prefill_is_replaced(start: Start, threads: ThreadPoolExecutor) -> None:
    nodes = [start.node("prefill", "--coefficients", "1,1e-6,0,0") for _ in range(2)]
    proxy = start.proxy(nodes, [start.node("decode")])
    answers = [in_background(threads, proxy, prompt=f"{i}") for i in range(4)]
    until(lambda: all(node.state()["active"] for node in nodes))
    nodes[0].kill()
    assert [answer.result().status_code for answer in answers] == [200] * 4
    until(proxy.is_idle)


def test_a_prefill_node_that_dies_with_the_kv_is_replaced(start: Start) -> None:
    nodes = [start.node("prefill") for _ in range(2)]
    proxy = start.proxy(nodes, [start.node("decode")])
    nodes[0].set(die="after")
    answers = [proxy.complete(prompt=f"{i}", stream=True) for i in range(2)]
    assert all(text(answer) for answer in answers)
    until(proxy.is_idle)


def test_the_last_prefill_node_gone_is_an_error_with_retry_after(start: Start) -> None:
    prefill = start.node("prefill")
    proxy = start.proxy([prefill], [start.node("decode")])
    prefill.kill()
    assert is_error(proxy.complete(), 502, 503)
    answer = proxy.complete()
    assert is_error(answer, 503)
    assert int(answer.headers["retry-after"]) > 0
    assert proxy.http.get("/healthcheck").status_code == 503
    until(proxy.is_idle)


def test_a_node_that_comes_back_is_used_again(start: Start) -> None:
    prefill = start.node("prefill")
    proxy = start.proxy([prefill], [start.node("decode")])
    prefill.kill()
    assert is_error(proxy.complete(), 502, 503)
    start.node("prefill", "--port", str(prefill.port))
    until(lambda: proxy.complete().status_code == 200)


# D dies


def test_a_decode_node_that_died_leaves_the_kv_for_another(start: Start) -> None:
    prefill, dead, well = start.node("prefill"), start.node("decode"), start.node("decode")
    proxy = start.proxy([prefill], [dead, well])
    dead.kill()
    assert all(text(proxy.complete(stream=True)) for _ in range(4))
    assert (prefill.state()["requests"], prefill.state()["held_kv"]) == (4, 0)
    until(proxy.is_idle)


@pytest.mark.parametrize("stream", [True, False])
def test_a_decode_node_that_dies_before_the_first_byte_is_replaced(start: Start, stream: bool) -> None:
    nodes = [start.node("decode") for _ in range(2)]
    proxy = start.proxy([start.node("prefill")], nodes)
    nodes[0].set(die="before")
    assert all(text(proxy.complete(stream=stream)) for _ in range(3))
    assert nodes[0].popen.wait(10) == 1
    until(proxy.is_idle)


def test_a_decode_node_that_dies_in_mid_stream_ends_it_with_an_error_event(start: Start) -> None:
    decode = start.node("decode")
    proxy = start.proxy([start.node("prefill")], [decode])
    decode.set(die="midstream")
    answer = proxy.complete(stream=True, max_tokens=5)
    assert answer.status_code == 200
    assert "broke the connection" in last_event(answer)["error"]["message"]
    assert "[DONE]" not in answer.text
    assert proxy.metric("isochunk_proxy_requests_total", outcome="broken") == 1
    until(proxy.is_idle)


def test_a_stream_cut_short_without_a_broken_connection_is_noticed(start: Start) -> None:
    decode = start.node("decode")
    proxy = start.proxy([start.node("prefill")], [decode])
    decode.set(cut_after=2)
    assert "without an end mark" in last_event(proxy.complete(stream=True, max_tokens=5))["error"]["message"]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_empty_200_from_a_node_is_never_passed_on(start: Start, role: str) -> None:
    nodes = {name: start.node(name) for name in ("prefill", "decode")}
    proxy = start.proxy([nodes["prefill"]], [nodes["decode"]])
    nodes[role].set(empty=True)
    for stream in (True, False):
        assert is_error(proxy.complete(stream=stream), 502)
    until(proxy.is_idle)


# Nodes that do not answer


def test_a_prefill_node_that_never_answers_is_given_up(start: Start) -> None:
    nodes = [start.node("prefill") for _ in range(2)]
    proxy = start.proxy(nodes, [start.node("decode")], "--prefill-timeout", "0.5")
    nodes[0].set(hang=True)
    assert [proxy.complete(prompt=f"{i}").status_code for i in range(4)] == [200] * 4
    until(lambda: nodes[0].state()["active"] == 0)
    until(proxy.is_idle)


def test_a_decode_node_that_never_answers_is_given_up(start: Start) -> None:
    nodes = [start.node("decode") for _ in range(2)]
    proxy = start.proxy([start.node("prefill")], nodes, "--first-token-timeout", "0.5")
    nodes[0].set(hang=True)
    assert all(text(proxy.complete(stream=True)) for _ in range(3))
    until(lambda: nodes[0].state()["active"] == 0)
    until(proxy.is_idle)


def test_when_no_node_answers_the_client_gets_504(start: Start) -> None:
    prefill = start.node("prefill")
    proxy = start.proxy([prefill], [start.node("decode")], "--prefill-timeout", "0.3", "--max-retries", "2")
    prefill.set(hang=True)
    assert is_error(proxy.complete(), 504)
    assert prefill.state()["requests"] == 2


def test_a_stream_that_falls_silent_ends_with_an_error_event(start: Start) -> None:
    decode = start.node("decode")
    proxy = start.proxy([start.node("prefill")], [decode], "--silence-timeout", "0.3")
    decode.set(stall_after=2)
    assert "did not answer in time" in last_event(proxy.complete(stream=True, max_tokens=5))["error"]["message"]
    until(lambda: decode.state()["active"] == 0)


def test_waits_for_a_node_end_when_it_no_longer_answers_probes(start: Start, threads: ThreadPoolExecutor) -> None:
    nodes = [start.node("prefill") for _ in range(2)]
    proxy = start.proxy(nodes, [start.node("decode")], "--probe-interval", "0.2", "--probe-timeout", "0.2")
    nodes[0].set(hang=True)
    answers = [in_background(threads, proxy, prompt=f"{i}") for i in range(2)]
    until(lambda: nodes[0].state()["active"] == 1)
    nodes[0].set(hang_health=True)
    assert [answer.result().status_code for answer in answers] == [200, 200]


# Answers that are errors


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_400_from_a_node_passes_through_and_is_not_retried(start: Start, role: str) -> None:
    nodes = {name: start.node(name) for name in ("prefill", "decode")}
    proxy = start.proxy([nodes["prefill"]], [nodes["decode"]])
    nodes[role].set(status=400)
    answer = proxy.complete(stream=True)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "status 400 as ordered")
    assert nodes[role].state()["requests"] == 1
    until(proxy.is_idle)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_500_from_a_node_is_tried_elsewhere(start: Start, role: str) -> None:
    nodes = {name: [start.node(name)] for name in ("prefill", "decode")}
    ill = nodes[role][0]
    nodes[role].append(start.node(role))
    proxy = start.proxy(nodes["prefill"], nodes["decode"])
    ill.set(status=500)
    assert [proxy.complete(prompt=f"{i}").status_code for i in range(4)] == [200] * 4
    until(proxy.is_idle)


def test_a_storm_of_refused_connections_is_answered_at_once_and_ends(start: Start, threads: ThreadPoolExecutor) -> None:
    prefill, decode = start.node("prefill"), start.node("decode")
    proxy = start.proxy([prefill], [decode])
    decode.kill()
    answers = [a.result() for a in [in_background(threads, proxy, prompt=f"{i}") for i in range(200)]]
    assert all(is_error(answer, 502, 503) for answer in answers)
    start.node("decode", "--port", str(decode.port))
    until(lambda: proxy.complete().status_code == 200)
    until(proxy.is_idle)


# Clients


def send_raw(proxy: Proxy, **fields: Any) -> socket.socket:
    body = json.dumps({"model": "mock", "prompt": "hello", "max_tokens": 3, **fields}).encode()
    connection = socket.create_connection(("127.0.0.1", proxy.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def wait_cancelled(node: Node) -> None:
    until(lambda: (node.state()["cancelled"], node.state()["active"]) == (1, 0))


def test_a_client_that_goes_during_prefill_stops_it(start: Start) -> None:
    prefill, decode = start.node("prefill", "--coefficients", "60,1e-6,0,0"), start.node("decode")
    proxy = start.proxy([prefill], [decode])
    connection = send_raw(proxy)
    until(lambda: prefill.state()["active"] == 1)
    connection.close()
    wait_cancelled(prefill)
    assert (prefill.state()["held_kv"], decode.state()["requests"]) == (0, 0)
    until(proxy.is_idle)
    assert proxy.metric("isochunk_proxy_requests_total", outcome="client_gone") == 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_during_decode_stops_it(start: Start, stream: bool) -> None:
    prefill, decode = start.node("prefill"), start.node("decode", "--interval", "0.02")
    proxy = start.proxy([prefill], [decode])
    connection = send_raw(proxy, stream=stream, max_tokens=100_000)
    until(lambda: decode.state()["active"] == 1)
    connection.close()
    wait_cancelled(decode)
    assert prefill.state()["held_kv"] == 0
    until(proxy.is_idle)


def test_a_client_that_goes_before_its_body_is_whole_leaves_nothing(start: Start) -> None:
    prefill = start.node("prefill")
    proxy = start.proxy([prefill], [start.node("decode")])
    with socket.create_connection(("127.0.0.1", proxy.port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        until(lambda: proxy.metric("isochunk_proxy_active_requests") == 1)
    until(proxy.is_idle)
    assert prefill.state()["requests"] == 0


def memory_mib(process: Process) -> float:
    with open(f"/proc/{process.popen.pid}/statm") as file:
        return int(file.read().split()[1]) * 4096 / (1 << 20)


def test_a_slow_client_holds_the_stream_back_and_not_in_memory(start: Start) -> None:
    prefill, decode = start.node("prefill"), start.node("decode", "--filler", "10000")
    proxy = start.proxy([prefill], [decode])
    assert text(proxy.complete(stream=True, max_tokens=100))
    before = memory_mib(proxy)
    with send_raw(proxy, stream=True, max_tokens=10_000) as connection:  # 100 MB
        connection.recv(1)
        until(lambda: not advances(decode, proxy))
        assert memory_mib(proxy) - before < 30
        assert proxy.complete().status_code == 200  # others are served meanwhile
        received, last = 1, b""
        while b"[DONE]" not in last:
            part = connection.recv(1 << 20)
            assert part
            received += len(part)
            last = (last + part)[-100:]
    assert received > 100_000_000
    until(proxy.is_idle)


def advances(decode: Node, proxy: Proxy) -> bool:
    """Whether bytes still flow: the proxy's processor time grows while it hands them on."""
    before = cpu_ticks(decode)
    decode.state()
    time.sleep(0.2)
    return cpu_ticks(decode) - before > 5


def cpu_ticks(process: Process) -> int:
    with open(f"/proc/{process.popen.pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


# Changes while it serves


def test_a_node_removed_under_load_finishes_what_it_has(start: Start, threads: ThreadPoolExecutor) -> None:
    prefill = [start.node("prefill", "--coefficients", "0.05,1e-6,0,0") for _ in range(2)]
    decode = [start.node("decode", "--interval", "0.02") for _ in range(2)]
    proxy = start.proxy(prefill, decode, "--admin-key", "admin")
    answers = [in_background(threads, proxy, prompt=f"{i}", stream=True) for i in range(24)]
    until(lambda: all(node.state()["active"] for node in (prefill[0], decode[0])))
    for role, node in (("prefill", prefill[0]), ("decode", decode[0])):
        request = {"type": role, "instances": node.name}
        reply = proxy.http.post("/instances/remove", json=request, headers={"Authorization": "Bearer admin"})
        assert reply.json()["removed"] == [node.name]
    assert all(text(answer.result()) for answer in answers)
    listed = {"headers": {"Authorization": "Bearer admin"}}
    until(lambda: len(proxy.http.get("/instances", **listed).json()["nodes"]) == 2)
    counts = [node.state()["requests"] for node in (prefill[0], decode[0])]
    assert all(proxy.complete(prompt=f"more {i}").status_code == 200 for i in range(4))
    assert [node.state()["requests"] for node in (prefill[0], decode[0])] == counts
    assert sum(node.state()["cancelled"] for node in prefill + decode) == 0


def test_a_node_added_while_it_serves_gets_requests(start: Start) -> None:
    prefill, decode = start.node("prefill"), start.node("decode")
    proxy = start.proxy([], [decode], "--admin-key", "admin")
    assert is_error(proxy.complete(), 503)
    request = {"type": "prefill", "instances": [prefill.name]}
    reply = proxy.http.post("/instances/add", json=request, headers={"Authorization": "Bearer admin"})
    assert reply.json()["prefill_instances"] == [prefill.name]
    assert proxy.complete().status_code == 200
    wrong = proxy.http.post("/instances/add", json={"type": "x"}, headers={"Authorization": "Bearer admin"})
    assert is_error(wrong, 400)


def test_sighup_reads_the_nodes_again_and_a_bad_file_changes_nothing(start: Start, tmp_path: Any) -> None:
    old, new, decode = start.node("prefill"), start.node("prefill"), start.node("decode")
    file = tmp_path / "nodes.yaml"
    file.write_text(f"prefill: ['{old.name}']\ndecode: ['{decode.name}']\n")
    proxy = start.proxy([], [], "--nodes", str(file))
    assert proxy.complete().status_code == 200
    bad = (
        "prefill: nonsense\n",
        f"prefill: ['{new.name}']\ndecode: ['{decode.name}', '{decode.name}']\n",
        f"prefill: ['{new.name}']\ndecode: [{{host: 127.0.0.1, port: {decode.port}, kv_tokens: many}}]\n",
        f"prefill: ['{new.name}']\n",
        f"prefill: ['{new.name}', 'localhost:{proxy.port}']\ndecode: ['{decode.name}']\n",
        "",
    )
    for count, text_ in enumerate(bad, 1):
        file.write_text(text_)
        proxy.signal(signal.SIGHUP)
        until(lambda count=count: sum("stay as they are" in line for line in proxy.log) == count)  # type: ignore[misc]
        assert proxy.complete().status_code == 200
    assert new.state()["requests"] == 0
    file.write_text(f"prefill: [{{host: 127.0.0.1, port: {new.port}}}]\ndecode: ['{decode.name}']\n")
    proxy.signal(signal.SIGHUP)
    until(lambda: any("read again" in line for line in proxy.log))
    assert proxy.complete(prompt="other").status_code == 200
    assert (old.state()["requests"], new.state()["requests"]) == (1 + len(bad), 1)


def test_a_node_that_can_not_be_is_not_added(start: Start) -> None:
    prefill, decode = start.node("prefill"), start.node("decode")
    proxy = start.proxy([prefill], [decode], "--admin-key", "admin")
    for instance in (f"localhost:{proxy.port}", "user@host:1", "ftp://host:1", decode.name, 7):
        request = {"type": "prefill", "instances": [instance]}
        reply = proxy.http.post("/instances/add", json=request, headers={"Authorization": "Bearer admin"})
        assert is_error(reply, 400), instance
    assert proxy.complete().status_code == 200


def test_before_it_stops_it_serves_on_and_says_so(start: Start) -> None:
    proxy = start.proxy([start.node("prefill")], [start.node("decode")], "--lame-duck", "60")
    assert proxy.http.get("/health").status_code == 200
    proxy.signal(signal.SIGTERM)
    until(lambda: proxy.http.get("/health").status_code == 503)
    assert proxy.http.get("/healthcheck").json()["status"] == "leaving"
    assert proxy.complete().status_code == 200
    proxy.signal(signal.SIGTERM)
    assert proxy.popen.wait(10) == 0


def test_sigterm_lets_running_requests_end_and_takes_no_more(start: Start, threads: ThreadPoolExecutor) -> None:
    prefill, decode = start.node("prefill"), start.node("decode", "--interval", "0.1")
    proxy = start.proxy([prefill], [decode], "--lame-duck", "0.01")
    answer = in_background(threads, proxy, stream=True, max_tokens=10)
    until(lambda: decode.state()["active"] == 1)
    proxy.signal(signal.SIGTERM)
    until(lambda: not accepts(proxy))
    assert len(text(answer.result()).split()) == 10
    assert proxy.popen.wait(10) == 0


def accepts(proxy: Proxy) -> bool:
    try:
        socket.create_connection(("127.0.0.1", proxy.port), timeout=1).close()
    except OSError:
        return False
    return True
