"""Write docs/published-results.md: published numbers beside simulated ones.

python benchmarks/published_results.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from isochunk.core.cost import CostModel
from isochunk.core.planner import evaluate
from isochunk.simulator import ClosedLoop, Deployment, Lengths, OpenLoop, Request, make_requests, simulate

ROOT = Path(__file__).resolve().parent.parent
UNSEEN_S = 0.019  # seconds a step of scheduler, transfer and connector that the sweep's authors did not time
PAIRS = {
    "DeepSeek-V3.1-W8A8": ("deepseek-v3.1-w8a8@atlas-a3/pp2tp8/mid", "deepseek-v3.1-w8a8@atlas-a3/pp2tp8/hi"),
    "Qwen3-235B": ("qwen3-235b@atlas-a3/pp2tp8/mid",),
}
KIMI = "kimi-k2.5-mxfp4@mi355x/pp4tp1"
DEEPSEEK = "deepseek-v3.1-w8a8@atlas-a3/pp2tp8/hi"
CARDS = 8
Rows = list[list[str]]


def load_models() -> dict[str, CostModel]:
    """The published cost models by name."""
    data = json.loads((ROOT / "data" / "published_models.json").read_text())["models"]
    return {name: CostModel(m["c0"], m["c1"], m["c2"], m["c3"]) for name, m in data.items()}


def alone(model: CostModel, stages: int, tokens: int, chunk: int, policy: str) -> float:
    """TTFT of one prompt; P+1 steps in flight, so that no return latency is counted twice."""
    deployment = Deployment(models=(model,) * stages, max_tokens=chunk, block=16, in_flight=stages + 1)
    return float(simulate(deployment, OpenLoop([Request(key="a", tokens=tokens)]), policy).ttft[0])


def error(simulated: float, published: float) -> str:
    return f"{simulated / published - 1:+.1%}"


def pairs(models: dict[str, CostModel], published: dict[str, Any]) -> Rows:
    rows = []
    for row in published["dynamic_vs_static_same_base"]:
        host = row["host_overhead_s_assumed"]
        for name in PAIRS[row["model"]]:
            for policy, column in (
                ("fixed", "static_ttft_s"),
                ("ascend", "dynamic_ttft_s"),
                ("ascend_online", "dynamic_ttft_s"),
            ):
                found = host + alone(
                    models[name], row["stages"], row["prompt_tokens"], row["max_num_batched_tokens"], policy
                )
                rows.append([name, policy, f"{row[column]}", f"{found:.2f}", error(found, row[column])])
            found = host + alone(
                models[name], row["stages"], row["prompt_tokens"], row["max_num_batched_tokens"], "optimal"
            )
            rows.append([name, "**isochunk**", "-", f"{found:.2f}", "-"])
    return rows


def fixed_sweep(model: CostModel, sweep: dict[str, Any]) -> Rows:
    rows = []
    real = CostModel(model.c0 + UNSEEN_S, model.c1, model.c2, model.c3)
    for row in sweep["rows"]:
        if "chunk" in row:
            times = [alone(m, 4, sweep["prompt_tokens"], row["chunk"], "fixed") for m in (model, real)]
        else:
            times = [evaluate(m, row["chunks"], 4) for m in (model, real)]
        predicted, measured = row["model_predicted_s"], row["mean_ttft_s"]
        rows.append(
            [
                str(row.get("chunk", "13 shrinking chunks")),
                f"{predicted}",
                f"{times[0]:.3f}",
                error(times[0], predicted),
                f"{measured}",
                f"{times[1]:.3f}",
                error(times[1], measured),
            ]
        )
    found = [alone(m, 4, sweep["prompt_tokens"], 32768, "optimal") for m in (model, real)]
    rows.append(["**isochunk**", "-", f"{found[0]:.3f}", "-", "-", f"{found[1]:.3f}", "-"])
    return rows


def under_load(model: CostModel, sweep: dict[str, Any]) -> Rows:
    real = CostModel(model.c0 + UNSEEN_S, model.c1, model.c2, model.c3)
    deployment = Deployment(models=(real,) * 4, max_tokens=32768)
    rows = []
    for row in sweep["at_concurrency"]:
        requests = make_requests(8 * row["concurrency"], Lengths(mean=sweep["prompt_tokens"]))
        for policy, column in (("fixed", "fixed_32768_tok_s"), ("first_chunk", "dynamic_tok_s"), ("optimal", None)):
            rate = simulate(deployment, ClosedLoop(requests, row["concurrency"]), policy).tokens_per_s
            told = [str(row[column]), error(rate, row[column])] if column else ["-", "-"]
            rows.append([str(row["concurrency"]), policy, told[0], f"{rate:.0f}", told[1]])
    return rows


def throughput(model: CostModel, table: dict[str, Any]) -> Rows:
    lengths = Lengths(shape="normal", mean=32768, std=32768, least=4096, most=65536)
    requests = make_requests(400, lengths, prefix_hit=0.99, block=128, seed=1)
    both = CostModel(2 * model.c0, 2 * model.c1, 2 * model.c2, 2 * model.c3)
    machines = {
        "pp2tp8_dynamic": (Deployment(models=(model, model), block=128, cards=CARDS), "ascend"),
        "dp2tp8": (Deployment(models=(both,), block=128, cards=CARDS // 2, instances=2), "fixed"),
        "tp16": (Deployment(models=(both.scaled(0.5),), block=128, cards=CARDS), "fixed"),
    }
    rows = []
    for name, (deployment, policy) in machines.items():
        found = simulate(deployment, ClosedLoop(requests, 4), policy).as_dict()["tokens_per_s_per_card"]
        told = table["tokens_per_s_per_card"][name]
        rows.append([name, policy, str(told), f"{found:.0f}", error(found, told)])
    deployment = machines["pp2tp8_dynamic"][0]
    found = simulate(deployment, ClosedLoop(requests, 4), "optimal").as_dict()["tokens_per_s_per_card"]
    rows.append(["pp2tp8", "**isochunk**", "-", f"{found:.0f}", "-"])
    return rows


def table(head: list[str], rows: Rows) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page() -> str:
    models = load_models()
    published = json.loads((ROOT / "data" / "published_ttft.json").read_text())
    sweep = published["fixed_chunk_sweep"]
    return f"""# Published results, simulated

