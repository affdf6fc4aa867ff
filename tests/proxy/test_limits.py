"""What clients can't do to a proxy: the limits hold before a key or anything else is looked at."""

from __future__ import annotations

import json
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
from proxy_processes import Proxy, Start, until

from isochunk.core.errors import ConfigError
from isochunk.proxy.limits import Gate, Limits, client_of

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n"
BODY = json.dumps({"model": "mock", "prompt": "hello", "max_tokens": 3}).encode()


class Raw:
    """A connection that sends what it likes."""

    opened: ClassVar[list[socket.socket]] = []

    def __init__(self, proxy: Proxy, source: str = "127.0.0.1") -> None:
        self.socket = socket.create_connection(("127.0.0.1", proxy.port), source_address=(source, 0), timeout=20)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.opened.append(self.socket)
        self.got = b""

    def send(self, data: bytes) -> bool:
        with suppress(OSError):
            self.socket.sendall(data)
            return True
        return False

    def rest(self) -> bytes:
        """All until the proxy closes."""
        with suppress(ConnectionError):
            while part := self.socket.recv(1 << 16):
                self.got += part
        self.socket.close()
        return self.got

    def answer(self) -> bytes:
        """One answer with a length or in chunks."""
        while b"\r\n\r\n" not in self.got:
            self._more()
        head, _, body = self.got.partition(b"\r\n\r\n")
        length = next((int(line[16:]) for line in head.split(b"\r\n") if line.startswith(b"content-length: ")), None)
        while len(body) < length if length is not None else not body.endswith(b"0\r\n\r\n"):
            self._more()
            body = self.got.partition(b"\r\n\r\n")[2]
        end = len(head) + 4 + length if length is not None else len(self.got)
        answer, self.got = self.got[:end], self.got[end:]
        return answer

    def _more(self) -> None:
        part = self.socket.recv(1 << 16)
        assert part, self.got
        self.got += part


def post(body: bytes = BODY, *headers: str, version: str = "1.1") -> bytes:
    lines = [f"POST /v1/completions HTTP/{version}", "Host: x", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "\r\n"]).encode() + body


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


@pytest.fixture(autouse=True)
def _close_connections() -> Iterator[None]:
    yield
    while Raw.opened:
        Raw.opened.pop().close()


@pytest.fixture(scope="module")
def proxy(start_once: Start) -> Proxy:
    prefill, decode = start_once.node("prefill"), start_once.node("decode")
    limits = ("--header-timeout", "1", "--body-timeout", "1", "--max-body-mib", "40", "--max-bodies-mib", "60")
    return start_once.proxy([prefill], [decode], *limits, "--api-key", "secret")


@pytest.fixture
def open_proxy(start: Start) -> Proxy:
    return start.proxy([start.node("prefill")], [start.node("decode")])


