"""Enabled means planning: what always fails is said, and shown until it works again."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from isochunk.vllm.endpoint import IsochunkEndpoint
from isochunk.vllm.health import IN_A_ROW, Health
from isochunk.vllm.testing import Engine

Make = Callable[..., Engine]


def ids(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, count).tolist()


def fail(health: Health, times: int) -> None:
    for _ in range(times):
        with health.attempt("it"):
            raise KeyError("gone")


def messages(said: pytest.LogCaptureFixture) -> set[str]:
    return {record.getMessage() for record in said.records}


def test_what_fails_now_and_then_is_counted_and_stays_healthy(said: pytest.LogCaptureFixture) -> None:
    health = Health()
    for _ in range(3):
        fail(health, IN_A_ROW - 1)
        with health.attempt("it"):
            pass
    assert health.as_dict() == {
        "ok": True,
        "broken": [],
        "failed": 3 * (IN_A_ROW - 1),
        "reasons": {"it": 3 * (IN_A_ROW - 1)},
        "last_error": "it failed: KeyError: 'gone'",
    }
    assert len(messages(said)) == 1


def test_what_always_fails_is_broken_until_it_works(said: pytest.LogCaptureFixture) -> None:
    health = Health()
    fail(health, 3 * IN_A_ROW)
    with health.attempt("it") as attempt:
        attempt.idle = True  # nothing to do is no success
    assert health.broken == ["it"]
    assert not health.as_dict()["ok"]
    assert len([message for message in messages(said) if "DOES NOT WORK" in message]) == 1
    with health.attempt("it"):
        pass
    assert health.as_dict()["ok"]
    assert "it works again" in said.text


def broken(*_: Any, **__: Any) -> int:
    raise AttributeError("'Scheduler' object has no attribute 'gone'")


@pytest.mark.parametrize("name", ["tokens", "entered", "exited"])
def test_an_engine_that_fails_in_every_step_says_so_and_serves(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    engine = make_engine({"enabled": True})
    session = engine.scheduler.isochunk
    with monkeypatch.context() as patch:
        patch.setattr(session.controller, name, broken)
        engine.add("a", ids(0, 2048 * IN_A_ROW + 1), output_tokens=3)
        engine.run()
    assert not engine.scheduler.requests
    told = session.as_dict()
    assert not told["health"]["ok"]
    assert "no attribute 'gone'" in told["health"]["last_error"]
    assert told["counters"]["fallbacks"] == told["health"]["failed"] >= IN_A_ROW
    engine.add("b", ids(1, 5000))
    engine.run()
    assert session.as_dict()["health"]["ok"]


class Client:
    """The way to an engine in this process."""

    def __init__(self, engine: Engine) -> None:
        self.engine_core = self
        self._engine = engine

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        from vllm.v1.engine.core import EngineCore

        return getattr(EngineCore, method)(self._engine, *args)


def test_the_health_route_answers_503_when_nothing_is_planned(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine({"enabled": True})
    app = FastAPI()
    IsochunkEndpoint().attach_router(app)
    app.state.engine_client = Client(engine)
    app.state.args = type("Args", (), {"api_key": None})
    client = TestClient(app)
    assert client.get("/isochunk/health").json()["ok"]
    monkeypatch.setattr(engine.scheduler.isochunk.controller, "tokens", broken)
    engine.add("a", ids(0, 2048 * IN_A_ROW + 1))
    engine.run()
    answer = client.get("/isochunk/health")
    assert answer.status_code == 503
    assert answer.json()["broken"] == ["the planner"]
    assert client.get("/isochunk/status").json()["vllm"]["supported"]
