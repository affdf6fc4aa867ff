"""Prompts through a P and a D node, and the proof that the KV went from one to the other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from isochunk.bench.client import Server
from isochunk.bench.prompts import PromptMaker

__all__ = ["Deployment", "Handover", "Say", "hand_over", "prompt_tokens", "verdict"]

Say = Callable[[str], None]

_OUTPUT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Deployment:
    """Where the proxy and the two nodes listen."""

    proxy: str
    prefill: str
    decode: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """One prompt through the proxy, and once more through the P node alone.

    Attributes:
        tokens: of the prompt.
        chunks: tokens of each step on P.
        predicted_s: what P's cost model says of these chunks.
        ttft_s: through the proxy: P's prefill, the KV's way to D, and D's first token.
        received: prompt tokens whose KV the D node had from P.
        computed: prompt tokens that the D node computed itself.
        same: D's answer is the one of a single node that computed the same prompt anew.
    """

    tokens: int
    chunks: tuple[int, ...]
    predicted_s: float | None
    ttft_s: float
    received: int
    computed: int
    same: bool


def hand_over(where: Deployment, lengths: Sequence[int], *, seed: int, say: Say) -> list[Handover]:
    """Send one fresh prompt of each length through the proxy and compare its answer with a single node's."""

    async def run() -> list[Handover]:
        async with Server(where.proxy) as proxy, Server(where.prefill) as prefill:
            maker = PromptMaker(prefill, seed)
            done = []
            for tokens in lengths:
                say(f"a prompt of {tokens} tokens through the proxy, and again on the P node alone")
                done.append(await _one(where, proxy, prefill, await maker.prompt(tokens)))
            return done

    return asyncio.run(run())


async def _one(where: Deployment, proxy: Server, prefill: Server, prompt: list[int]) -> Handover:
    before = prompt_tokens(where.decode)
    answer = await proxy.complete(prompt, output_tokens=_OUTPUT_TOKENS)
    after = prompt_tokens(where.decode)
    record = (await prefill.status())["prompts"][-1]
    body = json.loads(await prefill.body(prompt, _OUTPUT_TOKENS)) | {"cache_salt": "single"}
    alone = await prefill.send(json.dumps(body).encode())
    return Handover(
        tokens=len(prompt),
        chunks=tuple(record["chunks"]),
        predicted_s=record["predicted_ttft_s"],
        ttft_s=answer.ttft_s,
        received=after.get("external_kv_transfer", 0) - before.get("external_kv_transfer", 0),
        computed=after.get("local_compute", 0) - before.get("local_compute", 0),
        same=answer.text == alone.text,
    )


def prompt_tokens(url: str) -> dict[str, int]:
    """Prompt tokens of a node by where they came from, from its metrics."""
    import httpx
    from prometheus_client.parser import text_string_to_metric_families

    text = httpx.get(f"{url}/metrics", timeout=60, trust_env=False).text
    counts: dict[str, int] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "vllm:prompt_tokens_by_source_total":
                source = sample.labels["source"]
                counts[source] = counts.get(source, 0) + int(sample.value)
    return counts


def verdict(handovers: list[Handover]) -> list[str]:
    """What is wrong; nothing when all is well. A node may compute the last token of a prompt in any case."""
    wrong = []
    for each in handovers:
        if each.received < each.tokens - 1:
            wrong.append(f"{each.tokens} tokens: the D node received the KV of {each.received} only")
        if each.computed > 1:
            wrong.append(f"{each.tokens} tokens: the D node computed {each.computed} of them itself")
        if not each.same:
            wrong.append(f"{each.tokens} tokens: the answer differs from a single node's")
    return wrong
