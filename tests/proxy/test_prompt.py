from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from isochunk.proxy.body import parse_body
from isochunk.proxy.errors import ProxyError
from isochunk.proxy.prefix import PIECE, PrefixIndex
from isochunk.proxy.prompt import Prompt, TokenEstimate, read_prompt


def read(value: dict[str, Any], *, chat: bool = False) -> Prompt:
    async def run() -> Prompt:
        return await read_prompt(await parse_body(json.dumps(value).encode()), chat=chat)

    return asyncio.run(run())


@pytest.mark.parametrize("count", [1, 2, 1000, 200_000])
def test_token_ids_are_counted_exactly(count: int) -> None:
    prompt = read({"prompt": list(range(count))})
    assert (prompt.kind, prompt.ids, TokenEstimate().tokens(prompt)) == ("ids", count, count)
    assert read({"prompt": [list(range(count))]}).ids == count


def test_one_string_in_a_list_is_text() -> None:
    assert read({"prompt": ['with "quotes", commas [and brackets]']}).kind == "text"


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2]], [["a"], "b"]])
def test_several_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(ProxyError, match="several prompts"):
        read({"prompt": prompt})


def test_the_estimate_learns_how_long_tokens_are_for_each_kind() -> None:
    estimate = TokenEstimate()
    text, chat = read({"prompt": "x" * 6000}), read({"messages": [{"content": "x" * 6000}]}, chat=True)
    assert estimate.tokens(text) == pytest.approx(1500, rel=0.01)
    for _ in range(200):
        estimate.learn(text, 1000)
    assert estimate.tokens(text) == pytest.approx(1000, rel=0.02)
    assert estimate.tokens(chat) == pytest.approx(1500, rel=0.02)


def chat(text: str, **fields: Any) -> Prompt:
    return read({"model": "m", "messages": [{"role": "user", "content": text}], **fields}, chat=True)


def test_tools_and_schemas_count_and_nothing_is_learnt_from_them() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "x" * 23_000}}]
    estimate = TokenEstimate()
    bare, tooled = chat("hello " * 5000), chat("hi", tools=tools)
    before = estimate.tokens(bare)
    assert estimate.tokens(tooled) > 5000
    assert estimate.tokens(chat("hi", response_format={"type": "json_schema", "json_schema": {"a": "x" * 9000}})) > 2000
    for _ in range(10):
        estimate.learn(tooled, 6000)
    assert estimate.tokens(bare) == before


def test_an_image_is_a_constant_whatever_its_bytes_and_hides_no_text() -> None:
    def image(size: int) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * size}}

    def with_images(*parts: Any) -> Prompt:
        return read({"messages": [{"role": "user", "content": list(parts)}]}, chat=True)

    text = {"type": "text", "text": "word " * 10_000}
    estimate = TokenEstimate()
    one, large = estimate.tokens(with_images(image(100))), estimate.tokens(with_images(image(3_000_000)))
    assert 1000 < one < 1200
    assert abs(one - large) < 10
    assert estimate.tokens(with_images(image(5), image(5))) > 2 * 1000
    alone = estimate.tokens(with_images(text))
    for _ in range(50):
        estimate.learn(with_images(image(3_000_000)), 1100)
    assert estimate.tokens(with_images(text)) == alone
    assert estimate.tokens(with_images(image(100), text)) > alone
    said = {"type": "text", "text": '"image_url": "data:image/png;base64,' + "word " * 10_000}
    assert estimate.tokens(with_images(said)) >= alone


@pytest.mark.parametrize("tokens", [1, 10_000_000])
def test_one_outlier_moves_the_estimate_little(tokens: int) -> None:
    estimate, text = TokenEstimate(), read({"prompt": "x" * 6000})
    for learnt in range(3):
        before = estimate.tokens(text)
        estimate.learn(text, tokens)
        assert estimate.tokens(text) == pytest.approx(before, rel=0.07), learnt
    for _ in range(100):
        estimate.learn(text, 1500)
    before = estimate.tokens(text)
    estimate.learn(text, tokens)
    assert estimate.tokens(text) == pytest.approx(before, rel=0.02)


def test_short_prompts_teach_nothing() -> None:
    estimate, text = TokenEstimate(), read({"prompt": "x" * 6000})
    before = estimate.tokens(text)
    for _ in range(100):
        estimate.learn(read({"prompt": "hi"}), 30)
    assert estimate.tokens(text) == before


@pytest.mark.parametrize("field", ["cache_salt", "tools", "documents", "chat_template", "model"])
def test_what_vllm_keys_its_blocks_by_keys_the_fingerprints(field: str) -> None:
    text = "x" * PIECE * 3
    one, same, other = chat(text, **{field: "a"}), chat(text, **{field: "a"}), chat(text, **{field: "b"})
    assert one.prints == same.prints
    assert not set(one.prints) & set(other.prints)
    assert one.prints == chat(text, **{field: "a"}, temperature=1.0, user="u").prints


def test_prompts_share_fingerprints_as_far_as_they_share_bytes() -> None:
    shared = "x" * (5 * PIECE)
    a, b = read({"prompt": shared + "a" * PIECE}), read({"prompt": shared + "b" * PIECE})
    same = [one == other for one, other in zip(a.prints, b.prints, strict=True)]
    assert same == [True] * 5 + [False]


def test_another_model_shares_nothing() -> None:
    a, b = (read({"model": name, "prompt": "x" * PIECE * 3}) for name in "ab")
    assert not set(a.prints) & set(b.prints)


def test_a_hit_is_the_leading_part_that_the_node_has_had() -> None:
    index = PrefixIndex(kv_tokens=1_000_000)
    index.add([1, 2, 3, 4])
    assert index.hit([1, 2, 3, 9, 10]) == 3
    assert index.hit([9, 10]) == 0
    index.forget([3, 4])
    assert index.hit([1, 2, 3, 4]) == 2


def test_the_index_forgets_the_oldest_ends_first() -> None:
    index = PrefixIndex(kv_tokens=4 * PIECE // 4)
    index.add([1, 2, 3])
    index.add([1, 7, 8])
    assert len(index) == 4
    assert (index.hit([1, 7, 8]), index.hit([1, 2, 3])) == (3, 2)
