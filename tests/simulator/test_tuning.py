import json

import pytest
from typer.testing import CliRunner

from isochunk.cli.app import app
from isochunk.core.cost import CostModel
from isochunk.core.errors import IsochunkError, PlanError
from isochunk.simulator import Deployment, OpenLoop, Request
from isochunk.simulator.tuning import best_budget, budgets, layer_split, restage, sweep

KIMI = CostModel(0.0261, 6.03e-6, 6.5e-10, 5.39e-7)


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(KIMI.as_dict()))
    return str(path)


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_smallest_budget_close_to_the_best_is_chosen():
    choices = sweep(
        Deployment(models=(KIMI,) * 4),
        lambda: OpenLoop([Request(key="a", tokens=131072)]),
        "optimal",
        budgets(131072, 16),
    )
    chosen = best_budget(choices)
    best = min(choice.ttft_s for choice in choices)
    assert chosen.ttft_s <= 1.002 * best
    assert all(choice.ttft_s > 1.002 * best for choice in choices if choice.value < chosen.value)


def test_the_layer_split_takes_layers_from_the_slow_stage():
    even = layer_split([KIMI] * 4, 60, 32768)
    slow_last = layer_split([KIMI, KIMI, KIMI, KIMI.scaled(1.3)], 60, 32768)
    assert even == [15, 15, 15, 15]
    assert sum(slow_last) == 60
    assert slow_last[3] < 15 <= min(slow_last[:3])
    with pytest.raises(PlanError, match="--layers 3"):
        layer_split([KIMI] * 4, 3, 32768)


def test_more_stages_divide_the_work_but_not_the_step_cost():
    model = restage(Deployment(models=(KIMI,) * 4), 8).models[0]
    assert model.c0 == pytest.approx(KIMI.c0)
    assert model.c1 == pytest.approx(KIMI.c1 / 2)


def test_tune_prints_flags_that_vllm_takes(profile, tmp_path):
    picture = tmp_path / "curve.png"
    result = run("tune", "--profile", profile, "--stages", 4, "--tokens", 65536, "--layers", 61, "--plot", picture)
    assert result.exit_code == 0
    assert "--pipeline-parallel-size 4" in result.output
    assert "VLLM_PP_LAYER_PARTITION=16,15,15,15" in result.output
    assert picture.stat().st_size > 0


def test_tune_answers_in_json(profile):
    answer = json.loads(run("tune", "--profile", profile, "--stages", 2, "--tokens", 32768, "--json").output)
    assert {choice["value"] for choice in answer["choices"]} >= {8192, 16384, 24576, 32768}
    assert answer["environment"] == {}


def test_simulate_compares_policies_and_writes_picture_and_trace(profile, tmp_path):
    picture, trace = tmp_path / "a.png", tmp_path / "a.json"
    result = run(
        "simulate", "--profile", profile, "--stages", 2, "--tokens", 32768, "--concurrency", 2, "--requests", 6,
        "--policy", "optimal", "--policy", "ascend", "--plot", picture, "--trace", trace, "--json",
    )  # fmt: skip
    numbers = json.loads(result.output)
    assert numbers["optimal"]["ttft_mean_s"] < numbers["ascend"]["ttft_mean_s"] * 1.2
    spans = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == 2 * numbers["optimal"]["steps"]
    assert picture.stat().st_size > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stages", 0, "--tokens", 5], "--stages 0"),
        (["--tokens", 5], "--stages is missing"),
        (["--stages", 2], "--tokens is missing"),
        (["--stages", 2, "--tokens", 5, "--rate", 1, "--concurrency", 1], "exclude each other"),
        (["--stages", 4, "--tokens", 5, "--in-flight", 3], "K = 3"),
        (["--stages", 2, "--tokens", 5, "--requests", 0], "requests = 0"),
        (["--stages", 2, "--tokens", 500, "--max-model-len", 100], "--max-model-len 100"),
        (["--stages", 2, "--tokens", 500, "--prefix-hit", 1], "prefix hit = 1"),
        (["--stages", 2, "--std", 5], "--std needs --tokens"),
        (["--stages", 2, "--tokens", 5, "--decode"], "--decode needs --arrivals"),
        (["--stages", 2, "--tokens", 5, "--output-tokens", 0], "--output-tokens 0"),
        (["--stages", 2, "--tokens", 5000, "--kv-tokens", 4096], "kv_tokens = 4096 can't hold request r0"),
        (["--stages", 2, "--tokens", 5, "--load-rate", 0], "load_rate = 0"),
        (["--stages", 2, "--tokens", 5, "--policy", "best"], "policy = 'best'"),
    ],
)
def test_a_wrong_flag_is_named(profile, arguments, message):
    result = run("simulate", "--profile", profile, *arguments)
    assert isinstance(result.exception, IsochunkError)
    assert message in str(result.exception)


def test_simulate_takes_a_trace_with_answers_and_little_room(profile, tmp_path):
    row = {"input_length": 1500, "output_length": 300, "hash_ids": list(range(94))}
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\ufeff" + "\n".join(json.dumps(row | {"timestamp": 1000 * at}) for at in range(9)))
    given = ["simulate", "--profile", profile, "--stages", 2, "--arrivals", trace, "--kv-tokens", 2048]
    refused = run(*given)
    assert "line 1: 94 hash_ids" in str(refused.exception)
    assert "a block of 16 tokens" in str(refused.exception)
    given += ["--trace-block", 16]
    numbers = json.loads(run(*given, "--decode", "--policy", "fixed", "--json").output)["fixed"]
    assert numbers["hit_tokens"] == 8 * 1488
    assert numbers["output_tokens"] == 9 * 300
    assert "tokens were in the cache" in run(*given, "--decode").output