Written by `python benchmarks/published_results.py` from `data/`; don't edit. Times are seconds.

## Static and dynamic chunks at the same first size

`ascend` is the published rule with its start-up profile, `ascend_online` the same after its own calibration. 0.3 s of
host time is added to each, as assumed in `data/published_ttft.json`. The models were fitted to the static number and
the rule with its start-up profile, so these rows show that simulator and rule agree with the fit, not that the fit
is right. On a true cost model the rule's own calibration does harm for DeepSeek: it has three columns for four costs.

{table(["model", "policy", "published", "simulated", "error"], pairs(models, published))}

## Fixed sizes, 131072 tokens, four stages

The authors' own predictions from their timer, which sees forward passes only, and their measurements, for which
{UNSEEN_S * 1000:.0f} ms a step are added.

{
        table(
            ["chunk", "their prediction", "simulated", "error", "measured", "simulated + 19 ms", "error"],
            fixed_sweep(models[KIMI], sweep),
        )
    }

Every fixed size is within 0.5% of the authors' predictions and within 3% of their measurements. Their dynamic cut is
within 0.5% of their prediction and 4.8% below their measurement: it lost 60 ms a chunk against its prediction where
the fixed sizes lost 18 to 42 ms, so 19 ms a step does not explain it.

## The same at concurrency 4 and 16

Prompt tokens a second of the prefill instance. Closed loop without pauses, 8 requests a client, ramp and end
included; the published runs had a decode side and a KV transfer behind them, which is not simulated. No bound is
claimed for these rows, and they don't match: the published dynamic run switches itself off under load and is slower
than the fixed one, the rule as simulated keeps on and is faster.

{table(["concurrency", "policy", "published", "simulated", "error"], under_load(models[KIMI], sweep))}

## Throughput at concurrency 4 and 99% prefix hits

Prompt tokens, cached ones included, a second and card. Assumed: a card is two of the 16 dies; lengths are normal with
mean 32768 and deviation 32768, cut to 4096..65536; every prompt hits 99% of its tokens in blocks of 128; the model is
the `hi` member; one stage of tensor-parallel 8 costs both stages' c0..c3, tensor-parallel 16 half of that (no loss to
communication); 400 requests, no pauses.

{
        table(
            ["deployment", "policy", "published", "simulated", "error"],
            throughput(models[DEEPSEEK], published["variable_length_concurrency_4"]),
        )
    }

What could not be matched: the published page names neither the number of requests nor what the clients wait for between
them, nor whether decoding shares the run; `mid` and `hi` fit the same pair and differ here by the step cost, which at
300 new tokens a prompt is nearly all there is. The two rows without a pipeline are far off: they rest on the scaling
assumed above, in which wider tensor parallelism costs no communication and a stage's fixed cost halves with it.
"""


if __name__ == "__main__":
    (ROOT / "docs" / "published-results.md").write_text(page(), encoding="utf-8")
