"""``isochunk demo --pd``: a P node with isochunk, a D node without, and the proxy in front, on this machine."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

from isochunk.bench.handover import Deployment, Handover, Say, hand_over, verdict
from isochunk.cli.chat import ask
from isochunk.cli.compare_page import short_chunks
from isochunk.cli.demo_model import ENVIRON, MODEL_NAME, QUESTION, demo_model
from isochunk.cli.machine import look
from isochunk.cli.progress import still
from isochunk.deployment.pd_nodes import Connector, Node, Role, need_connector, running_node, running_proxy

__all__ = ["deployment", "pd_demo"]

_LENGTHS = (300, 2000, 6000)
_SHORTER = (300, 1000, 2000)
_SLOW_TOKEN_S = 1e-3  # of one stage, in float32
_COMMON = (
    # In float32 a node's answer does not depend on how its prompt was cut.
    *("--dtype", "float32", "--enforce-eager", "--served-model-name", MODEL_NAME, "--enable-prompt-tokens-details"),
    *("--max-model-len", "8192", "--hf-overrides", '{"max_position_embeddings": 32768}'),
)
_PREFILL = ("--pipeline-parallel-size", "2", "--max-num-batched-tokens", "8192", "--no-async-scheduling")
_COLUMNS = ("tokens", "chunks on P", "predicted, s", "TTFT, s", "D received", "computed", "same")


def pd_demo(connector: str, *, output: Path, say: Say, json_only: bool) -> bool:
    """Run it, print what each prompt did, and say whether all went as it must.

    Raises:
        ConfigError: the connector is not there, or a server did not start.
    """
    from isochunk.cli.output import print_json, print_table, write_text

    chosen = need_connector(connector)
    say(f"model: {MODEL_NAME}, real weights (converted once, then cached)")
    with still(lambda: "still looking at this machine and its model"):
        model = demo_model()
        machine = look()
    say(str(machine))
    lengths = _LENGTHS if machine.token_s["float32"] < _SLOW_TOKEN_S else _SHORTER
    say(f"plan: one chat and prompts of {', '.join(map(str, lengths))} tokens, in float32; three servers start first")
    with deployment(model, chosen, logs=output, say=say) as where:
        say(f"{QUESTION} -")
        streamed = ask(where.proxy, MODEL_NAME, QUESTION, piece=_as_it_comes)
        print(file=sys.stderr)
        alone = ask(where.prefill, MODEL_NAME, QUESTION, salt="single")
        with still(lambda: "still handing over"):
            handovers = hand_over(where, lengths, seed=secrets.randbits(32), say=say)
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
def deployment(
    model: Path, connector: Connector, *, logs: Path, say: Say, prefill_options: Sequence[str] = ()
) -> Iterator[Deployment]:
    """Start one P node, one D node and the proxy; stop them all at the end.

    Args:
        prefill_options: more options for the P node.
    """
    with ExitStack() as stack:

        def start(letter: str, role: Role, options: Sequence[str], environ: dict[str, str]) -> Node:
            def progress(text: str) -> None:
                say(f"{letter} node: {text}")

            options = [*_COMMON, *options]
            log = logs / f"{letter}.log"
            return stack.enter_context(
                running_node(
                    model, connector, role, options, log=log, environ={**ENVIRON, **environ}, progress=progress
                )
            )

        # One after the other: what starts beside the P node's probe would be measured with it.
        prefill = start("P", "kv_producer", [*_PREFILL, *prefill_options], {})
        # D only makes tokens here: one thread on whatever core is free.
        decode = start("D", "kv_consumer", (), {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"})
        say("proxy: starting")
        proxy = stack.enter_context(running_proxy(connector, [prefill], [decode], log=logs / "proxy.log"))
        yield Deployment(proxy=proxy, prefill=prefill.url, decode=decode.url)


def _cells(each: Handover) -> list[str]:
    predicted = "-" if each.predicted_s is None else f"{each.predicted_s:.3g}"
    chunks = short_chunks(each.chunks)
    counts = (str(each.received), str(each.computed), "yes" if each.same else "NO")
    return [str(each.tokens), chunks, predicted, f"{each.ttft_s:.3g}", *counts]
