"""A proxy in front of two P and two D nodes, all of them processes."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import pytest
from proxy_processes import MODEL_ARGUMENTS, Node, Proxy, Start, text, until


@dataclass
class Deployment:
    prefill: list[Node]
    decode: list[Node]
    proxy: Proxy

    def total(self, name: str) -> int:
        return sum(node.state()[name] for node in [*self.prefill, *self.decode])


@pytest.fixture(scope="module")
def up(start_once: Start) -> Deployment:
    prefill = [start_once.node("prefill", *MODEL_ARGUMENTS) for _ in range(2)]
    decode = [start_once.node("decode") for _ in range(2)]
    return Deployment(prefill, decode, start_once.proxy(prefill, decode, "--max-retries", "1"))


def test_an_answer_is_the_same_streamed_and_not(up: Deployment) -> None:
    whole, streamed = up.proxy.complete(), up.proxy.complete(stream=True)
    assert whole.status_code == streamed.status_code == 200
    assert text(whole) == text(streamed) != ""


def test_every_prompt_gets_its_own_answer_under_concurrency(up: Deployment) -> None:
    direct = up.decode[0].http
    prompts = [f"prompt {i}" for i in range(60)]
    body = {"model": "mock", "max_tokens": 3}
    expected = [text(direct.post("/v1/completions", json={**body, "prompt": p})) for p in prompts]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda p: text(up.proxy.complete(prompt=p, stream=True)), prompts))
    assert answers == expected


def test_decode_computes_no_prompt_and_prefill_keeps_no_kv(up: Deployment) -> None:
    before = up.total("local_prefills"), up.total("fetched_kv")
    assert up.proxy.complete().status_code == 200
    assert (up.total("local_prefills"), up.total("fetched_kv")) == (before[0], before[1] + 1)
    assert up.total("held_kv") == 0


def test_prefill_is_asked_for_one_token_and_both_nodes_get_one_request_id(start: Start) -> None:
    prefill, decode = start.node("prefill"), start.node("decode")
    proxy = start.proxy([prefill], [decode])
    fields = {"stream": True, "stream_options": {"include_usage": True}, "min_tokens": 2, "temperature": 0.5}
    answer = proxy.http.post(
        "/v1/completions",
        json={"model": "mock", "prompt": [1, 2, 3], "max_tokens": 3, **fields, "kv_transfer_params": {"evil": 1}},
        headers={"X-Request-Id": "mine", "Connection": "close, X-Hop", "X-Hop": "1", "X-Trace": "t"},
    )
    assert answer.status_code == 200
    assert answer.headers["x-request-id"].startswith("mine-")
    at_p, at_d = prefill.state(), decode.state()
    body = at_p["body"]
    assert (body["max_tokens"], body["stream"], body["temperature"]) == (1, False, 0.5)
    assert body["kv_transfer_params"]["do_remote_decode"] is True
    assert not {"stream_options", "min_tokens"} & set(body)
    assert at_d["body"]["kv_transfer_params"]["pp_size"] == 1
    assert "evil" not in at_d["body"]["kv_transfer_params"]
    assert at_d["body"]["stream_options"] == {"include_usage": True}
    assert at_p["headers"]["x-request-id"] == at_d["headers"]["x-request-id"]
    for headers in (at_p["headers"], at_d["headers"]):
        assert headers["x-trace"] == "t"
        assert "x-hop" not in headers


def test_chat_is_answered(up: Deployment) -> None:
    body = {"model": "mock", "messages": [{"role": "user", "content": 'hé "x" \n'}], "max_completion_tokens": 2}
    answer = up.proxy.http.post("/v1/chat/completions", json=body)
    direct = up.decode[0].http.post("/v1/chat/completions", json=body)
    assert answer.json()["choices"] == direct.json()["choices"]


def test_mooncake_nodes_are_told_one_transfer_id_and_where_the_kv_is(start: Start) -> None:
    prefill, decode = start.node("prefill"), start.node("decode")
    proxy = start.proxy([prefill], [decode], "--prefiller-bootstrap-ports", str(prefill.port))
    assert proxy.complete().status_code == 200
    at_p, at_d = (node.state()["body"]["kv_transfer_params"] for node in (prefill, decode))
    assert at_p["transfer_id"] == at_d["transfer_id"]
    assert at_d["remote_bootstrap_addr"] == f"http://127.0.0.1:{prefill.port}"
    assert at_d["remote_engine_id"] == f"engine-{prefill.port}"
    assert decode.state()["fetched_kv"] == 1


def test_models_come_from_a_node(up: Deployment) -> None:
    assert up.proxy.http.get("/v1/models").json()["data"][0]["id"] == "mock"


def test_healthcheck_counts_nodes(up: Deployment) -> None:
    answer = up.proxy.http.get("/healthcheck")
    assert answer.status_code == 200
    assert (answer.json()["prefill_instances"], answer.json()["decode_instances"]) == (2, 2)


def test_requests_go_round_when_all_nodes_are_equal(up: Deployment) -> None:
    before = [node.state()["requests"] for node in up.prefill]
    for _ in range(8):
        up.proxy.complete()
    assert all(node.state()["requests"] > count for node, count in zip(up.prefill, before, strict=True))


@pytest.mark.parametrize(
    ("body", "part"),
    [
        (b"{", "expected"),
        (b"[]", "expected"),
        (b"", "expected"),
        (b'{"prompt": "a", "max_tokens": nope}', "byte 30"),
        (b'{"prompt": "a"} and more', "nothing may follow"),
        (b'{"model": "mock"}', "'prompt' is missing"),
        (b'{"model": "mock", "prompt": ["a", "b"]}', "several prompts"),
        (b'{"model": "mock", "prompt": [[1], [2]]}', "several prompts"),
        (b'{"model": "mock", "prompt": "a", "n": 2}', "n = 2"),
    ],
)
def test_a_body_that_makes_no_sense_is_refused_with_an_error_object(up: Deployment, body: bytes, part: str) -> None:
    answer = up.proxy.http.post("/v1/completions", content=body)
    assert answer.status_code == 400
    assert part in answer.json()["error"]["message"]


def test_an_unknown_model_gets_the_nodes_own_answer_after_all_p_nodes_were_asked(up: Deployment) -> None:
    before = up.total("requests")
    answer = up.proxy.complete(model="other")
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
    assert "'other' does not exist" in answer.json()["error"]["message"]
    assert up.total("requests") == before + 2
    assert up.proxy.metric("isochunk_proxy_node_failures_total") == 0


def test_an_unknown_path_and_a_wrong_method_get_error_objects(up: Deployment) -> None:
    assert up.proxy.http.get("/nope").json()["error"]["code"] == 404
    assert up.proxy.http.get("/v1/completions").json()["error"]["code"] == 405


def test_a_million_token_prompt_passes_and_holds_nobody_up(start: Start) -> None:
    decode = start.node("decode")
    proxy = start.proxy([start.node("prefill")], [decode])
    ids = [100_000 + i % 50_000 for i in range(1_000_000)]
    body = json.dumps({"model": "mock", "prompt": ids, "max_tokens": 2, "stream": True}).encode()
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(proxy.http.post, "/v1/completions", content=body, timeout=60)
        short = [proxy.complete(prompt=f"short {i}") for i in range(5)]
        assert all(answer.status_code == 200 for answer in short)
        answer = long.result()
    expected = decode.http.post("/v1/completions", content=body, timeout=60)
    assert text(answer) == text(expected)


def test_a_50_mb_body_passes(start: Start) -> None:
    proxy = start.proxy([start.node("prefill")], [start.node("decode")])
    body = {"model": "mock", "prompt": "word " * 10_000_000, "max_tokens": 1}
    answer = proxy.http.post("/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200


def test_a_body_over_the_limit_is_refused(start: Start) -> None:
    proxy = start.proxy([start.node("prefill")], [start.node("decode")], "--max-body-mib", "1")
    answer = proxy.complete(prompt="x" * (1 << 20))
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, 413)
    assert proxy.complete().status_code == 200


def test_a_prompt_goes_where_its_prefix_is_cached(up: Deployment) -> None:
    shared = "a shared beginning that is long " * 1000
    counts = [node.state()["requests"] for node in up.prefill]
    for i in range(4):
        assert up.proxy.complete(prompt=f"{shared} {i}").status_code == 200
    grown = sorted(node.state()["requests"] - count for node, count in zip(up.prefill, counts, strict=True))
    assert grown == [0, 4]


def test_a_deadline_that_would_be_missed_is_refused_early(start: Start) -> None:
    prefill = start.node("prefill", "--coefficients", "0.01,1e-3,0,0")
    proxy = start.proxy([prefill], [start.node("decode")], "--deadline", "2")
    assert proxy.complete(prompt=[1] * 500).status_code == 200
    refused = proxy.complete(prompt=[1] * 5000)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) == 4
    assert "deadline of 2 s" in refused.json()["error"]["message"]
    assert prefill.state()["requests"] == 1


def test_the_key_is_asked_for_on_every_route_and_not_shown_to_nodes(start: Start) -> None:
    prefill, decode = start.node("prefill"), start.node("decode")
    proxy = start.proxy([prefill], [decode], "--api-key", "secret", "--node-api-key", "inner")
    routes = ("GET /metrics", "GET /v1/models", "GET /nope", "POST /v1/completions", "POST /instances/add")
    for method, path in (route.split() for route in routes):
        assert proxy.http.request(method, path).status_code == 401
        assert proxy.http.request(method, path, headers={"Authorization": "Bearer wrong"}).status_code == 401
    proxy.http.headers["Authorization"] = "Bearer secret"
    assert proxy.complete().status_code == 200
    assert prefill.state()["headers"]["authorization"] == decode.state()["headers"]["authorization"] == "Bearer inner"
    until(proxy.is_idle)


def test_without_a_key_the_admin_routes_are_off_and_the_clients_key_reaches_the_nodes(up: Deployment) -> None:
    assert up.proxy.http.post("/instances/add", json={}).status_code == 404
    body = {"model": "mock", "prompt": "x", "max_tokens": 1}
    answer = httpx.post(f"http://{up.proxy.name}/v1/completions", json=body, headers={"Authorization": "Bearer theirs"})
    assert answer.status_code == 200
    assert "Bearer theirs" in [node.state()["headers"].get("authorization") for node in up.decode]


def test_counters_return_to_zero_and_no_node_has_failed(up: Deployment) -> None:
    assert up.proxy.complete().status_code == 200
    until(up.proxy.is_idle)
    assert up.proxy.metric("isochunk_proxy_node_failures_total") == 0
