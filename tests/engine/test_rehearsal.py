"""vLLM's own server on virtual stages: asynchronous scheduling, decodes, hits, trouble, and the proxy in front."""

import asyncio
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: these tests start real servers")

from isochunk import CostModel, plan
from isochunk.cli.rehearsed import MODEL_NAME, running_rehearsal
from isochunk.cli.rehearsed_nodes import running_nodes
from isochunk.core.errors import ConfigError
from isochunk.vllm.virtual.rehearsal import Rehearsal

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

KIMI = "kimi-k2.5-mxfp4@mi355x/pp4tp1"
STAGES = 4
LIMIT = 8192
LONGEST = 30_000
OPTIONS = ["--max-num-batched-tokens", str(LIMIT), "--max-model-len", str(LONGEST), "--enable-prompt-tokens-details"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("rehearsal")
    rehearsal = Rehearsal(profile=KIMI, speed=20, kv_tokens=LONGEST, hand_over=0.002, back=0.002)
    cache = {"ISOCHUNK_CACHE": str(folder)}
    with (
        running_rehearsal(rehearsal, OPTIONS, stages=STAGES, log=folder / "log", environ=cache) as url,
        httpx.Client(base_url=url, timeout=300) as client,
    ):
        yield client


def prompt(count: int) -> list[int]:
    return random.choices(range(100, 40_000), k=count)


def complete(server: httpx.Client, tokens: Any, **options: Any) -> dict[str, Any]:
    body = {"model": MODEL_NAME, "prompt": tokens, "max_tokens": 1, **options}
    response = server.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def status(server: httpx.Client) -> dict[str, Any]:
    return dict(server.get("/isochunk/status").json())


def trouble(server: httpx.Client, **data: Any) -> httpx.Response:
    return server.post("/isochunk/rehearsal", json=data)


def test_the_server_plans_for_its_virtual_stages(server: httpx.Client) -> None:
    told = status(server)
    assert told["stages"] == STAGES
    assert told["alignment"] == 16
    model = CostModel.of(told["model"])
    tokens = prompt(LONGEST - 100)
    complete(server, tokens)
    last = status(server)["prompts"][-1]
    assert tuple(last["chunks"]) == plan(model, len(tokens), STAGES, max_chunk=LIMIT, block=16).chunks
    assert len(last["chunks"]) > 2


def test_one_more_step_than_stages_is_in_flight(server: httpx.Client) -> None:
    log = server.get("/isochunk/rehearsal").json()
    assert log["stages"] == STAGES
    # A stage that stands still lets steps in until vLLM has as many out as it takes.
    assert trouble(server, kind="stop", stage=0).status_code == 200
    before = server.get("/isochunk/rehearsal").json()["entered"]
    server.post("/isochunk/policy", json={"policy": "fixed", "chunk": 512})

    async def go() -> int:
        async with httpx.AsyncClient(base_url=server.base_url, timeout=300) as client:
            body = {"model": MODEL_NAME, "prompt": prompt(20_000), "max_tokens": 1}
            answer = asyncio.create_task(client.post("/v1/completions", json=body))
            entered = before
            while entered - before < STAGES + 1:
                entered = (await client.get("/isochunk/rehearsal")).json()["entered"]
                await asyncio.sleep(0.05)
            assert not answer.done()
            assert (await client.post("/isochunk/rehearsal", json={"kind": "resume"})).status_code == 200
            assert (await answer).status_code == 200
            return int(entered - before)

    try:
        assert asyncio.run(go()) == STAGES + 1
    finally:
        trouble(server, kind="resume")
        server.post("/isochunk/policy", json={"policy": "optimal"})


def test_answers_are_words_and_decodes_are_vllms_own(server: httpx.Client) -> None:
    answer = complete(server, "What is a rehearsal?", max_tokens=12)
    assert answer["choices"][0]["text"] == " one two three four five six seven eight nine ten eleven twelve"
    assert answer["usage"]["completion_tokens"] == 12
    message = {"role": "user", "content": "Count."}
    body = {"model": MODEL_NAME, "messages": [message], "max_tokens": 3, "logprobs": True}
    choice = server.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert choice["message"]["content"] == " one two three"
    assert [token["logprob"] for token in choice["logprobs"]["content"]] == [0.0] * 3


def test_structured_answers_keep_their_grammar(server: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    limits = {"structured_outputs": {"json": schema}, "max_tokens": 60}
    text = complete(server, "Yes?", **limits)["choices"][0]["text"]
    assert set(json.loads(text)) == {"a"}


def test_prefix_hits_are_vllms_own(server: httpx.Client) -> None:
    tokens = prompt(8000)
    complete(server, tokens)
    answer = complete(server, [*tokens, *prompt(1000)])
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 8000
    assert status(server)["prompts"][-1]["cached"] == 8000


def test_many_at_once_all_come_back_though_the_cache_is_too_small_for_them(server: httpx.Client) -> None:
    async def go() -> list[int]:
        async with httpx.AsyncClient(base_url=server.base_url, timeout=300) as client:
            bodies = [
                {"model": MODEL_NAME, "prompt": prompt(3000 + at), "max_tokens": 300, "ignore_eos": True}
                for at in range(16)
            ]
            answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
            return [answer.json()["usage"]["completion_tokens"] for answer in answers]

    assert asyncio.run(go()) == [300] * 16
    assert status(server)["counters"]["fallbacks"] == 0


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({"kind": "flood"}, "must be one of"),
        ({"kind": "stop", "stage": STAGES}, f"below {STAGES}"),
        ({"kind": "slow", "factor": "much"}, "must be a number"),
        ({}, "kind"),
    ],
)
def test_wrong_trouble_is_refused_and_named(server: httpx.Client, data: dict[str, Any], named: str) -> None:
    response = trouble(server, **data)
    assert response.status_code == 400
    assert named in response.json()["error"]
    complete(server, prompt(10))


