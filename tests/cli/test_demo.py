"""What `isochunk demo` decides before it has a server."""

from pathlib import Path

import pytest

from isochunk import CostModel
from isochunk.cli import demo_model
from isochunk.cli.demo_plan import choose, fitting
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
    ("where", "dtype", "longest"), [(AMX, "bfloat16", 8192), (AVX2, "float32", 4096), (OLD, "float32", 1024)]
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


@pytest.mark.parametrize(("speed", "lengths", "rounds"), [(0.01, 3, 8), (8.0, 3, 3), (30.0, 2, 3), (1000.0, 1, 3)])
def test_as_many_rounds_and_lengths_as_fit_the_time(speed: float, lengths: int, rounds: int) -> None:
    chosen, count = fitting((1024, 4096, 8192), COST.scaled(speed), 180.0)
    assert chosen == (1024, 4096, 8192)[:lengths]
    assert count == rounds or (lengths == 2 and count >= rounds)


def test_without_a_model_there_is_the_shortest_length() -> None:
    assert fitting((1024, 4096), None, 1e6) == ((1024,), 3)
