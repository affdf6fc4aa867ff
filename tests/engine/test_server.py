"""A real vLLM server with real weights, two pipeline stages and isochunk, through its HTTP routes."""

import asyncio
import os
import random
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: these tests start a real server")

from benchmarks.models import ENVIRON, isochunk_options, options
from isochunk import CostModel, plan
from isochunk.cli.demo_model import demo_model
from isochunk.deployment.server import running_server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

KEY = "secret"
LONGEST = 3000
LIMIT = 2048


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("engine")
    # Profiles of this run only; the converted model may be reused.
    chosen = [
        *options("smollm2", LONGEST, max_tokens=LIMIT),
        *("--dtype", "float32", "--enforce-eager", "--api-key", KEY),
        *isochunk_options(profile=str(folder / "profile.json")),
    ]
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two pipeline stages need two cores")
    with (
        running_server(demo_model(), chosen, log=folder / "server.log", environ=ENVIRON) as url,
        httpx.Client(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=300) as client,
    ):
        yield client


def prompt(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(100, 40_000), k=count)


def complete(server: httpx.Client, tokens: Any, **options: Any) -> dict[str, Any]:
    body = {"model": "smollm2", "prompt": tokens, "max_tokens": 1, "temperature": 0, **options}
    response = server.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def status(server: httpx.Client) -> dict[str, Any]:
    response = server.get("/isochunk/status")
    assert response.status_code == 200, response.text
    return dict(response.json())


def use(server: httpx.Client, policy: str, chunk: int | None = None) -> httpx.Response:
    return server.post("/isochunk/policy", json={"policy": policy, "chunk": chunk})


@pytest.fixture(autouse=True)
def optimal_again(server: httpx.Client) -> Iterator[None]:
    yield
    assert use(server, "optimal").status_code == 200


def test_the_probe_learnt_a_model_within_its_bounds(server: httpx.Client) -> None:
    told = status(server)
    assert told["policy"] == "optimal"
    assert CostModel(**told["model"]).c0 > 0
    assert told["probe"]["steps"] <= 65
    assert told["probe"]["tokens"] <= 3 * (LONGEST + 256)
    assert Path(told["profile"]).exists()
    assert told["counters"]["fallbacks"] == 0


def test_a_real_question_is_answered(server: httpx.Client) -> None:
    message = {"role": "user", "content": "What is the capital of France?"}
    body = {"model": "smollm2", "messages": [message], "max_tokens": 16, "temperature": 0}
    answer = server.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert "Paris" in answer


def test_the_engine_takes_the_chunks_that_the_plan_names(server: httpx.Client) -> None:
    before = status(server)
    complete(server, prompt(LONGEST, 1))
    last = status(server)["prompts"][-1]
    planned = plan(CostModel(**before["model"]), LONGEST, 2, max_chunk=LIMIT, block=before["alignment"])
    assert tuple(last["chunks"]) == planned.chunks
    assert len(last["chunks"]) > 2
    assert last["predicted_ttft_s"] == pytest.approx(planned.ttft_s)


def test_policies_switch_at_run_time(server: httpx.Client) -> None:
    assert use(server, "fixed", 700).json() == {"policy": "fixed", "chunk": 700}
    complete(server, prompt(2000, 2))
    assert status(server)["prompts"][-1]["chunks"] == [700, 700, 600]
    assert use(server, "fixed").status_code == 200
    complete(server, prompt(2500, 3))
    assert status(server)["prompts"][-1]["chunks"] == [LIMIT, 2500 - LIMIT]
    assert use(server, "first_chunk", 512).status_code == 200
    complete(server, prompt(2500, 4))
    first, second, *_ = status(server)["prompts"][-1]["chunks"]
    assert first == 512 > second


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"policy": "best"}, "policy"),
        ({"policy": "fixed", "chunk": 0}, "chunk"),
        ({"policy": "fixed", "chunk": LIMIT + 1}, "max_num_batched_tokens"),
        ({"policy": "fixed", "chunk": "512"}, "chunk"),
        ({"policy": "fixed", "size": 512}, "size"),
        ({}, "policy"),
        ("{", "JSON"),
    ],
)
def test_a_wrong_policy_is_refused_and_changes_nothing(server: httpx.Client, body: Any, named: str) -> None:
    sent = {"content": body} if isinstance(body, str) else {"json": body}
    response = server.post("/isochunk/policy", **sent)
    assert response.status_code == 400
    assert named in response.json()["error"]
    assert status(server)["policy"] == "optimal"


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer wrong"}])
def test_both_routes_ask_for_the_servers_key(server: httpx.Client, header: dict[str, str]) -> None:
    for method, path in (("GET", "/isochunk/status"), ("POST", "/isochunk/policy")):
        response = httpx.request(method, f"{server.base_url}{path}", headers=header, json={"policy": "fixed"})
        assert response.status_code == 401
    assert status(server)["policy"] == "optimal"


def test_a_prompt_over_the_limit_is_refused_and_serving_goes_on(server: httpx.Client) -> None:
    body = {"model": "smollm2", "prompt": prompt(9000, 5), "max_tokens": 1}
    assert server.post("/v1/completions", json=body).status_code == 400
    complete(server, prompt(100, 6))


def test_a_prefix_hit_is_planned_as_history(server: httpx.Client) -> None:
    shared = prompt(1536, 7)
    complete(server, shared)
    answer = complete(server, [*shared, *prompt(1000, 8)])
    last = status(server)["prompts"][-1]
    assert last["cached"] == answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 1000
    assert sum(last["chunks"]) == 2536 - last["cached"]


def difference(left: dict[str, float], right: dict[str, float]) -> float:
    return max(abs(left[token] - right[token]) for token in left.keys() & right.keys())


def test_logits_and_text_agree_with_vllms_own_chunks(server: httpx.Client) -> None:
    own, ours = [], []
    for seed in range(3):
        tokens = prompt(1800, 100 + seed)
        logits, texts = [], []
        for policy, chunk in (("optimal", None), ("fixed", 128), ("fixed", 512), ("fixed", 1024), ("fixed", 1800)):
            use(server, policy, chunk)
            # The salt keeps each arm from finding the other's cache.
            salt = {"cache_salt": f"{policy}{chunk}{seed}"}
            choice = complete(server, tokens, max_tokens=12, logprobs=5, **salt)["choices"][0]
            logits.append(choice["logprobs"]["top_logprobs"][0])
            texts.append(choice["text"])
        optimal, *fixed = logits
        own += [difference(one, other) for one, other in combinations(fixed, 2)]
        ours += [difference(optimal, other) for other in fixed]
        assert len(set(texts)) == 1
    # Rounding: how far two of vLLM's own sizes may be apart is known from a few draws only, hence the 2.
    assert max(ours) <= 2 * max(own)


def test_many_at_once_all_come_back(server: httpx.Client) -> None:
    async def go() -> list[int]:
        async with httpx.AsyncClient(base_url=server.base_url, headers=server.headers, timeout=300) as client:
            bodies = [
                {"model": "smollm2", "prompt": prompt(50 + 60 * at, 200 + at), "max_tokens": 4, "ignore_eos": True}
                for at in range(16)
            ]
            answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
            return [answer.json()["usage"]["completion_tokens"] for answer in answers]

    assert asyncio.run(go()) == [4] * 16
    told = status(server)
    assert told["queue"] == {"running": 0, "waiting": 0}
    assert told["counters"]["fallbacks"] == 0
