"""Answers that one of several D nodes keeps."""

from __future__ import annotations

import httpx
from proxy_processes import Start


def test_a_kept_answer_is_found_on_the_node_that_keeps_it_and_blames_no_other(start: Start) -> None:
    nodes = [start.node("decode") for _ in range(3)]
    proxy = start.proxy([start.node("prefill")], nodes)
    for node in nodes:
        for _ in range(4):
            path = f"/v1/responses/resp_{node.port}"
            assert proxy.http.get(path).json() == {"id": f"resp_{node.port}", "method": "GET"}
            assert proxy.http.post(f"{path}/cancel").json()["method"] == "POST"
    assert proxy.metric("isochunk_proxy_node_ejected") == 0
    unknown = proxy.http.get("/v1/responses/resp_none")
    assert unknown.status_code == 404
    assert "no node keeps" in unknown.json()["error"]["message"]
    assert proxy.http.delete(f"/v1/responses/resp_{nodes[0].port}").status_code == 405
    assert proxy.http.get(f"/v1/responses/resp_{nodes[0].port}?stream=true").status_code == 400
    for odd in ("/v1/responses/a/b", "/v1/responses/..%2Fhealth", "/v1/responses/"):
        assert proxy.http.get(odd).status_code == 404


def test_while_a_node_does_not_say_an_answer_is_not_called_unknown(start: Start) -> None:
    nodes = [start.node("decode") for _ in range(2)]
    proxy = start.proxy([start.node("prefill")], nodes)
    nodes[0].set(status=500)
    assert proxy.http.get(f"/v1/responses/resp_{nodes[1].port}").status_code == 200
    answer = proxy.http.get(f"/v1/responses/resp_{nodes[0].port}")
    assert answer.status_code == 503
    assert str(nodes[0].port) not in answer.text
    nodes[0].kill()
    assert proxy.http.get(f"/v1/responses/resp_{nodes[0].port}").status_code == 503


def test_an_answer_is_continued_on_the_node_that_keeps_it_and_blames_no_other(start: Start) -> None:
    nodes = [start.node("decode") for _ in range(3)]
    proxy = start.proxy([start.node("prefill")], nodes)

    def ask(before: str, **more: object) -> httpx.Response:
        return proxy.http.post("/v1/responses", json={"previous_response_id": before, "input": "and?", **more})

    for _ in range(8):
        for node in nodes:
            assert ask(f"resp_{node.port}").json()["body"]["previous_response_id"] == f"resp_{node.port}"
    assert ask(f"resp_{nodes[2].port}", stream=True).text.count("event: ") == 3
    assert proxy.metric("isochunk_proxy_node_failures_total") == 0
    assert proxy.metric("isochunk_proxy_node_ejected") == 0
    assert ask("resp_none").status_code == 404
    nodes[1].kill()
    for _ in range(4):  # it may have been the one that keeps it
        assert ask("resp_none").status_code == 503
    assert ask(f"resp_{nodes[0].port}").status_code == 200


def test_a_redirect_of_a_node_is_its_failure_and_never_reaches_the_client(start: Start) -> None:
    nodes = [start.node("prefill") for _ in range(2)]
    decode = [start.node("decode") for _ in range(2)]
    proxy = start.proxy(nodes, decode)
    nodes[0].set(status=307)
    assert [proxy.complete(prompt=f"{i}").status_code for i in range(6)] == [200] * 6
    decode[0].set(status=301)
    assert [proxy.complete(prompt=f"{i}").status_code for i in range(6)] == [200] * 6
    nodes[1].set(status=307)
    answer = proxy.complete(prompt="both")
    assert answer.status_code == 502
    assert "location" not in answer.headers
