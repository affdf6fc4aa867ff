"""What `isochunk demo` decides before it has a server."""

from pathlib import Path

import pytest

from isochunk import CostModel, plan
from isochunk.cli import demo_model
from isochunk.cli.demo_plan import POLICIES, choose, fitting
from isochunk.cli.machine import Machine
from isochunk.core.errors import ConfigError


def test_weights_that_are_not_the_known_ones_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = tmp_path / "weights.gguf"
    weights.write_bytes(b"not these")
    monkeypatch.setattr(demo_model, "_weights", lambda: weights)
    monkeypatch.setenv("ISOCHUNK_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"SHA-256 .* expected .* reinstall"):
        demo_model.demo_model()
    assert not (tmp_path / "models").exists()


def machine(bfloat16: float, float32: float) -> Machine:
    return Machine(name="x", instructions="y", cores=2, token_s={"bfloat16": bfloat16, "float32": float32})


# Seconds a token and stage: an AMX Xeon, the same limited to AVX2, and an old EPYC with AVX2 (bfloat16 is emulated).
AMX, AVX2, OLD = machine(0.12e-3, 0.7e-3), machine(12e-3, 0.69e-3), machine(25e-3, 2.0e-3)


@pytest.mark.parametrize(
    ("where", "dtype", "longest"), [(AMX, "bfloat16", 8192), (AVX2, "float32", 2048), (OLD, "float32", 1024)]
)
def test_dtype_and_lengths_fit_the_machine(where: Machine, dtype: str, longest: int) -> None:
    chosen = choose(where)
    assert chosen.dtype == dtype
    assert chosen.lengths[-1] == longest
    assert chosen.shortened == (where is not AMX)
    assert chosen.compiled == (where is AMX)
    assert chosen.seconds < 360


@pytest.mark.parametrize("times", [1, 10, 100])
def test_the_slower_the_machine_the_shorter_the_prompts(times: int) -> None:
    slow = machine(25e-3 * times, 2.0e-3 * times)
    assert choose(slow).lengths[-1] <= choose(OLD).lengths[-1]
    assert choose(slow).lengths[0] >= 128


COST = CostModel(0.005, 20e-6, 20e-9, 0.5e-6)


@pytest.mark.parametrize("speed", [0.01, 0.3, 1.0, 4.0, 10.0, 1000.0])
@pytest.mark.parametrize("seconds", [60.0, 180.0])
def test_lengths_and_rounds_fit_the_time(speed: float, seconds: float) -> None:
    model = COST.scaled(speed)
    lengths, rounds = fitting((1024, 4096, 8192), model, seconds)
    one = sum(plan(model, tokens, 2, max_chunk=8192, policy=policy).ttft_s for tokens in lengths for policy in POLICIES)
    assert lengths == (1024, 4096, 8192)[: len(lengths)]
    assert 3 <= rounds <= 8
    assert one * (rounds + 1) <= seconds or (len(lengths), rounds) == (1, 3)
    assert one * (rounds + 2) > seconds or rounds == 8


def test_without_a_model_there_is_the_shortest_length() -> None:
    assert fitting((1024, 4096), None, 1e6) == ((1024,), 3)
