"""vLLM's own API server has isochunk's routes: by itself where it has no endpoint plugins, else through them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from isochunk.vllm import compat
from isochunk.vllm.endpoint import OPEN, IsochunkEndpoint
from isochunk.vllm.testing import Engine
from tests.vllm.test_endpoint import Engine as StubEngine
from vllm import plugins

ON = {"enabled": True}
WITHOUT_PLUGINS = not hasattr(plugins, "load_endpoint_plugins")  # 0.23 to 0.25


@pytest.fixture
def api_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    if not WITHOUT_PLUGINS:
        pytest.importorskip("vllm.entrypoints.openai.api_server", reason="0.33's asks for packages that 0.32 does not")
    from vllm.entrypoints.openai import api_server

    monkeypatch.setattr(api_server, "build_app", api_server.build_app)  # given back after the test
    return api_server


def client(api_server: Any, *arguments: str) -> TestClient:
    """What that server's own `build_app` makes, in front of an engine that is none."""
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", "none", *arguments])
    app = api_server.build_app(args, ("generate",))
    app.state.engine_client = type("Client", (), {"engine_core": StubEngine()})()
    return TestClient(app)


@pytest.mark.skipif(not WITHOUT_PLUGINS, reason="from 0.26 on vLLM adds them when VLLM_PLUGINS names isochunk")
def test_an_enabled_server_without_endpoint_plugins_has_the_routes(
    api_server: Any, make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OPEN, "1")
    make_engine(ON)
    server = client(api_server)
    assert server.get("/isochunk/status").json()["policy"] == "optimal"
    change = {"policy": "fixed", "chunk": 512}
    assert server.post("/isochunk/policy", json=change).json() == change


@pytest.mark.skipif(not WITHOUT_PLUGINS, reason="from 0.26 on vLLM adds them when VLLM_PLUGINS names isochunk")
def test_its_routes_ask_for_the_servers_key(api_server: Any, make_engine: Callable[..., Engine]) -> None:
    make_engine(ON)
    server = client(api_server, "--api-key", "right")
    assert server.get("/isochunk/status").status_code == 401
    assert server.get("/isochunk/status", headers={"Authorization": "Bearer right"}).status_code == 200


def test_a_server_that_does_not_enable_it_has_no_routes(api_server: Any, make_engine: Callable[..., Engine]) -> None:
    before = api_server.build_app
    make_engine(None)
    assert api_server.build_app is before


@pytest.mark.skipif(WITHOUT_PLUGINS, reason="0.23 to 0.25 have no endpoint plugins")
def test_a_server_with_endpoint_plugins_gets_no_routes_twice(
    api_server: Any, make_engine: Callable[..., Engine]
) -> None:
    before = api_server.build_app
    make_engine(ON)
    compat.add_routes()
    assert api_server.build_app is before
    assert IsochunkEndpoint.required_tasks == ("generate",)
