"""Real P and D nodes with a real KV connector, and the proxy in front."""

import asyncio
import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, get_args

import httpx
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: these tests start real servers")

from benchmarks.models import isochunk_options
from isochunk.bench.calibrate import Calibration, calibrate
from isochunk.bench.client import Server
from isochunk.bench.handover import Deployment, hand_over, prompt_tokens, verdict
from isochunk.cli.chat import ask
from isochunk.cli.demo_model import MODEL_NAME, QUESTION, demo_model
from isochunk.cli.demo_pd import deployment
from isochunk.core.errors import ConfigError
from isochunk.deployment.pd_nodes import Connector, need_connector

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=get_args(Connector))
def nodes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two pipeline stages need two cores")
    try:
        connector = need_connector(request.param)
    except ConfigError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp(connector)
    own = isochunk_options(profile=str(folder / "profile.json"))  # no profile of the user's is read or written
    with deployment(demo_model(), connector, logs=folder, say=print, prefill_options=own) as where:
        yield where


def completion(url: str, prompt: list[int], **options: Any) -> httpx.Response:
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **options}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=300)


def fresh(count: int) -> list[int]:
    return random.choices(range(100, 40_000), k=count)


def test_a_chat_through_the_proxy_streams_a_single_nodes_answer(nodes: Deployment) -> None:
    pieces: list[str] = []
    answer = ask(nodes.proxy, MODEL_NAME, QUESTION, piece=pieces.append)
    assert "Paris" in answer
    assert len([piece for piece in pieces if piece]) > 3
    assert answer == ask(nodes.prefill, MODEL_NAME, QUESTION, salt="alone")


def test_the_decode_node_computes_no_prompt_whether_it_is_cut_or_not(nodes: Deployment) -> None:
    handovers = hand_over(nodes, [50, 3000], seed=1, say=print)
    assert verdict(handovers) == []
    assert [each.received >= each.tokens - 1 for each in handovers] == [True, True]
    assert len(handovers[1].chunks) > 1


def test_many_at_once_each_get_their_own_answer(nodes: Deployment) -> None:
    from concurrent.futures import ThreadPoolExecutor

    prompts = [fresh(100 + 90 * at) for at in range(6)]
    before = prompt_tokens(nodes.decode)["local_compute"]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: completion(nodes.proxy, prompt), prompts))
    alone = [completion(nodes.prefill, prompt, cache_salt="alone") for prompt in prompts]
    assert [a.json()["choices"][0]["text"] for a in answers] == [a.json()["choices"][0]["text"] for a in alone]
    assert prompt_tokens(nodes.decode)["local_compute"] - before <= len(prompts)


@pytest.mark.parametrize("through_the_proxy", [False, True])
def test_the_prefill_node_is_calibrated_directly_and_through_the_proxy(
    nodes: Deployment, through_the_proxy: bool
) -> None:
    async def run() -> Calibration:
        async with Server(nodes.prefill) as node, Server(nodes.proxy) as proxy:
            front = proxy if through_the_proxy else None
            return await calibrate(node, tokens=2000, requests=2, seed=random.randrange(1 << 30), front=front)

    result = asyncio.run(run())
    assert len(result.clean) == 2
    assert all(turn.record["tokens"] == 2000 and turn.record["predicted_ttft_s"] for turn in result.turns)


def test_a_wrong_request_is_refused_by_the_nodes_and_serving_goes_on(nodes: Deployment) -> None:
    assert completion(nodes.proxy, fresh(9000)).status_code == 400
    assert completion(nodes.proxy, fresh(40)).status_code == 200


def test_a_client_that_goes_away_frees_both_nodes(nodes: Deployment) -> None:
    before = [gauge(url, "kv_cache_usage_perc") for url in (nodes.prefill, nodes.decode)]
    body = {"model": MODEL_NAME, "prompt": fresh(4000), "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{nodes.proxy}/v1/completions", json=body, timeout=300) as response:
        next(response.iter_lines())
        until(lambda: gauge(nodes.decode, "num_requests_running") == 1)  # vLLM counts after it has answered
    assert completion(nodes.proxy, fresh(40)).status_code == 200
    for url, used in zip((nodes.prefill, nodes.decode), before, strict=True):
        until(lambda url=url: gauge(url, "num_requests_running") == 0)
        until(lambda url=url, used=used: gauge(url, "kv_cache_usage_perc") <= used)


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def gauge(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    (value,) = [line.rsplit(" ", 1)[1] for line in lines if line.startswith(f"vllm:{name}{{")]
    return float(value)
