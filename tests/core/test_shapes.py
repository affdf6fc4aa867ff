"""Which shape a fit finds: the straight line, a curve, a bend."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.curves import gpu_models
from isochunk import CostModel, fit
from isochunk.core.cost import Bend
from isochunk.core.shapes import LEAST_SIZES, rising_curve, surprise

SIZES = np.array([16, 32, 64, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096], dtype=float)
LATE = np.array([64, 1024, 256, 4096, 64, 2048, 512, 4096, 128, 1024, 4096, 64, 1024, 2048, 4096], dtype=float)
CHUNKS = np.concatenate((SIZES, LATE))
HISTORIES = np.concatenate((0 * SIZES, 64 + np.cumsum(LATE) * 4.0))


@pytest.mark.parametrize("stages", [2, 8])
@pytest.mark.parametrize("name", list(gpu_models(1)))
def test_a_gpus_floor_and_jumps_are_found(name: str, stages: int) -> None:
    true = gpu_models(stages)[name]
    dense = np.arange(64.0, 4097, 32)
    chunks = np.concatenate((dense, LATE))
    histories = np.concatenate((0 * dense, HISTORIES[len(SIZES) :]))
    found = fit(chunks, histories, true.seconds(chunks, histories)).model  # of how noisy they are nothing is known
    assert found.curve is not None
    assert found.seconds(chunks, histories) == pytest.approx(true.seconds(chunks, histories), rel=0.01)
    result = fit(CHUNKS, HISTORIES, true.seconds(CHUNKS, HISTORIES), noise=0.0)
    assert result.model.curve is not None
    assert result.model.seconds(SIZES) == pytest.approx(true.seconds(SIZES), rel=0.01)
    for history in (0.0, 30_000.0, 100_000.0):
        assert result.model.seconds(LATE, history) == pytest.approx(true.seconds(LATE, history), rel=0.03)


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("spread", [0.0, 0.01, 0.05])
def test_noise_is_no_curve(model: CostModel, spread: float, told: bool) -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        seconds = model.seconds(CHUNKS, HISTORIES) * (1 + spread * np.abs(rng.standard_normal(len(CHUNKS))))
        found = fit(CHUNKS, HISTORIES, seconds, noise=spread if told else None).model
        assert found.curve is None


def test_few_sizes_are_no_curve() -> None:
    true = gpu_models(2)["phi-2@h100/tp1"]
    few = np.concatenate((SIZES[: LEAST_SIZES - 1], LATE))
    at = np.concatenate((0 * SIZES[: LEAST_SIZES - 1], HISTORIES[len(SIZES) :]))
    assert fit(few, at, true.seconds(few, at)).model.curve is None


@pytest.mark.parametrize("curved", [True, False])
def test_attention_that_gets_dearer_far_into_a_prompt_is_found(model: CostModel, curved: bool) -> None:
    straight = gpu_models(2)["Llama-2-70b-hf@h100/tp4"] if curved else model
    longest = float(HISTORIES.max())
    true = CostModel(
        straight.c0, straight.c1, straight.c2, straight.c3, curve=straight.curve, bend=Bend(0.3 * longest, 2)
    )
    found = fit(CHUNKS, HISTORIES, true.seconds(CHUNKS, HISTORIES)).model
    assert found.bend is not None
    assert found.seconds(4096, 2 * longest) == pytest.approx(true.seconds(4096, 2 * longest), rel=0.1)


@given(st.lists(st.tuples(st.integers(1, 9000), st.floats(1e-5, 10)), min_size=2, max_size=60))
def test_a_rising_curve_never_falls_and_stays_among_what_was_measured(steps: list[tuple[int, float]]) -> None:
    sizes, seconds = (np.array(column, dtype=float) for column in zip(*steps, strict=True))
    if len(np.unique(sizes)) < 2:
        return
    curve = rising_curve(sizes, seconds)
    assert (np.diff(curve.seconds) >= 0).all()
    assert max(curve.seconds) <= seconds.max() * (1 + 1e-9)


def test_what_repeats_does_not_surprise() -> None:
    jumps = np.where(SIZES > 600, 2.0, 1.0)
    twice = np.concatenate((SIZES, SIZES))
    assert surprise(twice, np.concatenate((jumps, jumps))) == 0
    rng = np.random.default_rng(0)
    assert surprise(SIZES, jumps * rng.lognormal(0, 0.2, len(SIZES))) > 0.05