def test_every_trouble_can_be_had_at_run_time(server: httpx.Client) -> None:
    for data in (
        {"kind": "noise", "sigma": 0.2, "tails": 0.1},
        {"kind": "cold", "steps": 2},
        {"kind": "tiles", "tokens": 256},
        {"kind": "graphs", "tokens": 64},
        {"kind": "slow", "factor": 1.5},
        {"kind": "stop", "stage": 1, "seconds": 2},
    ):
        assert trouble(server, **data).status_code == 200
    complete(server, prompt(3000))
    told = trouble(server, kind="resume").json()
    assert (told["noise"], told["tiles"], told["graphs"], told["cold_steps"]) == (None, 1, None, 0)
    assert told["rates"] == [1] * STAGES


def test_a_dead_worker_ends_the_server_as_a_real_one_does(server: httpx.Client) -> None:
    assert trouble(server, kind="die", stage=2).status_code == 200

    def until_it_is_gone() -> None:
        while server.get("/health").status_code in (200, 503):
            time.sleep(0.1)

    with pytest.raises(httpx.TransportError):
        until_it_is_gone()


def test_nodes_stand_behind_the_proxy_with_their_own_status(tmp_path: Path) -> None:
    rehearsal = Rehearsal(profile=KIMI, speed=20)
    options = ["--max-model-len", "20000", "--max-num-batched-tokens", str(LIMIT)]
    with (
        running_nodes(rehearsal, options, nodes=2, stages=2, logs=tmp_path) as where,
        httpx.Client(base_url=where.proxy, timeout=300) as client,
    ):
        for _ in range(4):
            body = {"model": MODEL_NAME, "prompt": prompt(9000), "max_tokens": 5}
            assert client.post("/v1/completions", json=body).status_code == 200
        served = [len(httpx.get(f"{url}/isochunk/status").json()["prompts"]) for url in where.prefill]
    assert sum(served) == 4
    assert all(served)


def test_a_rehearsal_that_cannot_be_ends_with_the_reason(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="--kv-tokens 100 is less than one prompt of --max-model-len"),
        running_rehearsal(Rehearsal(profile=KIMI, kv_tokens=100), stages=4, log=tmp_path / "log"),
    ):
        pass
