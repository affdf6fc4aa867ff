"""What a server lives through beside serving: pauses, sleep, changed weights; with context parallelism."""

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: these tests start real servers")

from isochunk.cli.rehearsed import MODEL_NAME, running_rehearsal
from isochunk.core.errors import ConfigError
from isochunk.vllm.virtual.rehearsal import Rehearsal

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

KIMI = "kimi-k2.5-mxfp4@mi355x/pp4tp1"
OPTIONS = ["--max-num-batched-tokens", "8192", "--max-model-len", "30000"]
TOKENS = 25_000


@contextmanager
def server(folder: Path, *options: str, speed: float = 20) -> Iterator[httpx.Client]:
    environ = {"ISOCHUNK_CACHE": str(folder), "VLLM_SERVER_DEV_MODE": "1"}
    rehearsal = Rehearsal(profile=KIMI, speed=speed)
    with (
        running_rehearsal(rehearsal, [*OPTIONS, *options], stages=4, log=folder / "log", environ=environ) as url,
        httpx.Client(base_url=url, timeout=300) as client,
    ):
        yield client


def complete(client: httpx.Client) -> dict[str, Any]:
    prompt = random.choices(range(100, 40_000), k=TOKENS)
    response = client.post("/v1/completions", json={"model": MODEL_NAME, "prompt": prompt, "max_tokens": 1})
    assert response.status_code == 200, response.text
    return dict(response.json()["choices"][0])


def status(client: httpx.Client) -> dict[str, Any]:
    return dict(client.get("/isochunk/status").json())


def interrupted(client: httpx.Client, begin: str, end: str) -> str:
    """How a prompt ends that is interrupted while its steps are in the pipeline."""
    reasons: list[str] = []
    asking = threading.Thread(target=lambda: reasons.append(complete(client)["finish_reason"]))
    asking.start()
    while not status(client)["in_flight"]:
        time.sleep(0.01)
    assert client.post(begin).status_code == 200
    while status(client)["in_flight"]:
        time.sleep(0.01)
    assert client.post(end).status_code == 200
    asking.join()
    return reasons[0]


def test_pauses_sleep_and_refusals_leave_plans_and_model_as_they_are(tmp_path: Path) -> None:
    with server(tmp_path, "--prefill-context-parallel-size", "2", speed=1) as client:
        complete(client)
        plan = status(client)["prompts"][-1]["chunks"]
        for begin, end in (
            ("/sleep?level=0&mode=keep", "/wake_up?tags=scheduling"),
            ("/pause?mode=keep", "/resume"),
            ("/pause?mode=wait", "/resume"),
        ):
            assert interrupted(client, begin, end) == "length", begin
            assert sum(status(client)["prompts"][-1]["chunks"]) == TOKENS
        assert interrupted(client, "/pause?mode=abort", "/resume") in ("abort", "length")
        refused = client.post("/update_weights", json={"update_info": {}})
        assert refused.status_code == 500
        assert "needs a real worker" in refused.text
        complete(client)
        told = status(client)
        assert told["prompts"][-1]["chunks"] == plan
        assert told["counters"]["fallbacks"] == told["counters"]["harmful"] == 0
        assert told["health"]["ok"]


def test_data_parallel_engines_are_refused_by_a_rehearsal(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--data-parallel-size"), server(tmp_path, "--data-parallel-size", "2"):
        pass