def rss_mib(proxy: Proxy) -> float:
    pages = int(Path(f"/proc/{proxy.popen.pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / (1 << 20)


# Heads


def test_an_endless_header_is_refused_long_before_its_end(proxy: Proxy) -> None:
    raw = Raw(proxy)
    raw.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Long: ")
    sent = 0
    while sent < 100 << 20 and raw.send(b"x" * (1 << 20)):
        sent += 1 << 20
    assert status(raw.rest()) == 431


@pytest.mark.parametrize("head", [b"".join(b"X-%d: 1\r\n" % i for i in range(200)), b"X: " + b"x" * 70_000 + b"\r\n"])
def test_too_many_or_too_long_headers_are_refused(proxy: Proxy, head: bytes) -> None:
    raw = Raw(proxy)
    raw.send(b"GET /health HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n")
    assert status(raw.rest()) == 431


def test_a_long_target_is_refused_and_a_head_in_small_parts_is_not(proxy: Proxy) -> None:
    raw = Raw(proxy)
    raw.send(b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n")
    assert status(raw.rest()) == 431
    raw = Raw(proxy)
    for byte in b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n":
        raw.send(bytes([byte]))
    assert status(raw.answer()) == 200


@pytest.mark.parametrize("data", [b"", b"GET /heal", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n", b"\r\n\r\n"])
def test_a_silent_connection_is_told_and_closed(proxy: Proxy, data: bytes) -> None:
    raw = Raw(proxy)
    raw.send(data)
    answer = raw.rest()
    assert status(answer) == 408
    assert b"x-request-id: " in answer


def test_a_dripping_head_has_no_longer_than_a_silent_one(proxy: Proxy) -> None:
    raw = Raw(proxy)
    raw.socket.settimeout(0.05)
    raw.send(b"GET /health HTTP/1.1\r\nHost: x\r\n")
    while not raw.got:
        raw.send(b"X: 1\r\n")
        with suppress(TimeoutError):
            raw.got += raw.socket.recv(1 << 16)
    assert status(raw.got) == 408


# Bodies


def test_a_declared_length_over_the_limit_is_refused_before_the_body(proxy: Proxy) -> None:
    raw = Raw(proxy)
    raw.send(HEAD + b"Content-Length: 50000000\r\n\r\n")
    assert status(raw.rest()) == 413


def test_a_chunked_body_over_the_limit_is_refused(proxy: Proxy) -> None:
    raw = Raw(proxy)
    raw.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    chunk = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"
    for _ in range(60):
        raw.send(chunk)
    assert status(raw.rest()) == 413


def test_a_body_that_stops_is_given_up(proxy: Proxy) -> None:
    raw = Raw(proxy)
    raw.send(HEAD + b"Content-Length: 999\r\n\r\n{")
    assert status(raw.rest()) == 408


def test_without_the_key_a_body_is_not_waited_for(proxy: Proxy) -> None:
    raw = Raw(proxy)
    raw.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 30000000\r\n\r\n{")
    assert status(raw.rest()) == 401


def test_expecting_clients_are_told_to_go_on_or_why_not(proxy: Proxy) -> None:
    raw = Raw(proxy)
    head, body = post(BODY, "Expect: 100-continue", "Authorization: Bearer secret").split(b"\r\n\r\n")
    raw.send(head + b"\r\n\r\n")
    assert raw.socket.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
    raw.send(body)
    assert status(raw.answer()) == 200
    raw = Raw(proxy)
    raw.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 300\r\nExpect: 100-continue\r\n\r\n")
    assert status(raw.rest()) == 401


@pytest.mark.parametrize("end", [b"1;" + b"e" * 200_000, b"0\r\n" + b"X-Trailer: 1\r\n" * 20_000])
def test_framing_without_content_is_refused(proxy: Proxy, end: bytes) -> None:
    raw = Raw(proxy)
    raw.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    raw.send(end)
    assert status(raw.rest()) == 400


def test_unfinished_bodies_hold_so_much_memory_and_no_more(proxy: Proxy) -> None:
    before = rss_mib(proxy)
    head = HEAD + b"Content-Length: 41000000\r\n\r\n"
    refused = []
    with ExitStack() as stack:
        for _ in range(8):
            raw = Raw(proxy)
            stack.callback(raw.socket.close)
            raw.send(head)
            if not raw.send(b"x" * 40_000_000):
                refused.append(raw)
        until(lambda: rss_mib(proxy) - before < 80)
        small = proxy.http.post("/v1/completions", content=BODY, headers={"Authorization": "Bearer secret"})
        assert small.status_code == 200
    assert rss_mib(proxy) - before < 80


# Connections


def test_one_connection_too_many_is_told_so(start: Start) -> None:
    limits = ("--max-connections", "4", "--max-connections-per-client", "2")
    proxy = start.proxy([start.node("prefill")], [start.node("decode")], *limits)
    with ExitStack() as stack:
        for source in ("127.0.0.1", "127.0.0.1", "127.0.0.2", "127.0.0.2"):
            stack.callback(Raw(proxy, source).socket.close)
            if source == "127.0.0.1":
                continue
        assert status(Raw(proxy, "127.0.0.3").rest()) == 503
    until(lambda: status(answered(proxy, "127.0.0.3")) == 200)
    with ExitStack() as stack:
        for _ in range(2):
            stack.callback(Raw(proxy, "127.0.0.2").socket.close)
        assert status(Raw(proxy, "127.0.0.2").rest()) == 429
        assert status(answered(proxy, "127.0.0.3")) == 200


def answered(proxy: Proxy, source: str) -> bytes:
    raw = Raw(proxy, source)
    raw.send(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    return raw.rest()


def test_running_out_of_descriptors_is_no_fault_of_the_nodes(start: Start) -> None:
    prefill, decode = start.node("prefill"), start.node("decode")
    proxy = start.proxy([prefill], [decode], "--probe-interval", "0.1")
    held = Raw(proxy)
    held.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert status(held.answer()) == 200
    pid = proxy.popen.pid
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    assert soft == hard
    until(lambda: len(list(Path(f"/proc/{pid}/fd").iterdir())) > 0)
    highest = max(int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir())
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(highest + 1, 8), hard))
    looked = decode.state()["requests"]
    held.send(post())
    answer = held.answer()
    while status(answer) == 200:  # over connections that were open
        held.send(post())
        answer = held.answer()
    assert status(answer) == 503
    assert b"descriptors" in answer
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (hard, hard))
    held.send(post())
    assert status(held.answer()) == 200
    assert decode.state()["requests"] > looked
    assert not any("is down" in line for line in proxy.log)


# HTTP


def test_an_upgrade_is_ignored(open_proxy: Proxy) -> None:
    raw = Raw(open_proxy)
    upgrade = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")
    for _ in range(2):
        raw.send(post(BODY, *upgrade))
        assert status(raw.answer()) == 200
    raw.send(("GET /health HTTP/1.1\r\nHost: x\r\n" + "\r\n".join(upgrade) + "\r\n\r\n").encode())
    assert status(raw.answer()) == 200
    raw.send(post())
    assert status(raw.answer()) == 200


def test_http_1_0_gets_no_chunks_and_an_end(open_proxy: Proxy) -> None:
    raw = Raw(open_proxy)
    raw.send(post(BODY[:-1] + b', "stream": true}', version="1.0"))
    head, _, body = raw.rest().partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    assert body.startswith(b"data: ")
    assert body.endswith(b"data: [DONE]\n\n")


def test_requests_sent_at_once_are_answered_in_order(open_proxy: Proxy) -> None:
    raw = Raw(open_proxy)
    raw.send(b"GET /nope HTTP/1.1\r\nHost: x\r\n\r\n" + post() + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
    assert [status(raw.answer()) for _ in range(102)] == [404, 200, *[200] * 100]


@pytest.mark.parametrize(
    "request_line",
    [b"nonsense\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n",
     b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"],
)  # fmt: skip
def test_what_is_not_http_gets_400(open_proxy: Proxy, request_line: bytes) -> None:
    raw = Raw(open_proxy)
    raw.send(request_line)
    assert status(raw.rest()) == 400


@pytest.mark.parametrize(
    ("version", "headers", "status"),
    [
        (b"1.1", b"Host: a\r\nHost: b\r\n", b"400"),
        (b"1.1", b"", b"400"),
        (b"1.1", b"Host: a\r\nTransfer-Encoding: gzip, chunked\r\n", b"400"),
        (b"1.0", b"Transfer-Encoding: chunked\r\n", b"400"),
        (b"2.0", b"", b"505"),
        (b"0.9", b"", b"505"),
    ],
)
def test_what_another_server_may_read_otherwise_is_refused(
    open_proxy: Proxy, version: bytes, headers: bytes, status: bytes
) -> None:
    raw = Raw(open_proxy)
    raw.send(
        b"GET /health HTTP/" + version + b"\r\n" + headers + b"\r\n0\r\n\r\nGET /version HTTP/1.1\r\nHost: x\r\n\r\n"
    )
    answer = raw.rest()
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert answer.count(b"HTTP/1.1 ") == 1  # what follows is no request


def test_who_closes_his_side_is_answered_what_comes_soon(open_proxy: Proxy) -> None:
    for data, answers in (
        (post(), 1),
        (post(BODY[:-1] + b', "stream": true}'), 1),
        (b"GET /nope HTTP/1.1\r\nHost: x\r\n\r\n", 1),
        (post() + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" + post(), 3),
        (b"\x00 nonsense\r\n\r\n", 1),
    ):
        raw = Raw(open_proxy)
        raw.send(data)
        raw.socket.shutdown(socket.SHUT_WR)
        assert raw.rest().count(b"HTTP/1.1 ") == answers
    for half in (b"", b"GET /health HTTP/1.1\r\n", post()[:-3]):
        raw = Raw(open_proxy)
        raw.send(half)
        raw.socket.shutdown(socket.SHUT_WR)
        assert raw.rest() == b""
    assert open_proxy.is_idle()


def test_who_closes_his_side_before_a_long_prefill_is_taken_for_gone(start: Start) -> None:
    prefill = start.node("prefill", "--delay", "60")
    proxy = start.proxy([prefill], [start.node("decode")])
    raw = Raw(proxy)
    raw.send(post())
    until(lambda: prefill.state()["active"] == 1)
    raw.socket.shutdown(socket.SHUT_WR)
    assert raw.rest() == b""
    until(lambda: prefill.state()["cancelled"] == 1)
    assert proxy.is_idle()


def test_a_stream_goes_on_for_who_closed_his_side_and_ends_when_nobody_is_there(start: Start) -> None:
    decode = start.node("decode", "--interval", "0.3")
    proxy = start.proxy([start.node("prefill")], [decode])
    body = b'{"model": "mock", "prompt": "slow", "max_tokens": 8, "stream": true}'
    raw = Raw(proxy)
    raw.send(post(body))
    raw.socket.shutdown(socket.SHUT_WR)
    assert raw.rest().endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    raw = Raw(proxy)
    raw.send(post(body.replace(b"8", b"1000")))
    raw.socket.recv(10)
    raw.socket.close()
    until(lambda: decode.state()["cancelled"] == 1)


def test_a_target_with_its_origin_is_a_path(open_proxy: Proxy) -> None:
    raw = Raw(open_proxy)
    raw.send(b"GET http://anything:80/health HTTP/1.1\r\nHost: anything\r\n\r\n")
    assert status(raw.answer()) == 200


def test_a_head_request_has_no_body(open_proxy: Proxy) -> None:
    raw = Raw(open_proxy)
    raw.send(b"HEAD /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    head, _, body = raw.rest().partition(b"\r\n\r\n")
    assert (status(head), body) == (200, b"")


# The counting itself


def test_the_gate_counts_each_client_and_all() -> None:
    gate = Gate(Limits(connections=3, connections_each=2))
    assert [gate.enter("a"), gate.enter("a"), gate.enter("b")] == [None] * 3
    refused = gate.enter("c"), gate.enter("a")
    assert [error.status for error in refused if error] == [503, 503]
    gate.leave("b")
    error = gate.enter("a")
    assert error is not None
    assert error.status == 429
    assert gate.enter("c") is None


def test_one_client_has_half_of_the_memory_and_small_bodies_always_fit() -> None:
    gate = Gate(Limits(body_bytes=10 << 20, bodies_bytes=40 << 20))

    def refusal(client: str, size: int) -> Any:
        error = gate.hold(client, 0, size)
        return error and error.status

    assert [refusal("a", 10 << 20) for _ in range(3)] == [None, None, 429]
    assert [refusal("b", 10 << 20) for _ in range(3)] == [None, None, 503]
    assert refusal("c", 60_000) is None
    gate.release("a", 10 << 20)
    assert refusal("c", 9 << 20) is None


@pytest.mark.parametrize(
    ("peer", "client"),
    [
        (("10.0.0.1", 5), "10.0.0.1"),
        (("::ffff:10.0.0.1", 5, 0, 0), "10.0.0.1"),
        (("2001:db8::1", 5, 0, 0), "2001:db8::/64"),
        (("2001:db8::ffff", 5, 0, 0), "2001:db8::/64"),
        (("fe80::1%eth0", 5, 0, 2), "fe80::/64"),
        ("", "local"),
    ],
)
def test_a_client_is_an_address_or_what_one_host_has_of_ipv6(peer: object, client: str) -> None:
    assert client_of(peer) == client


def test_limits_of_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="headers = 0"):
        Limits(headers=0)
