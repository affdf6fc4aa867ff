"""A status as a server with this cost model would give it, after prompts that each ran alone."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from isochunk.core.cost import CostModel
from isochunk.core.flowshop import makespan
from isochunk.core.planner import plan

COST = CostModel(5e-3, 20e-6, 2e-9, 1e-7)


def status(*, stages: int = 4, prompts: int = 3, tokens: int = 32_768, slower: float = 1.02) -> dict[str, Any]:
    records, clock = [], 100.0
    for number in range(prompts):
        chosen = plan(COST, tokens, stages, max_chunk=8192, block=16)
        measured = [slower * seconds for seconds in chosen.step_seconds]
        ttft = makespan(measured, stages)
        exits = [ttft + clock - sum(measured[at + 1 :]) for at in range(len(measured))]
        records.append(
            {
                "request_id": f"cmpl-{number}",
                "policy": "optimal",
                "chunk": None,
                "cached": 0,
                "tokens": tokens,
                "alone": True,
                "predicted_ttft_s": chosen.ttft_s,
                "measured_ttft_s": ttft,
                "chunks": list(chosen.chunks),
                "histories": list(accumulate(chosen.chunks[:-1], initial=0)),
                "predicted_s": list(chosen.step_seconds),
                "measured_s": measured,
                "entered_s": [clock + 1e-4 * at for at in range(len(measured))],
                "exited_s": exits,
            }
        )
        clock += ttft + 1
    return {
        "version": "0.0",
        "policy": "optimal",
        "chunk": None,
        "stages": stages,
        "max_num_batched_tokens": 8192,
        "alignment": 16,
        "block_size": 16,
        "model": COST.as_dict(),
        "source": "probe",
        "need_timing": True,
        "drift": 1.0,
        "resting": 0,
        "counters": {"steps": 7, "planned": prompts, "fallbacks": 0},
        "profile": None,
        "probe": None,
        "queue": {"running": 1, "waiting": 2},
        "prompts": records,
    }
