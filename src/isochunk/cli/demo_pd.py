"""``isochunk demo --pd``: a P node with isochunk, a D node without, and the proxy in front, on this machine."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from isochunk.bench.client import Server
from isochunk.bench.prompts import PromptMaker
from isochunk.cli.compare_page import short_chunks
from isochunk.cli.pd_nodes import Connector, Node, Role, need_connector, running_node, running_proxy

__all__ = ["Deployment", "Handover", "ask", "deployment", "hand_over", "pd_demo", "prompt_tokens", "verdict"]

Say = Callable[[str], None]

_NAME = "SmolLM2-135M-Instruct"
_QUESTION = "What is the capital of France?"
_LENGTHS = (300, 2000, 6000)
_OUTPUT_TOKENS = 16
_COMMON = (
    # In float32 a node's answer does not depend on how its prompt was cut.
    *("--dtype", "float32", "--enforce-eager", "--served-model-name", _NAME, "--enable-prompt-tokens-details"),
    *("--max-model-len", "8192", "--hf-overrides", '{"max_position_embeddings": 32768}'),
)
_PREFILL = ("--pipeline-parallel-size", "2", "--max-num-batched-tokens", "8192", "--no-async-scheduling")
_COLUMNS = ("tokens", "chunks on P", "predicted, s", "TTFT, s", "D received", "computed", "same")
_ENVIRON = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1", "HF_HUB_OFFLINE": "1"}


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


def pd_demo(connector: str, *, output: Path, say: Say, json_only: bool) -> bool:
    """Run it, print what each prompt did, and say whether all went as it must.

    Raises:
        ConfigError: the connector is not there, or a server did not start.
    """
    from isochunk.cli.demo_model import demo_model
    from isochunk.cli.output import print_json, print_table, write_text

    chosen = need_connector(connector)
    say("model: SmolLM2-135M-Instruct, real weights (converted once, then cached)")
    model = demo_model()
    with deployment(model, chosen, logs=output, say=say) as where:
        say(f"{_QUESTION} -")
        streamed = ask(
            where.proxy, _NAME, _QUESTION, piece=lambda text: print(text, end="", file=sys.stderr, flush=True)
        )
        print(file=sys.stderr)
        alone = ask(where.prefill, _NAME, _QUESTION, salt="single")
        handovers = hand_over(where, _LENGTHS, seed=secrets.randbits(32), say=say)
    wrong = verdict(handovers)
    if streamed != alone:
        wrong.insert(0, f"the chat's answer {streamed!r} differs from a single node's {alone!r}")
    data = {"connector": connector, "answer": streamed, "prompts": [asdict(each) for each in handovers], "wrong": wrong}
    write_text(output / "results.json", json.dumps(data, indent=1) + "\n")
    if json_only:
        print_json(data)
    else:
        print_table(
            f"P with two stages and isochunk, D with one, KV over {connector}", _COLUMNS, map(_cells, handovers)
        )
        print("\n".join(wrong) or "D computed no prompt of its own, and every answer is a single node's.")
    return not wrong


def _as_it_comes(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)


@contextmanager
def deployment(model: Path, connector: Connector, *, logs: Path, say: Say) -> Iterator[Deployment]:
    """Start one P node, one D node and the proxy; stop them all at the end."""
    with ExitStack() as stack:

        def start(letter: str, role: Role, options: Sequence[str], environ: dict[str, str]) -> Node:
            def progress(text: str) -> None:
                say(f"{letter} node: {text}")

            options = [*_COMMON, *options]
            log = logs / f"{letter}.log"
            return stack.enter_context(
                running_node(
                    model, connector, role, options, log=log, environ={**_ENVIRON, **environ}, progress=progress
                )
            )

        # One after the other: what starts beside the P node's probe would be measured with it.
        prefill = start("P", "kv_producer", _PREFILL, {})
        # D only makes tokens here: one thread on whatever core is free.
        decode = start("D", "kv_consumer", (), {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"})
        say("proxy: starting")
        proxy = stack.enter_context(running_proxy(connector, [prefill], [decode], log=logs / "proxy.log"))
        yield Deployment(proxy=proxy, prefill=prefill.url, decode=decode.url)


def ask(url: str, model: str, question: str, *, salt: str | None = None, piece: Say = lambda text: None) -> str:
    """A chat, streamed; ``piece`` gets the answer as it comes."""
    import httpx

    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 32,
        "temperature": 0,
        "stream": True,
    }
    if salt is not None:
        body["cache_salt"] = salt
    answer = ""
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=300, trust_env=False) as response:
        if response.status_code != 200:
            response.read()
        response.raise_for_status()
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if data in (line, "[DONE]"):
                continue
            text = json.loads(data)["choices"][0]["delta"].get("content") or ""
            answer += text
            piece(text)
    return answer


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
    """What is wrong; nothing when all is well. The last token of a prompt is always computed, by D too."""
    wrong = []
    for each in handovers:
        if each.computed > 1:
            wrong.append(f"{each.tokens} tokens: the D node computed {each.computed} of them itself")
        if not each.same:
            wrong.append(f"{each.tokens} tokens: the answer differs from a single node's")
    return wrong


def _cells(each: Handover) -> list[str]:
    predicted = "-" if each.predicted_s is None else f"{each.predicted_s:.3g}"
    chunks = short_chunks(each.chunks)
    counts = (str(each.received), str(each.computed), "yes" if each.same else "NO")
    return [str(each.tokens), chunks, predicted, f"{each.ttft_s:.3g}", *counts]
