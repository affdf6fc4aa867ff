"""A real vLLM with real weights on two pipeline stages: what virtual ones can't tell, its logits and its text."""

import os
import random
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: these tests start a real server")

from benchmarks.models import ENVIRON, isochunk_options, options
from isochunk.cli.demo_model import demo_model
from isochunk.deployment.server import running_server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LONGEST = 1300


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two pipeline stages need two cores")
    folder = tmp_path_factory.mktemp("model")
    chosen = [
        *options("smollm2", LONGEST, max_tokens=LONGEST),
        *("--dtype", "float32", "--enforce-eager"),
        *isochunk_options(profile=str(folder / "profile.json")),  # no profile of the user's is read or written
    ]
    with (
        running_server(demo_model(), chosen, log=folder / "server.log", environ=ENVIRON) as url,
        httpx.Client(base_url=url, timeout=300) as client,
    ):
        yield client


def test_a_real_question_is_answered(server: httpx.Client) -> None:
    message = {"role": "user", "content": "What is the capital of France?"}
    body = {"model": "smollm2", "messages": [message], "max_tokens": 16, "temperature": 0}
    answer = server.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert "Paris" in answer


def complete(server: httpx.Client, tokens: list[int], **options: Any) -> dict[str, Any]:
    body = {"model": "smollm2", "prompt": tokens, "temperature": 0, **options}
    response = server.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def difference(left: dict[str, float], right: dict[str, float]) -> float:
    return max(abs(left[token] - right[token]) for token in left.keys() & right.keys())


def test_logits_and_text_agree_with_vllms_own_chunks(server: httpx.Client) -> None:
    own, ours = [], []
    for seed in range(3):
        tokens = random.Random(100 + seed).choices(range(100, 40_000), k=LONGEST - 100)
        logits, texts = [], []
        for policy, chunk in (("optimal", None), ("fixed", 128), ("fixed", 400), ("fixed", LONGEST)):
            body = {"policy": policy, "chunk": chunk}
            assert server.post("/isochunk/policy", json=body).status_code == 200
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
