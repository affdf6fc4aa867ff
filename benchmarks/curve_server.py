"""Predicted against measured on the real server over virtual stages that take what a GPU's curve says.

    engine python -m benchmarks.curve_server --stages 2 --curve Llama-2-70b-hf@h100/tp4 [--seconds 20]

The server probes by itself. Each length is sent alone, isochunk's plan and the fixed size that is best by the true
costs (of all multiples of 64) in turn; the first table row says what the probe found.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.curves import gpu_models
from benchmarks.models import isochunk_options
from isochunk.bench.arms import Arm
from isochunk.bench.client import Server
from isochunk.bench.solo import Solo
from isochunk.cli.rehearsed import running_rehearsal
from isochunk.core.cost import CostModel
from isochunk.core.planner import static_ttft
from isochunk.core.profile import Profile, save_profile
from isochunk.vllm.virtual.rehearsal import Rehearsal

LIMIT = 8192
LENGTHS = (1024, 2048, 4096, 8192, 16_384, 32_768)
ROUNDS = 3


async def measure(url: str, true: CostModel, stages: int) -> None:
    async with Server(url, timeout=600) as server:
        status = await server.status()
        probe, model = status["probe"], status["model"]
        print(
            f"probe: {probe['seconds']:.1f} s, {probe['steps']} steps, {probe['tokens']} tokens; curve of "
            f"{len(model.get('curve', []))} sizes, bend {model.get('bend')}",
            flush=True,
        )
        solo = Solo(server, 1)
        print("| tokens | isochunk, s | predicted / measured | best fixed size | isochunk / best fixed |")
        print("| --- | --- | --- | --- | --- |")
        for tokens in LENGTHS:
            sizes = np.append(np.arange(64, min(tokens, LIMIT), 64), min(tokens, LIMIT))
            size = int(sizes[np.argmin(static_ttft(true, 0, tokens, sizes, stages))])
            ours, fixed, predicted = [], [], []
            for _ in range(ROUNDS):
                mine = (await solo.turn(tokens, Arm("optimal", None))).record
                ours.append(mine["measured_ttft_s"])
                predicted.append(mine["predicted_ttft_s"])
                fixed.append((await solo.turn(tokens, Arm("fixed", size))).record["measured_ttft_s"])
            print(
                f"| {tokens} | {median(ours):.4f} | {median(predicted) / median(ours):.3f} | {size} "
                f"| {median(ours) / median(fixed):.3f} |",
                flush=True,
            )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--stages", type=int, default=2)
    options.add_argument("--curve", action="append", help="default: all of the file")
    options.add_argument("--seconds", type=float, default=60.0, help="max_probe_seconds")
    given = options.parse_args()
    for name, true in gpu_models(given.stages).items():
        if given.curve and name not in given.curve:
            continue
        with tempfile.TemporaryDirectory() as folder:
            profile = Path(folder) / "true.json"
            save_profile(profile, Profile(model=true))
            arguments = [
                *("--max-num-batched-tokens", str(LIMIT), "--max-model-len", "100000"),
                *isochunk_options(enabled=True, profile="off", max_probe_seconds=given.seconds, need_timing=False),
            ]
            log = Path(folder) / "server.log"
            with running_rehearsal(
                Rehearsal(profile=str(profile), speed=1.0), arguments, stages=given.stages, log=log
            ) as url:
                print(f"\n{name}, P = {given.stages}, {json.dumps({'limit': LIMIT})}", flush=True)
                asyncio.run(measure(url, true, given.stages))


if __name__ == "__main__":
    main()
