"""isochunk against every fixed chunk size, interleaved on one running vLLM: is it ever worse than the best?

    python -m benchmarks.static_sweep --model smollm2 --lengths 1024,2048,4096,8192 --output results/sweep

Prints, for each length, isochunk's TTFT over that of vLLM's default (the largest size), of the published
rule and of the best fixed size, as the median and quartiles of paired ratios, and its prediction over what the
client measured (HTTP included) and over the engine's own time. Every sample goes to ``<output>/<model>.json``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median, quantiles

from benchmarks.models import ENVIRON, MODELS, options
from isochunk.bench.compare import Comparison
from isochunk.bench.summary import as_dict
from isochunk.cli.compare import measure, print_comparison
from isochunk.deployment.server import running_server


def ratios(result: Comparison, tokens: int, over: str, under: str) -> list[float]:
    """Paired TTFT ratios of two arms, one a round."""
    times: dict[str, dict[int, float]] = {}
    for sample in result.samples:
        if sample.tokens == tokens and sample.disturbed is None:
            times.setdefault(sample.arm.label, {})[sample.round] = sample.ttft_s
    rounds = times.get(over, {}).keys() & times.get(under, {}).keys()
    return [times[over][r] / times[under][r] for r in sorted(rounds)]


def medians(result: Comparison, tokens: int) -> dict[str, float]:
    """Median TTFT of each arm in seconds."""
    labels = dict.fromkeys(s.arm.label for s in result.samples if s.tokens == tokens)
    return {
        label: median(s.ttft_s for s in result.samples if (s.tokens, s.arm.label, s.disturbed) == (tokens, label, None))
        for label in labels
    }


def spread(values: list[float]) -> str:
    if len(values) < 2:
        return ", ".join(f"{v:.3f}" for v in values) or "-"
    low, _, high = quantiles(values, n=4, method="inclusive")
    return f"{median(values):.3f} ({low:.3f}-{high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="smollm2")
    parser.add_argument("--lengths", default="1024,2048,4096,8192")
    parser.add_argument("--sizes", default="128,256,512,1024,2048,4096,8192")
    parser.add_argument("--policies", default="fixed,first_chunk,optimal")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("results/sweep"))
    arguments = parser.parse_args()
    lengths = [int(n) for n in arguments.lengths.split(",")]
    model = arguments.model
    with running_server(
        MODELS[model](), options(model, max(lengths)), log=arguments.output / f"{model}.log", environ=ENVIRON
    ) as url:
        result = measure(
            url,
            lengths=lengths,
            policies=arguments.policies.split(","),
            sweep=[int(n) for n in arguments.sizes.split(",")],
            rounds=arguments.rounds,
        )
    (arguments.output / f"{model}.json").write_text(json.dumps(as_dict(result), indent=1), encoding="utf-8")
    print_comparison(result)
    report(result, lengths)


def report(result: Comparison, lengths: list[int]) -> None:
    print(
        "tokens  vLLM default/isochunk   published/isochunk      isochunk/best fixed     "
        "predicted/client        predicted/engine"
    )
    for tokens in lengths:
        typical = medians(result, tokens)
        ours = next(label for label in typical if label.startswith("isochunk"))
        fixed = {label: s for label, s in typical.items() if label.startswith("fixed")}
        largest = max(fixed, key=lambda label: int(label.split()[1]))
        rule = next((label for label in typical if label.startswith("first")), largest)
        best = min(fixed, key=lambda label: fixed[label])
        own = [s for s in result.samples if (s.tokens, s.arm.label, s.disturbed) == (tokens, ours, None)]
        told = [s for s in own if s.record["predicted_ttft_s"]]
        client = [s.record["predicted_ttft_s"] / s.ttft_s for s in told]
        engine = [s.record["predicted_ttft_s"] / s.record["measured_ttft_s"] for s in told]
        print(
            f"{tokens:6d}  {spread(ratios(result, tokens, largest, ours)):22}  "
            f"{spread(ratios(result, tokens, rule, ours)):22}  "
            f"{spread(ratios(result, tokens, ours, best)):22}  {spread(client):22}  {spread(engine):22}  best: {best}"
        )


if __name__ == "__main__":
    main()
