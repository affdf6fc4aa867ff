"""Measured over predicted TTFT of prompts alone on a rehearsed vLLM server, with the server's own probe.

    python -m benchmarks.rehearsed_alone --stages 2 8 16 --lengths 8192 32768 131072

Kimi's published costs; seconds are those of the clocks, which run ``--speed`` times as fast as the machine that is
rehearsed. Where a step takes less than some milliseconds there, this host is what is measured.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path

import httpx

from benchmarks.models import isochunk_options
from isochunk.cli.rehearsed import running_rehearsal
from isochunk.vllm.virtual.rehearsal import Rehearsal

PROFILE = "kimi-k2.5-mxfp4@mi355x/pp4tp1"
LIMIT = 16_384


def outcome(client: httpx.Client, tokens: int) -> dict[str, float]:
    """What the server's status says of one prompt that nothing else was served beside."""
    model = client.get("/v1/models").json()["data"][0]["id"]
    prompt = [random.randrange(100, 900) for _ in range(tokens)]
    answer = client.post("/v1/completions", json={"model": model, "prompt": prompt, "max_tokens": 1})
    answer.raise_for_status()
    return dict(client.get("/isochunk/status").json()["prompts"][-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32_768, 131_072, 524_288])
    parser.add_argument("--speed", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    options = ["--max-num-batched-tokens", str(LIMIT), "--max-model-len", str(max(chosen.lengths) + 1)]
    options += isochunk_options(enabled=True, profile="off", max_probe_seconds=60.0)
    rehearsal = Rehearsal(profile=PROFILE, speed=chosen.speed, kv_tokens=2 * max(chosen.lengths) + LIMIT)
    print("| stages | tokens | TTFT, s | measured over predicted, by round |\n| --- | --- | --- | --- |")
    for stages in chosen.stages:
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "server.log"
            with (
                running_rehearsal(rehearsal, options, stages=stages, log=log) as url,
                httpx.Client(base_url=url, timeout=3600) as client,
            ):
                for tokens in chosen.lengths:
                    told = [outcome(client, tokens) for _ in range(chosen.rounds)]
                    ratios = ", ".join(f"{one['measured_ttft_s'] / one['predicted_ttft_s']:.4f}" for one in told)
                    print(f"| {stages} | {tokens} | {told[-1]['measured_ttft_s']:.3f} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
