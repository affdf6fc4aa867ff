import asyncio

import pytest

from isochunk.bench.client import Server
from isochunk.bench.prompts import PromptMaker


@pytest.mark.parametrize("tokens", [1, 17, 1024, 20_000])
def test_prompt_has_exactly_the_tokens_asked_for(url, tokens):
    async def run():
        async with Server(url) as server:
            maker = PromptMaker(server, seed=1)
            return [await maker.prompt(tokens) for _ in range(3)]

    assert [len(prompt) for prompt in asyncio.run(run())] == [tokens] * 3


def test_prompts_share_no_block_at_their_beginning(url):
    async def run():
        async with Server(url) as server:
            maker = PromptMaker(server, seed=1)
            return [await maker.prompt(64) for _ in range(50)]

    assert len({tuple(prompt[:8]) for prompt in asyncio.run(run())}) == 50
