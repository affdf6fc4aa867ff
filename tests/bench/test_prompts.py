import asyncio

import pytest
from starlette.responses import JSONResponse

from isochunk.bench.client import Server
from isochunk.bench.fake import FakePrefill, serving
from isochunk.bench.prompts import PromptMaker


@pytest.mark.parametrize("tokens", [1, 17, 1024, 20_000])
def test_prompt_has_exactly_the_tokens_asked_for(url, tokens):
    async def run():
        async with Server(url) as server:
            maker = PromptMaker(server, seed=1)
            return [await maker.prompt(tokens) for _ in range(3)]

    assert [len(prompt) for prompt in asyncio.run(run())] == [tokens] * 3


class WithoutTokenizer(FakePrefill):
    async def _tokenize(self, request):
        return JSONResponse({"error": "no such route"}, 404)


def test_without_a_tokenizer_prompts_are_random_ids_and_that_is_said():
    async def run(url):
        async with Server(url) as server:
            maker = PromptMaker(server, seed=1)
            return [await maker.prompt(64) for _ in range(50)], server.notes

    with serving(WithoutTokenizer()) as url:
        prompts, notes = asyncio.run(run(url))
    assert {len(prompt) for prompt in prompts} == {64}
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 50
    assert notes == [f"50 x {url} has no /tokenize, so prompts were random token ids, not text"]


def test_prompts_share_no_block_at_their_beginning(url):
    async def run():
        async with Server(url) as server:
            maker = PromptMaker(server, seed=1)
            return [await maker.prompt(64) for _ in range(50)]

    assert len({tuple(prompt[:8]) for prompt in asyncio.run(run())}) == 50
