"""Right answers only: what D says is understood before it is handed on, and who knows an answer gives it."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from proxy_processes import Node, Proxy, Start, text, until

from isochunk.proxy.events import Cutter, Transcript, encoded, payload, split


def events(answer: httpx.Response) -> list[Any]:
    """All events, each of which must be whole."""
    assert answer.text.endswith("\n\n")
    data = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


def outcome(proxy: Proxy, name: str) -> float:
    return proxy.metric("isochunk_proxy_requests_total", outcome=name)


# Errors in a 200


def test_an_error_event_first_in_a_stream_is_tried_elsewhere(start: Start) -> None:
    prefill, ill, well = start.node("prefill"), start.node("decode"), start.node("decode")
    proxy = start.proxy([prefill], [ill, well])
    ill.set(error_event=0)
    assert all(text(proxy.complete(stream=True, prompt=f"{i}")) for i in range(6))
    assert ill.state()["requests"] > 0
    assert outcome(proxy, "ok") == 6


@pytest.mark.parametrize("code", [400, 500])
def test_an_error_event_from_all_nodes_is_an_error_and_never_ok(start: Start, code: int) -> None:
    decode = start.node("decode")
    proxy = start.proxy([start.node("prefill")], [decode])
    decode.set(error_event=0, error_code=code)
    answer = proxy.complete(stream=True)
    assert answer.status_code == code
    assert "as ordered" in answer.json()["error"]["message"]
    assert outcome(proxy, "ok") == 0
    until(proxy.is_idle)


def test_an_error_event_in_mid_stream_ends_it_and_is_never_ok(start: Start) -> None:
    decode = start.node("decode")
    proxy = start.proxy([start.node("prefill")], [decode])
    decode.set(error_event=2)
    answer = events(proxy.complete(stream=True, max_tokens=5))
    assert len(answer) == 3
    assert "as ordered" in answer[-1]["error"]["message"]
    assert (outcome(proxy, "ok"), outcome(proxy, "broken")) == (0, 1)


def test_half_an_event_is_never_passed_on(start: Start) -> None:
    decode = start.node("decode")
    proxy = start.proxy([start.node("prefill")], [decode])
    decode.set(half_event=3)
    answer = events(proxy.complete(stream=True, max_tokens=5))
    assert ["error" in event for event in answer] == [False, False, True]


def test_no_error_names_a_node(start: Start) -> None:
    prefill, decode = start.node("prefill"), start.node("decode")
    proxy = start.proxy([prefill], [decode], "--max-retries", "2")
    said = []
    for knobs in ({"status": 500}, {"empty": True}, {"status": 0, "empty": False, "cut_after": 1}):
        decode.set(**knobs)
        said.append(proxy.complete(stream=True).text)
    decode.kill()
    said += [proxy.complete().text, proxy.complete().text]
    assert all("error" in one for one in said)
    assert not any(str(node.port) in one or "127.0.0.1" in one for one in said for node in (prefill, decode))
    until(lambda: any("WARNING request " in line and decode.name in line for line in proxy.log))


# Given up in the middle


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("chat", [True, False])
def test_a_request_that_d_gives_up_is_continued_and_the_answer_is_the_whole_one(
    start: Start, stream: bool, chat: bool
) -> None:
    prefill, decode = start.node("prefill"), start.node("decode")
    proxy = start.proxy([prefill], [decode])
    body: dict[str, Any] = {"model": "mock", "stream": stream, "max_tokens": 6}
    body |= {"messages": [{"role": "user", "content": 'say "é"'}]} if chat else {"prompt": "say"}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    direct = proxy.http.post(path, json=body)
    decode.set(recompute_after=2)
    answer = proxy.http.post(path, json=body)
    assert said(answer, chat) == said(direct, chat) != ""
    assert "recomputed" not in answer.text
    assert usage(answer)["completion_tokens"] == usage(direct)["completion_tokens"] == 6
    assert prefill.state()["prefills"] == 3
    assert proxy.metric("isochunk_proxy_resubmitted_total") == 1
    if stream:
        assert answer.text.count("[DONE]") == 1
    until(proxy.is_idle)


def said(answer: httpx.Response, chat: bool) -> str:
    assert answer.status_code == 200, answer.text
    all_ = events(answer) if "event-stream" in answer.headers["content-type"] else [answer.json()]
    choices = [event["choices"][0] for event in all_ if event != "[DONE]" and event["choices"]]
    return "".join(((c.get("delta") or c.get("message"))["content"] if chat else c["text"]) for c in choices)


def usage(answer: httpx.Response) -> dict[str, Any]:
    all_ = events(answer) if "event-stream" in answer.headers["content-type"] else [answer.json()]
    return dict(next(event["usage"] for event in reversed(all_) if event != "[DONE]" and event.get("usage")))


# Counts


@pytest.mark.parametrize("stream", [True, False])
def test_the_prefix_hit_is_what_p_says(start: Start, stream: bool) -> None:
    prefill, decode = start.node("prefill"), start.node("decode")
    proxy = start.proxy([prefill], [decode])
    more = {"stream_options": {"include_usage": True}} if stream else {}
    body = {"prompt": [1] * 100, "stream": stream, **more}
    assert usage(proxy.complete(**body))["prompt_tokens_details"] == {"cached_tokens": 99}  # P does not say
    prefill.set(cached=32)
    assert usage(proxy.complete(**body))["prompt_tokens_details"] == {"cached_tokens": 32}


# Who answers


def roles(*nodes: Node) -> list[int]:
    return [node.state()["requests"] for node in nodes]


@pytest.mark.parametrize(
    "fields", [{"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}, {"echo": "true", "logprobs": 0, "stream": True}]
)
def test_what_only_p_knows_p_answers(start: Start, fields: dict[str, Any]) -> None:
    prefill, decode = start.node("prefill"), start.node("decode")
    proxy = start.proxy([prefill], [decode])
    answer = proxy.complete(max_tokens=4, **fields)
    assert text(answer).split()[-1].endswith("-3")
    assert roles(prefill, decode) == [1, 0]
    assert prefill.state()["body"]["max_tokens"] == 4
    assert proxy.complete(echo=True).status_code == 200
    assert roles(prefill, decode) == [2, 1]


def test_an_answer_of_p_alone_moves_to_another_p(start: Start) -> None:
    nodes = [start.node("prefill") for _ in range(2)]
    proxy = start.proxy(nodes, [start.node("decode")])
    nodes[0].set(status=500)
    assert all(proxy.complete(prompt_logprobs=1).status_code == 200 for _ in range(4))


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"max_tokens": "many"},
        {"min_tokens": 9, "max_tokens": 3},
        {"min_tokens": -1},
        {"stop": [""]},
        {"stop": 5},
        {"stop_token_ids": ["a"]},
        {"stream_options": {"include_usage": True}},
        {"stream": True, "prompt_logprobs": 1},
        {"stream": "perhaps"},
        {"ignore_eos": 7},
        {"n": 2},
        {"use_beam_search": True},
    ],
)
def test_what_d_would_refuse_is_refused_before_p_computes(up: tuple[Node, Proxy], fields: dict[str, Any]) -> None:
    prefill, proxy = up
    before = prefill.state()["requests"]
    answer = proxy.complete(**fields)
    assert answer.status_code == 400, answer.text
    assert next(iter(fields)) in answer.json()["error"]["message"] or len(fields) > 1
    assert prefill.state()["requests"] == before


@pytest.fixture(scope="module")
def up(start_once: Start) -> tuple[Node, Proxy]:
    prefill = start_once.node("prefill")
    return prefill, start_once.proxy([prefill], [start_once.node("decode")], "--max-retries", "1")


def test_what_is_longer_than_the_model_takes_is_refused_before_p_computes(start: Start) -> None:
    prefill = start.node("prefill")
    nodes = [start.node("decode", "--max-model-len", str(most)) for most in (60, 100)]
    proxy = start.proxy([prefill], nodes)
    for fields in ({"prompt": [1] * 90, "max_tokens": 11}, {"prompt": [1] * 101, "max_tokens": None},
                   {"prompt": "text", "max_tokens": 100}):  # fmt: skip
        answer = proxy.complete(**fields)
        assert answer.status_code == 400
        assert "the model's 100 tokens" in answer.json()["error"]["message"]
    assert prefill.state()["requests"] == 0
    assert proxy.complete(prompt=[1] * 90, max_tokens=10).status_code == 200


@pytest.mark.parametrize("stream", [1, "true", "True", 1.0])
def test_what_vllm_takes_for_true_streams(up: tuple[Node, Proxy], stream: Any) -> None:
    answer = up[1].complete(stream=stream)
    assert "event-stream" in answer.headers["content-type"]
    assert text(answer)


@pytest.mark.parametrize("fields", [{"n": "1"}, {"stop": "x"}, {"stream": 0}, {"max_tokens": 2.0}, {"min_tokens": 1}])
def test_what_vllm_accepts_is_accepted(up: tuple[Node, Proxy], fields: dict[str, Any]) -> None:
    assert up[1].complete(**fields).status_code == 200


def test_the_internal_rank_header_does_not_pass_and_the_trace_context_does(start: Start) -> None:
    prefill, decode = start.node("prefill"), start.node("decode")
    proxy = start.proxy([prefill], [decode])
    trace = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=b"}
    headers = {"X-Data-Parallel-Rank": "3", **trace}
    body = {"model": "mock", "prompt": "x", "max_tokens": 1}
    assert proxy.http.post("/v1/completions", json=body, headers=headers).status_code == 200
    for node in (prefill, decode):
        got = node.state()["headers"]
        assert "x-data-parallel-rank" not in got
        assert {name: got[name] for name in trace} == trace


def test_concurrent_requests_keep_their_kv_apart(start: Start) -> None:
    prefill, decode = start.node("prefill", "--delay", "0.05"), start.node("decode")
    proxy = start.proxy([prefill], [decode], "--max-retries", "1")
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda i: proxy.complete(prompt=f"{i}").status_code, range(64)))
    assert answers == [200] * 64
    state = decode.state()
    assert (state["fetched_kv"], state["local_prefills"]) == (64, 0)


# Events


@pytest.mark.parametrize("size", [1, 2, 7, 50, 1000])
@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_events_are_cut_out_whole_wherever_the_pieces_end(size: int, end: bytes) -> None:
    whole = b"".join(b'data: {"n": %d}' % i + end for i in range(9)) + b"data: [DONE]" + end
    cutter = Cutter()
    pieces = [cutter.feed(whole[at : at + size]) for at in range(0, len(whole), size)]
    assert b"".join(pieces) == whole
    assert all(piece.endswith(b"\n") for piece in pieces if piece)
    assert [payload(event) for event in split(whole)][:-1] == [{"n": i} for i in range(9)]


def test_a_transcript_is_the_text_of_an_answer() -> None:
    transcript = Transcript()
    words = [f'w{i} "é" ' * 50 for i in range(300)]
    for word in words:
        transcript.add(encoded({"choices": [{"delta": {"content": word}}]}))
    assert transcript.text() == "".join(words)
    assert (transcript.tokens, transcript.whole) == (300, True)
    transcript.add(encoded({"choices": [{"delta": {"tool_calls": [{}]}}]}))
    transcript.text()
    assert not transcript.whole
