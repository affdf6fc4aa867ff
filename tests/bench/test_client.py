import asyncio
import json
import socket
import time

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from isochunk.bench.client import Server
from isochunk.bench.fake import FakePrefill, serving
from isochunk.core.cost import CostModel
from isochunk.core.errors import ServerError


def call(url, method, *args, api_key=None, **options):
    async def run():
        async with Server(url, api_key=api_key) as server:
            return await getattr(server, method)(*args, **options)

    return asyncio.run(run())


def test_ttft_counts_from_sending_to_the_first_token():
    fake = FakePrefill(model=CostModel(0.05, 1e-9, 0.0))
    with serving(fake) as url:
        start = time.perf_counter()
        answer = call(url, "complete", range(100))
        end = time.perf_counter()
    assert start < answer.sent_s < end - answer.ttft_s
    assert answer.ttft_s >= 0.1  # two stages of one step of 50 ms
    assert answer.gaps_s == ()


def test_every_further_token_has_its_gap():
    fake = FakePrefill(model=CostModel(0.01, 1e-9, 0.0))
    with serving(fake) as url:
        answer = call(url, "complete", range(100), output_tokens=4)
    assert answer.output_tokens == 4
    assert len(answer.gaps_s) == 3
    assert min(answer.gaps_s) > 0.005
    assert answer.seconds == pytest.approx(answer.ttft_s + sum(answer.gaps_s))


def test_empty_first_token_counts(url):
    answer = call(url, "complete", range(10))
    assert answer.text == ""
    assert answer.output_tokens == 1


def test_cached_tokens_are_reported(url):
    assert call(url, "complete", range(100)).cached_tokens == 0
    assert call(url, "complete", range(100)).cached_tokens == 96


def test_server_sees_the_request_id(url, fake):
    answer = call(url, "complete", range(10))
    assert answer.request_id in fake.prompts[-1]["request_id"]


def test_url_may_end_in_v1(url):
    assert call(f"{url}/v1/", "model") == "fake"


def test_policy_is_switched(url, fake):
    call(url, "use", "fixed", 512)
    assert (fake.policy, fake.chunk) == ("fixed", 512)


def test_servers_own_message_is_shown_when_it_refuses_a_policy(url):
    with pytest.raises(ServerError, match=r"400: policy = 'best'"):
        call(url, "use", "best")


def test_nobody_listening_is_said_with_the_address():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ServerError, match=rf"can't connect to {url}.*is the server running"):
            call(url, "status")


@pytest.mark.parametrize("url", ["localhost:8000", "http://x:port", "nowhere"])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(ServerError, match="is not a URL"):
        call(url, "status")


@pytest.mark.parametrize("key", [None, "wrong"])
def test_wrong_key_is_named(key):
    with serving(FakePrefill(api_key="right")) as url, pytest.raises(ServerError, match=r"API key \(401\).*--api-key"):
        call(url, "status", api_key=key)


def test_right_key_opens():
    with serving(FakePrefill(api_key="right")) as url:
        assert call(url, "status", api_key="right")["policy"] == "optimal"


def test_server_without_isochunk_is_told_from_a_broken_one():
    with serving(FakePrefill(isochunk=False)) as url:
        with pytest.raises(ServerError, match="runs no isochunk"):
            call(url, "status")
        assert call(url, "complete", range(10)).output_tokens == 1


def test_too_long_prompt_shows_the_servers_message():
    fake = FakePrefill(max_model_len=100)
    with serving(fake) as url, pytest.raises(ServerError, match=r"400: This model's maximum context length is 100"):
        call(url, "complete", range(100))


class Failing(FakePrefill):
    async def _answer(self, prompt, output, request_id):
        yield 'data: {"error": {"message": "out of memory", "code": 500}}\n\n'


class Silent(FakePrefill):
    async def _answer(self, prompt, output, request_id):
        yield "data: [DONE]\n\n"


class Odd(FakePrefill):
    """Its model writes what other programs take for the end of a line."""

    async def _answer(self, prompt, output, request_id):
        for text in ("a\u2028b", "c\u0085d", "\x0b\x0c\x1c\x1d\x1e\u2029"):
            yield f"data: {json.dumps({'choices': [{'index': 0, 'text': text}]}, ensure_ascii=False)}\n\n"
        yield "data: [DONE]\n\n"


def test_whatever_the_model_writes_is_read():
    with serving(Odd()) as url:
        answer = call(url, "complete", range(10))
    assert answer.text == "a\u2028bc\u0085d\x0b\x0c\x1c\x1d\x1e\u2029"
    assert len(answer.gaps_s) == 2


class Garbled(FakePrefill):
    async def _answer(self, prompt, output, request_id):
        yield "data: {oops\n\n"


class Listing(FakePrefill):
    async def _answer(self, prompt, output, request_id):
        yield "data: [1, 2]\n\n"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Garbled, "no JSON .*{oops"),
        (Listing, "no JSON object"),
        (Failing, "out of memory"),
        (Silent, "without a token"),
    ],
)
def test_answer_that_breaks_off_is_an_error(kind, message):
    with serving(kind()) as url, pytest.raises(ServerError, match=message):
        call(url, "complete", range(10))


def test_other_web_server_is_told_apart():
    class Other(FakePrefill):
        def __init__(self):
            super().__init__()
            self.app = Starlette(routes=[Route("/isochunk/status", lambda request: PlainTextResponse("hello"))])

    with serving(Other()) as url, pytest.raises(ServerError, match="not a JSON object"):
        call(url, "status")
