from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from isochunk.vllm.endpoint import OPEN, IsochunkEndpoint
from tests.vllm.live.statuses import status

MINE = "6f1e9c2a"
PROMPTS = [
    {"request_id": f"cmpl-{MINE}-0-0a1b2c3d", "tokens": 10},
    {"request_id": "cmpl-other-0-0a1b2c3d", "tokens": 20},
    {"request_id": f"{MINE}", "tokens": 30},
]


class Engine:
    """What the engine's process would answer."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.status: dict[str, Any] = {"prompts": PROMPTS, "policy": "optimal"}

    async def call_utility_async(self, method: str, *args: Any) -> dict[str, Any]:
        self.asked.append((method, *args))
        if method == "isochunk_status":
            return deepcopy(self.status)
        return {"policy": args[0], "chunk": args[1]}


def served(keys: list[str]) -> tuple[TestClient, Engine]:
    engine = Engine()
    app = FastAPI()
    IsochunkEndpoint().attach_router(app)
    app.state.args, app.state.engine_client = SimpleNamespace(api_key=keys), SimpleNamespace(engine_core=engine)
    return TestClient(app), engine


CHANGE = {"policy": "fixed", "chunk": 512}


@pytest.mark.parametrize(
    ("keys", "sent", "switch", "code"),
    [
        ([], {}, None, 403),
        ([], {}, "0", 403),
        ([], {}, "1", 200),
        (["right"], {}, "1", 401),
        (["right"], {"Authorization": "Bearer wrong"}, "1", 401),
        (["right"], {"Authorization": "Bearer right"}, None, 200),
    ],
)
def test_a_policy_is_changed_with_a_key_or_where_the_server_says_that_anybody_may(
    keys: list[str], sent: dict[str, str], switch: str | None, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(OPEN, raising=False) if switch is None else monkeypatch.setenv(OPEN, switch)
    client, engine = served(keys)
    answer = client.post("/isochunk/policy", json=CHANGE, headers=sent)
    assert answer.status_code == code
    assert engine.asked == ([("isochunk_policy", "fixed", 512)] if code == 200 else [])
    if code == 403:
        assert OPEN in answer.json()["detail"]


def test_ids_are_told_to_whoever_knows_them() -> None:
    client, _ = served([])
    told = [record["request_id"] for record in client.get("/isochunk/status").json()["prompts"]]
    assert told == [None, None, None]
    named = client.get("/isochunk/status", params={"request_id": MINE}).json()["prompts"]
    assert [record["request_id"] for record in named] == [PROMPTS[0]["request_id"], None, PROMPTS[2]["request_id"]]
    assert [record["tokens"] for record in named] == [10, 20, 30]
    for guess in ("cmpl", "6f1e", "other-0-0a", "cmpl-", ".*", ""):
        guessed = client.get("/isochunk/status", params={"request_id": guess}).json()["prompts"]
        assert [record["request_id"] for record in guessed] == [None, None, None], guess


@pytest.mark.parametrize("kind", ["cmpl-{}-0-0a1b2c3d", "chatcmpl-{}-0a1b2c3d", "{}"])
@pytest.mark.parametrize(
    ("said", "given"),
    [
        (MINE, f"{MINE}-4f0c92a1b7de-1"),  # what the client sent, and what the proxy made of it for its first try
        (MINE, f"{MINE}-4f0c92a1b7de-12"),
        (f"{MINE}-4f0c92a1b7de", f"{MINE}-4f0c92a1b7de-1"),  # what the proxy's answer said
        ("0" * 32, f"{'0' * 32}-1"),  # of a client that sent none
    ],
)
def test_a_client_of_the_proxy_is_told_its_id_by_the_prefill_node(kind: str, said: str, given: str) -> None:
    client, engine = served([])
    engine.status = {"prompts": [{"request_id": kind.format(given)}, {"request_id": kind.format(f"5-{given}")}]}
    named = client.get("/isochunk/status", params={"request_id": said}).json()["prompts"]
    assert [record["request_id"] for record in named] == [kind.format(given), None]


def test_the_page_is_told_no_ids_either() -> None:
    whole = status()
    for number, prompt in enumerate(whole["prompts"]):
        prompt["request_id"] = f"cmpl-{MINE}-{number}-0a1b2c3d"
    client, engine = served([])
    engine.status = whole
    assert MINE not in client.get("/isochunk/view").text
    assert client.get("/isochunk/view").json()["status"] == client.get("/isochunk/status").json()
    assert MINE in client.get("/isochunk/view", params={"request_id": MINE}).text
