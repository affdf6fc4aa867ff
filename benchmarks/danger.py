"""What a spoilt cost model does: the second prompt must already be safe.

    python -m benchmarks.danger --model tiny-qwen3 --tokens 8192

Starts a server on each spoilt model (step cost zero, 1e-9 and 100 times too small; one probed while two processes
load the cores), sends two prompts under isochunk, then the same length under vLLM's own fixed size, and
prints the TTFT of each over the fixed one. 1.1 is the most that the second may reach.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median

from benchmarks.models import ENVIRON, MODELS, isochunk_options, options
from isochunk.bench.client import Server
from isochunk.bench.prompts import PromptMaker
from isochunk.deployment.server import running_server

FIXED_ROUNDS = 3


@contextmanager
def busy_cores() -> Iterator[None]:
    """Two processes that compute for as long as the block runs."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: sum(range(10**6))"]) for _ in range(2)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


async def measure(url: str, tokens: int) -> tuple[list[float], float, dict[str, int]]:
    """TTFT of two prompts under isochunk, the median under vLLM's own size, and the server's counters."""
    async with Server(url) as server:
        prompts = PromptMaker(server, seed=secrets.randbits(32))
        planned = [(await server.complete(await prompts.prompt(tokens))).ttft_s for _ in range(2)]
        counters = (await server.status())["counters"]
        await server.use("fixed")
        fixed = [(await server.complete(await prompts.prompt(tokens))).ttft_s for _ in range(FIXED_ROUNDS)]
    return planned, median(fixed), counters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="tiny-qwen3")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--output", type=Path, default=Path("results/danger"))
    arguments = parser.parse_args()
    folder: Path = arguments.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    good: dict[str, float] = {}
    for name in ("true", "zero", "1e-9", "1/100", "probed on a busy machine"):
        profile = folder / f"{name.replace('/', '-').replace(' ', '-')}.json"
        profile.unlink(missing_ok=True)
        factor = {"zero": 0.0, "1e-9": 1e-9, "1/100": 0.01}.get(name)
        if factor is not None:
            wrong = {**good, "c0": good["c0"] * factor, "c3": good["c3"] * factor}
            profile.write_text(json.dumps(wrong), encoding="utf-8")
        chosen = [*options(arguments.model, arguments.tokens), *isochunk_options(profile=str(profile))]
        load = busy_cores() if name.startswith("probed") else nullcontext()
        with load:
            running = running_server(
                MODELS[arguments.model](), chosen, log=folder / f"{profile.stem}.log", environ=ENVIRON
            )
            url = running.__enter__()
        try:
            planned, fixed, counters = asyncio.run(measure(url, arguments.tokens))
        finally:
            running.__exit__(None, None, None)
        if not good:
            good = json.loads(profile.read_text(encoding="utf-8"))["model"]
        first, second = (seconds / fixed for seconds in planned)
        told = ", ".join(f"{key} {value}" for key, value in counters.items() if key not in ("steps", "planned"))
        print(f"{name:26} first {first:.2f}  second {second:.2f} of fixed {fixed:.2f} s  ({told})", flush=True)


if __name__ == "__main__":
    main()
