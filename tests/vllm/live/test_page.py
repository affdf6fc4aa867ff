"""The page in headless Chromium shows what the status says; its routes ask for the key where there is one."""

import html
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")

from fastapi import FastAPI, HTTPException, Request

from isochunk.bench.fake import serving
from isochunk.vllm.live.routes import live_routes
from isochunk.vllm.live.view import view
from tests.vllm.live.statuses import status

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--virtual-time-budget=15000"),
)


class Server:
    """A server that tells this status, to those who know the key."""

    def __init__(self, told: dict[str, Any], key: str | None = None) -> None:
        self.app = FastAPI()
        self.used: list[tuple[str, int | None]] = []

        async def call(request: Request, method: str, *args: Any) -> dict[str, Any]:
            if key and request.headers.get("Authorization") != f"Bearer {key}":
                raise HTTPException(401, "Unauthorized")
            return told

        self.app.include_router(live_routes(call))


@contextmanager
def client(told: dict[str, Any], key: str | None = None) -> Iterator[httpx.Client]:
    with serving(Server(told, key)) as url, httpx.Client(base_url=url) as found:
        yield found


def dom(url: str, folder: Path, *, width: int = 1200) -> str:
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed (Debian's package chromium)")
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder}", f"--window-size={width},900", "--dump-dom", url]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    return done.stdout


def test_the_page_shows_what_the_status_says(tmp_path: Path) -> None:
    told = status(stages=4)
    with client(told) as server:
        shown = dom(f"{server.base_url}/isochunk", tmp_path)
    text = html.unescape(re.sub(r"<[^>]+>", " ", shown))
    last = told["prompts"][-1]
    assert 'data-ready="yes"' in shown
    assert f"32,768 tokens in {len(last['chunks'])} chunks" in text
    for name, value in told["counters"].items():
        assert re.search(rf'<dd data-name="{name}">{value}</dd>', shown)
    steps = sum(len(prompt["chunks"]) for prompt in told["prompts"])
    assert shown.count('class="dot"') == steps
    assert f"{steps} steps, 2.0% off at the median" in text
    bars = shown.split('id="timelines"')[1].split('id="steps-title"')[0]
    assert bars.count('class="lane"') == 4 * len(told["prompts"])
    assert bars.count('class="bar') == 4 * steps
    assert "A prompt of 8,192 tokens" in text


def test_many_steps_and_stages_are_drawn(tmp_path: Path) -> None:
    told = status(stages=16, prompts=32, tokens=400_000)
    steps = sum(len(prompt["chunks"]) for prompt in told["prompts"])
    assert steps > 2000
    with client(told) as server:
        shown = dom(f"{server.base_url}/isochunk", tmp_path, width=390)
    assert 'data-ready="yes"' in shown
    assert shown.count('class="dot"') == 2000  # the newest ones
    assert f"stage {16}" in shown


def test_data_asks_for_the_key_and_the_page_does_not() -> None:
    with client(status(), key="secret") as server:
        for path in ("", "/page.css", "/page.js"):
            assert server.get(f"/isochunk{path}").status_code == 200
        for path in ("/view", "/plan?tokens=100"):
            assert server.get(f"/isochunk{path}").status_code == 401
            assert server.get(f"/isochunk{path}", headers={"Authorization": "Bearer secret"}).status_code == 200


def test_the_page_asks_no_other_host() -> None:
    with client(status()) as server:
        for path in ("", "/page.css", "/page.js"):
            text = server.get(f"/isochunk{path}").text.replace("http://www.w3.org/2000/svg", "")
            assert "://" not in text
        assert server.get("/isochunk/page.py").status_code == 404


def test_a_wrong_length_is_an_answer_with_the_reason() -> None:
    with client(status()) as server:
        answer = server.get("/isochunk/plan?tokens=0")
        assert answer.status_code == 400
        assert "tokens = 0" in answer.json()["error"]
        assert server.get("/isochunk/plan?tokens=x").status_code == 422


def test_the_view_is_computed_from_the_status_alone() -> None:
    told = status(stages=2, prompts=1)
    with client(told) as server:
        answer = server.get("/isochunk/view").json()
    assert answer["status"] == told
    (line,) = answer["timelines"]
    assert line["measured_ttft_s"] == pytest.approx(line["stages"][-1][-1][1], rel=1e-3)
    assert line["fixed"]["ttft_s"] == pytest.approx(line["fixed"]["stages"][-1][-1][1])
    assert answer["steps"] == [list(step) for step in view(told)["steps"]]


def test_without_model_or_prompts_there_is_a_page_too(tmp_path: Path) -> None:
    told = status(prompts=0) | {"model": None}
    with client(told) as server:
        assert server.get("/isochunk/view").json()["surface"] is None
        shown = dom(f"{server.base_url}/isochunk", tmp_path)
    assert "No cost model yet" in shown
    assert "No prompt has ended yet" in shown
