"""vLLM's own server on two virtual stages with isochunk, through its HTTP routes."""

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: these tests start a real server")

from benchmarks.models import isochunk_options
from isochunk import CostModel, plan
from isochunk.cli.rehearsed import MODEL_NAME, running_rehearsal
from isochunk.vllm.virtual.rehearsal import Rehearsal

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

KEY = "secret"
LONGEST = 3000
LIMIT = 2048
MODEL = CostModel(c0=0.0059, c1=18e-6, c2=20e-9, c3=0.56e-6)  # of a tiny Qwen3 on two cores


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("engine")
    costs = folder / "costs.json"
    costs.write_text(json.dumps(MODEL.as_dict()))
    chosen = [
        *("--max-num-batched-tokens", str(LIMIT), "--max-model-len", str(LONGEST + 256)),
        *("--enable-prompt-tokens-details", "--api-key", KEY),
        *isochunk_options(profile=str(folder / "profile.json")),
    ]
    with (
        running_rehearsal(Rehearsal(profile=str(costs)), chosen, stages=2, log=folder / "server.log") as url,
        httpx.Client(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=300) as client,
    ):
        yield client


def prompt(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(100, 40_000), k=count)


def complete(server: httpx.Client, tokens: Any, **options: Any) -> dict[str, Any]:
    body = {"model": MODEL_NAME, "prompt": tokens, "max_tokens": 1, "temperature": 0, **options}
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
    assert told["probe"]["seconds"] <= 120
    assert Path(told["profile"]).exists()
    assert told["counters"]["fallbacks"] == 0


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
    body = {"model": MODEL_NAME, "prompt": prompt(9000, 5), "max_tokens": 1}
    assert server.post("/v1/completions", json=body).status_code == 400
    complete(server, prompt(100, 6))


def test_a_prefix_hit_is_planned_as_history(server: httpx.Client) -> None:
    shared = prompt(1536, 7)
    complete(server, shared)
    answer = complete(server, [*shared, *prompt(1000, 8)])
    last = status(server)["prompts"][-1]
    assert last["cached"] == answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 1000
    assert sum(last["chunks"]) == 2536 - last["cached"]


def test_many_at_once_all_come_back(server: httpx.Client) -> None:
    async def go() -> list[int]:
        async with httpx.AsyncClient(base_url=server.base_url, headers=server.headers, timeout=300) as client:
            bodies = [
                {"model": MODEL_NAME, "prompt": prompt(50 + 60 * at, 200 + at), "max_tokens": 4, "ignore_eos": True}
                for at in range(16)
            ]
            answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
            return [answer.json()["usage"]["completion_tokens"] for answer in answers]

    assert asyncio.run(go()) == [4] * 16
    told = status(server)
    assert told["queue"] == {"running": 0, "waiting": 0}
    assert told["counters"]["fallbacks"] == 0
