"""One node of several fails in one way or another while 64 clients ask: they get right answers, computed about once."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import pytest
from proxy_processes import Proxy, Start, until

from isochunk.proxy import mock_answers
from isochunk.proxy.health import Budget, Health

CLIENTS = 64
REQUESTS = 640


async def ask(proxy: Proxy, prompts: Iterable[str], stream: bool = True) -> dict[str, str]:
    """The answer to each prompt, or what went wrong."""
    left = iter(prompts)
    said: dict[str, str] = {}
    url = f"http://{proxy.name}/v1/completions"

    async def client(session: aiohttp.ClientSession) -> None:
        for prompt in left:
            body = {"model": "mock", "prompt": prompt, "max_tokens": 3, "stream": stream}
            async with session.post(url, json=body) as response:
                said[prompt] = await read(response)

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(60)) as session:
        await asyncio.gather(*(client(session) for _ in range(CLIENTS)))
    return said


async def read(response: aiohttp.ClientResponse) -> str:
    text = (await response.read()).decode()
    if response.status != 200:
        return f"{response.status}: {text}"
    if "event-stream" not in response.headers["content-type"]:
        return str(json.loads(text)["choices"][0]["text"])
    events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    if events[-1] != "[DONE]":
        return f"broken: {text[-200:]}"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


def right(prompts: list[str]) -> dict[str, str]:
    return {prompt: "".join(mock_answers.words({"prompt": prompt, "max_tokens": 3})) for prompt in prompts}


def run(proxy: Proxy, requests: int = REQUESTS, stream: bool = True) -> float:
    """The part of the answers that were right."""
    prompts = [f"prompt {i}" for i in range(requests)]
    said = asyncio.run(ask(proxy, prompts, stream))
    expected = right(prompts)
    wrong = {prompt: said.get(prompt) for prompt in prompts if said.get(prompt) != expected[prompt]}
    for prompt, answer in list(wrong.items())[:5]:
        print(prompt, "->", answer)
    return 1 - len(wrong) / requests


FAULTS: list[dict[str, Any]] = [
    {"status": 404},
    {"status": 401},
    {"status": 429},
    {"status": 500},
    {"status": 503, "share": 0.6},
    {"status": 307},
    {"empty": True},
    {"hang": True},
]
DECODE_FAULTS = [*FAULTS, {"error_event": 0}, {"slow_s": 0.1}]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_failing_p_node_loses_its_traffic(start: Start, fault: dict[str, Any]) -> None:
    nodes = [start.node("prefill", "--delay", "0.02") for _ in range(2)]
    decode = start.node("decode")
    proxy = start.proxy(nodes, [decode], "--prefill-timeout", "1")
    nodes[0].set(**fault)
    assert run(proxy) >= 0.99
    prefills = sum(node.state()["prefills"] for node in nodes)
    assert prefills <= 1.1 * REQUESTS
    if fault.get("share", 1) == 1:
        assert nodes[0].state()["requests"] <= 0.25 * REQUESTS
    until(proxy.is_idle)


@pytest.mark.parametrize("fault", DECODE_FAULTS, ids=str)
def test_a_failing_d_node_loses_its_traffic_and_costs_few_prefills(start: Start, fault: dict[str, Any]) -> None:
    prefill = start.node("prefill", "--delay", "0.02")
    nodes = [start.node("decode") for _ in range(2)]
    proxy = start.proxy([prefill], nodes, "--first-token-timeout", "1")
    nodes[0].set(**fault)
    assert run(proxy) >= 0.99
    assert prefill.state()["prefills"] <= 1.1 * REQUESTS
    until(proxy.is_idle)


@pytest.mark.parametrize("knobs", [{"cut_after": 1}, {"stall_after": 1}, {"error_event": 1}], ids=str)
def test_a_d_node_whose_streams_break_off_loses_its_traffic_and_each_is_told(
    start: Start, knobs: dict[str, Any]
) -> None:
    prefill = start.node("prefill", "--delay", "0.02")
    nodes = [start.node("decode", "--interval", "0.01") for _ in range(2)]
    proxy = start.proxy([prefill], nodes, "--silence-timeout", "1")
    nodes[0].set(**knobs)
    prompts = [f"prompt {i}" for i in range(REQUESTS)]
    said = asyncio.run(ask(proxy, prompts))
    broken = [prompt for prompt in prompts if said[prompt] != right([prompt])[prompt]]
    # Those under way when the first one broke off can't be saved: a client has had a part of each answer.
    assert len(broken) <= CLIENTS / 2
    assert all(said[prompt].startswith("broken: ") and '"error"' in said[prompt] for prompt in broken)
    assert nodes[0].state()["requests"] <= CLIENTS / 2
    assert prefill.state()["prefills"] <= 1.1 * REQUESTS
    assert proxy.metric("isochunk_proxy_node_ejected", node=nodes[0].name) == 1
    until(proxy.is_idle)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_node_killed_or_stopped_in_the_middle_costs_what_it_had(start: Start, role: str, end: signal.Signals) -> None:
    nodes = {name: [start.node(name, "--delay", "0.02")] for name in ("prefill", "decode")}
    nodes[role].append(start.node(role, "--delay", "0.02"))
    waits = ("--prefill-timeout", "2", "--first-token-timeout", "2", "--silence-timeout", "2")
    proxy = start.proxy(nodes["prefill"], nodes["decode"], *waits)
    with ThreadPoolExecutor(1) as pool:
        part = pool.submit(run, proxy)
        until(lambda: nodes[role][0].state()["requests"] > 50)
        before = nodes["prefill"][0].state()["prefills"]  # at least so many: a dead one can't be asked
        nodes[role][0].signal(end)
        assert part.result() >= 0.99
    well = nodes["prefill"][1:] if role == "prefill" else nodes["prefill"]
    assert sum(node.state()["prefills"] for node in well) <= 1.1 * REQUESTS - (before if role == "prefill" else 0)


def test_three_bad_p_nodes_of_four_fail_nobody(start: Start) -> None:
    nodes = [start.node("prefill") for _ in range(4)]
    decode = start.node("decode")
    proxy = start.proxy(nodes, [decode])
    for node, fault in zip(nodes, ({"status": 404}, {"status": 500}, {"empty": True}), strict=False):
        node.set(**fault)
    assert run(proxy) >= 0.99


def test_a_request_that_kills_its_engine_is_not_carried_to_all_of_them(start: Start) -> None:
    nodes = [start.node("prefill") for _ in range(4)]
    proxy = start.proxy(nodes, [start.node("decode")], "--max-retries", "10")
    for node in nodes:
        node.set(die_on="deadly")
    answer = proxy.complete(prompt="deadly")
    assert answer.status_code == 502
    until(lambda: sum(node.popen.poll() is not None for node in nodes) == 2)
    assert proxy.complete().status_code == 200


def test_a_node_that_is_well_again_gets_its_traffic_back(start: Start) -> None:
    nodes = [start.node("prefill") for _ in range(2)]
    decode = start.node("decode")
    proxy = start.proxy(nodes, [decode])
    nodes[0].set(status=500)
    assert all(proxy.complete(prompt=f"{i}").status_code == 200 for i in range(8))
    assert proxy.metric("isochunk_proxy_node_ejected", node=nodes[0].name) == 1
    until(lambda: any("left out" in line for line in proxy.log))
    nodes[0].set(status=0)
    until(lambda: proxy.complete().status_code == 200 and nodes[0].state()["prefills"] > 0)
    assert proxy.metric("isochunk_proxy_node_ejected") == 0


def test_the_last_node_is_never_left_out(start: Start) -> None:
    prefill = start.node("prefill")
    proxy = start.proxy([prefill], [start.node("decode")])
    prefill.set(status=500)
    assert [proxy.complete().status_code for _ in range(5)] == [502] * 5
    prefill.set(status=0)
    assert proxy.complete().status_code == 200


def test_clients_that_name_wrong_models_use_up_nobodys_tries(start: Start) -> None:
    nodes = [start.node("prefill") for _ in range(2)]
    proxy = start.proxy(nodes, [start.node("decode")])
    assert {proxy.complete(model="none").status_code for _ in range(400)} == {404}
    nodes[0].set(status=500)
    assert [proxy.complete(prompt=f"{i}").status_code for i in range(4)] == [200] * 4
    assert proxy.metric("isochunk_proxy_node_ejected", node=nodes[1].name) == 0


# The breaker and the budget


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_ejections_grow_and_end_with_one_good_trial() -> None:
    clock = Clock()
    health = Health(clock)
    waits = []
    for _ in range(8):
        while not health.ejected or clock.now == 1000.0:
            health.failed()
            if health.ejected:
                break
        before = clock.now
        while not health.takes:
            clock.now += 1
        waits.append(clock.now - before)
        with health.attempt():
            assert not health.takes  # one trial at a time
            health.failed()
    assert waits == [5, 10, 20, 40, 80, 160, 300, 300]
    clock.now += 300
    with health.attempt():
        health.well()
    assert (health.ejected, health.takes, health.proved) == (False, True, True)


def test_failures_of_before_an_ejection_do_not_lengthen_it() -> None:
    clock = Clock()
    health = Health(clock)
    for _ in range(50):
        health.failed()
    clock.now += 5
    assert health.takes
    assert health.ejections == 1


def test_a_node_that_fails_half_of_the_time_is_left_out() -> None:
    health = Health(Clock())
    for _ in range(10):
        health.well()
        health.failed()
    assert health.ejected


def test_a_node_whose_answers_break_off_is_proved_by_a_whole_one_only() -> None:
    clock = Clock()
    health = Health(clock)
    health.began()
    assert health.proved
    for _ in range(3):
        health.began()
        health.failed(midway=True)
    assert health.ejected
    clock.now += 5
    health.began()
    assert (health.ejected, health.proved) == (True, False)
    health.well()
    assert (health.ejected, health.proved) == (False, True)
    health.failed()
    health.began()
    assert health.proved


def test_a_node_that_fails_now_and_then_is_not() -> None:
    health = Health(Clock())
    for _ in range(100):
        for _ in range(4):
            health.well()
        health.failed()
    assert not health.ejected


def test_tries_are_a_part_of_the_requests_in_the_long_run() -> None:
    clock = Clock()
    budget = Budget(clock)
    tries = 0
    for _ in range(10_000):
        budget.earn()
        tries += budget.spend()
    assert 2000 < tries < 2500
    clock.now += 1000
    assert sum(budget.spend() for _ in range(1000)) in (255, 256)
