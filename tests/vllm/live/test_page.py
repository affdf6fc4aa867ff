"""The page in headless Chromium shows what the status says; its routes ask for the key where there is one."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")

from fastapi import FastAPI, HTTPException, Request

from isochunk.bench.fake import serving
from isochunk.vllm.live.routes import live_routes
from isochunk.vllm.live.view import view
from tests.vllm.live.browser import Page, browsing
from tests.vllm.live.statuses import status


class Server:
    """A server that tells this status, to those who know the key."""

    def __init__(self, told: dict[str, Any], key: str | None = None) -> None:
        self.app = FastAPI()
        self.used: list[Any] = []

        async def call(request: Request, method: str, *args: Any) -> dict[str, Any]:
            if key and request.headers.get("Authorization") != f"Bearer {key}":
                raise HTTPException(401, "Unauthorized")
            return told

        async def use(request: Request) -> dict[str, Any]:
            self.used.append(await request.json())
            told.update(self.used[-1])
            return dict(self.used[-1])

        self.app.include_router(live_routes(call))
        self.app.post("/isochunk/policy")(use)


@contextmanager
def client(told: dict[str, Any], key: str | None = None) -> Iterator[httpx.Client]:
    with serving(Server(told, key)) as url, httpx.Client(base_url=url) as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browsing(tmp_path_factory.mktemp("browser")) as found:
        yield found


def drawn(page: Page, path: str) -> int:
    """How many bars or dots the shapes at this place are made of."""
    script = f"[...document.querySelectorAll({path!r})].map((each) => each.getAttribute('d').split('M').length - 1)"
    return sum(page.run(script))


def words(page: Page) -> str:
    return re.sub(r"\s+", " ", page.run("document.body.innerText"))


_FACTS = "Object.fromEntries([...document.querySelectorAll('dd')].map((told) => [told.dataset.name, told.innerText]))"


def test_the_page_shows_what_the_status_says(page: Page) -> None:
    told = status(stages=4)
    with client(told) as server:
        page.show(f"{server.base_url}/isochunk")
        page.until("document.querySelector('#plan-table tr')")
    last = told["prompts"][-1]
    assert f"32,768 tokens in {len(last['chunks'])} chunks" in words(page)
    facts = page.run(_FACTS)
    assert {name: facts[name] for name in told["counters"]} == {n: str(v) for n, v in told["counters"].items()}
    for name in ("c0", "c1", "c2", "c3"):
        assert float(facts[name]) == pytest.approx(told["model"][name], rel=1e-3)
    assert (facts["stages"], facts["running"], facts["waiting"]) == ("4", "1", "2")
    steps = sum(len(prompt["chunks"]) for prompt in told["prompts"])
    assert drawn(page, ".dots") == steps
    assert f"{steps} steps, 2.0% off at the median" in words(page)
    assert drawn(page, "#timelines .lane") == 4 * len(told["prompts"])
    assert drawn(page, "#timelines .bar") == 4 * steps
    assert "A prompt of 8,192 tokens" in words(page)


@pytest.mark.parametrize("width", [390, 1200])
def test_many_steps_and_stages_are_drawn(page: Page, width: int) -> None:
    told = status(stages=16, prompts=32, tokens=440_000)
    steps = sum(len(prompt["chunks"]) for prompt in told["prompts"])
    assert steps > 9000
    with client(told) as server:
        page.show(f"{server.base_url}/isochunk", width=width)
        lines = server.get("/isochunk/view").json()["timelines"]
    assert drawn(page, ".dots") == steps
    assert drawn(page, "#timelines .bar") == sum(16 * len(line["chunks"]) for line in lines) > 16_000
    assert "stage 16" in words(page)
    assert page.run("document.documentElement.scrollWidth") <= width


_CONTRAST = """
(() => {
  const light = (color) => {
    const [r, g, b] = color.match(/[0-9.]+/g).slice(0, 3).map((v) => v / 255)
      .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      if (!/, 0\\)$/.test(color)) return color;
    }
  };
  const told = {};
  for (const element of document.querySelectorAll("h1, h2, p, th, td, dt, dd, label, button, figcaption, text, a")) {
    const style = getComputedStyle(element);
    const color = element.namespaceURI.endsWith("svg") ? style.fill : style.color;
    const [one, other] = [light(color), light(behind(element))].sort((a, b) => b - a);
    const ratio = (one + 0.05) / (other + 0.05);
    if (ratio < (told[element.tagName] ?? 99)) told[element.tagName] = ratio;
  }
  return { told, paper: light(getComputedStyle(document.body).backgroundColor) };
})()
"""


@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("dark", [False, True])
def test_all_text_can_be_read_in_light_and_dark(page: Page, width: int, dark: bool) -> None:
    with client(status()) as server:
        page.show(f"{server.base_url}/isochunk", width=width, dark=dark)
        page.until("document.querySelector('#plan-table tr')")
    found = page.run(_CONTRAST)
    assert (found["paper"] < 0.1) if dark else (found["paper"] > 0.9)
    assert len(found["told"]) > 10
    assert min(found["told"].values()) >= 4.5, found["told"]  # WCAG 2.2, 1.4.3
    assert page.run("document.documentElement.scrollWidth") <= width


def focus(page: Page) -> str:
    """What has the focus, and that it can be seen to have it."""
    script = """(() => { const at = document.activeElement, style = getComputedStyle(at);
      return [at.id || at.value || at.innerText, style.outlineStyle, parseFloat(style.outlineWidth)]; })()"""
    name, style, wide = page.run(script)
    assert (style, wide) == ("solid", 3), name
    return str(name)


def test_all_can_be_reached_with_the_tab_key_in_order(page: Page) -> None:
    with client(status()) as server:
        page.show(f"{server.base_url}/isochunk")
        order = []
        for _ in range(6):
            page.press("Tab")
            order.append(focus(page))
    assert order == ["optimal", "Use", "tokens", "cached", "Explain", "the status"]
    assert page.run("document.querySelectorAll('main [tabindex]').length") == 0


def test_all_controls_and_pictures_have_names(page: Page) -> None:
    with client(status()) as server:
        page.show(f"{server.base_url}/isochunk")
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    named = {"button", "link", "radio", "spinbutton", "textbox", "image", "heading", "table", "group"}
    found = [
        (node["role"]["value"], node.get("name", {}).get("value"))
        for node in nodes
        if not node.get("ignored") and node["role"]["value"] in named
    ]
    assert ("group", "How prompts are cut") in found
    assert ("spinbutton", "prompt tokens") in found
    assert len(found) > 15
    assert [role for role, name in found if not name] == []


def test_the_policy_is_switched_with_keys_alone(page: Page) -> None:
    server = Server(told := status())
    with serving(server) as url:
        page.show(f"{url}/isochunk")
        page.press("Tab")
        page.press("ArrowRight")
        page.press("ArrowRight")
        page.press("Tab")
        assert focus(page) == "chunk"
        for digit in "1024":
            page.press(digit)
        page.run("refresh()")  # as happens every few seconds: what is being chosen stays
        assert page.run("chosen()") == "fixed"
        assert page.run("byId('chunk').value") == "1024"
        page.press("Enter")
        page.until("byId('policy-answer').textContent")
        assert server.used == [{"policy": "fixed", "chunk": 1024}]
        assert "now: fixed 1024" in words(page)
        assert focus(page) == "chunk"  # whoever uses keys is still there
        told["policy"] = "optimal"  # somebody else switches it back
        page.run("refresh()")
        assert page.run("chosen()") == "optimal"
        assert page.run("byId('chunk').disabled")


def test_the_plan_is_asked_for_with_keys_alone(page: Page) -> None:
    with client(status()) as server:
        page.show(f"{server.base_url}/isochunk")
        page.until("document.querySelector('#plan-table tr')")
        for _ in range(3):
            page.press("Tab")
        assert focus(page) == "tokens"
        page.run("byId('tokens').select()")
        for digit in "20000":
            page.press(digit)
        page.press("Enter")
        page.until("document.body.innerText.includes('A prompt of 20,000 tokens')")
        told = server.get("/isochunk/plan?tokens=20000").json()
        assert told["words"][0] in words(page)
        page.run("byId('tokens').value = '1e30'")
        page.press("Enter")  # the browser itself says what the largest is
        assert page.run("byId('tokens').validity.rangeOverflow")
        page.run("byId('plan').noValidate = true")
        page.press("Enter")
        page.until("byId('plan-words').innerText.includes('integer')")
        assert "[object" not in words(page)


def test_the_key_is_asked_for_and_typed(page: Page) -> None:
    with client(status(), key="secret") as server:
        page.show(f"{server.base_url}/isochunk", ready="document.querySelector('#login:not([hidden])')")
        page.press("Tab")
        assert focus(page) == "key"
        for letter in "secret":
            page.press(letter)
        page.press("Enter")
        page.until("document.body.dataset.ready")
        page.until("document.querySelector('#plan-table tr')")
        assert page.run("byId('login').hidden")


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


def test_without_model_or_prompts_there_is_a_page_too(page: Page) -> None:
    told = status(prompts=0) | {"model": None}
    with client(told) as server:
        assert server.get("/isochunk/view").json()["surface"] is None
        page.show(f"{server.base_url}/isochunk")
        page.until("byId('plan-words').textContent")
    assert "No cost model yet" in words(page)
    assert "No prompt has ended yet" in words(page)
