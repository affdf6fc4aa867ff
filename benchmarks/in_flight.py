"""One more step in flight than vLLM has stages, on a real vLLM and in the simulator.

    python -m benchmarks.in_flight

vLLM keeps one step a stage in its pipeline, and one more with asynchronous scheduling on its V2 model runner (Triton).
Here the tiny random Qwen3 on two stages is served twice: as it is, and by a scheduler that has vLLM keep one more. The
two take turns on the same lengths: prompts alone, four clients and sixteen.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.load import QUIET_S
from benchmarks.models import ENVIRON, isochunk_options, options, tiny_qwen3
from benchmarks.under_load import (
    FIELDS,
    LENGTHS,
    OURS,
    Arm,
    Block,
    Cell,
    Rounds,
    one_block,
    paired,
    simulated_block,
)
from isochunk.bench.client import Server, Status
from isochunk.deployment.server import running_server
from isochunk.vllm import Scheduler
from isochunk.vllm.shared_cores import PLUGIN

CELLS = {1: 8, 4: 16, 16: 48}  # clients: requests
PLAIN, MORE = "P", "P + 1"
ARM = Arm(OURS, "optimal")
REACHED = "P + 1 steps are in flight"


class OneMore(Scheduler):  # type: ignore[misc, unused-ignore]
    """isochunk's scheduler, in an engine that keeps P + 1 steps in flight."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        self._most = vllm_config.parallel_config.pipeline_parallel_size + 1
        # The engine reads it once it has made its scheduler.
        type(vllm_config).max_concurrent_batches = property(lambda _: self._most)
        self._flying = 0
        super().__init__(vllm_config, *args, **kwargs)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """As ever, and say so when P + 1 steps are in flight."""
        output = super().schedule(*args, **kwargs)
        self._flying += bool(output.total_num_scheduled_tokens)
        if self._flying == self._most:
            print(REACHED, flush=True)
        return output

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """As ever: a step is back."""
        self._flying -= bool(scheduler_output.total_num_scheduled_tokens)
        return super().update_from_output(scheduler_output, *args, **kwargs)


async def one_round(url: str, cell: Cell, tokens: list[int]) -> tuple[Block, Status]:
    async with Server(url, timeout=1800) as server:
        return await one_block(server, ARM, cell, tokens, 0, []), await server.status()


def one_cell(urls: dict[str, str], cell: Cell, requests: int, rounds: int) -> tuple[Rounds, Rounds]:
    """What each server did in each round, on the engine and in the simulator."""
    measured, simulated = [], []
    for index in range(rounds):
        generator = random.Random(index)
        tokens = [LENGTHS.draw(generator) for _ in range(requests)]
        blocks, told = {}, {}
        for name in random.sample(list(urls), len(urls)):
            blocks[name], told[name] = asyncio.run(one_round(urls[name], cell, tokens))
            time.sleep(QUIET_S)
        measured.append(blocks)
        status = told[PLAIN]
        most = {PLAIN: status["stages"], MORE: status["stages"] + 1}
        simulated.append(
            {name: simulated_block(status, ARM, cell, tokens, 0, in_flight=count) for name, count in most.items()}
        )
    return measured, simulated


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("results/in-flight"))
    given = parser.parse_args()
    chosen = [*options("tiny-qwen3", LENGTHS.longest), *isochunk_options(enabled=True)]
    with ExitStack() as stack:
        urls, logs = {}, {}
        for name, more in ((PLAIN, []), (MORE, ["--scheduler-cls", "benchmarks.in_flight.OneMore"])):
            log = logs[name] = given.output / f"{name.replace(' ', '')}.log"
            server = running_server(
                tiny_qwen3(), [*chosen, *more], log=log, environ=ENVIRON, plugins=("isochunk", PLUGIN)
            )
            urls[name] = stack.enter_context(server)
        for concurrency, requests in CELLS.items():
            cell = Cell(concurrency, None, 0.0, f"concurrency {concurrency}")
            measured, simulated = one_cell(urls, cell, requests, given.rounds)
            assert REACHED in logs[MORE].read_text(encoding="utf-8")
            for field in FIELDS:
                found = paired(measured, field, MORE, PLAIN)
                print(
                    f"{cell.label}: {field} with {MORE} over {PLAIN}: {median(found):.3f} "
                    f"({found[0]:.3f}-{found[-1]:.3f}), simulated {median(paired(simulated, field, MORE, PLAIN)):.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
