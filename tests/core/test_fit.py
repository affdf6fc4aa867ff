import math

import numpy as np
import pytest

from isochunk import CostModel, fit
from isochunk.core.errors import FitError
from isochunk.core.fit import fit_features, relative_error

CHUNKS = np.array(
    [64, 64, 256, 256, 1024, 1024, 2048, 4096, 64, 64, 256, 256, 1024, 1024, 2048, 64, 64, 256, 256, 1024.0]
)
HISTORIES = np.concatenate(([0.0], np.cumsum(CHUNKS)[:-1]))


def shares(fitted: CostModel, true: CostModel) -> np.ndarray:
    return np.array(list(fitted.as_dict().values())) / np.array(list(true.as_dict().values()))


def test_exact_times_give_the_exact_model(model: CostModel) -> None:
    result = fit(CHUNKS, HISTORIES, model.seconds(CHUNKS, HISTORIES))
    assert np.allclose(shares(result.model, model), 1, rtol=1e-6)
    assert result.undetermined == ()
    assert result.error < 1e-9


def test_heavy_tailed_noise_on_one_step_in_five_moves_no_coefficient_far(model: CostModel) -> None:
    # Three repeats with the middle one kept, as the probe takes them.
    for seed in range(20):
        rng = np.random.default_rng(seed)
        exact = model.seconds(CHUNKS, HISTORIES)
        repeats = []
        for _ in range(3):
            slow = np.where(rng.random(len(exact)) < 0.2, 1 + 0.3 * np.abs(rng.standard_t(2, len(exact))), 1)
            repeats.append(exact * slow * rng.uniform(1, 1.01, len(exact)))
        result = fit(CHUNKS, HISTORIES, np.median(repeats, axis=0))
        assert np.abs(shares(result.model, model) - 1).max() < 0.1


def test_one_cold_first_step_does_not_move_the_fit(model: CostModel) -> None:
    seconds = model.seconds(CHUNKS, HISTORIES)
    seconds[0] *= 30
    assert np.abs(shares(fit(CHUNKS, HISTORIES, seconds).model, model) - 1).max() < 0.1


def test_step_cost_stays_above_half_of_what_small_chunks_measured(model: CostModel) -> None:
    # Half of the small chunks are lost, and a large one came out far too fast: least squares alone would
    # explain that with a step cost of zero.
    seconds = model.seconds(CHUNKS, HISTORIES)
    seconds[CHUNKS >= 1024] *= 0.6
    result = fit(CHUNKS, HISTORIES, seconds)
    assert result.model.c0 > 0.45 * model.c0


def test_a_small_step_that_looks_far_too_short_does_not_take_the_step_cost_away(model: CostModel) -> None:
    # Seen on a real engine: the exit before was noticed late, and the second small chunk looked like 1.6 ms.
    seconds = model.seconds(CHUNKS, HISTORIES)
    seconds[1] *= 0.25
    assert fit(CHUNKS, HISTORIES, seconds).model.c0 > 0.5 * model.c0


def test_what_the_samples_cannot_tell_is_named(model: CostModel) -> None:
    chunks = np.full(8, 512.0)
    histories = 512.0 * np.arange(8)
    result = fit(chunks, histories, model.seconds(chunks, histories))
    assert {"c0", "c1"} <= set(result.undetermined)


def test_a_prior_fills_in_what_the_samples_cannot_tell(model: CostModel) -> None:
    chunks = np.full(8, 512.0)
    histories = 512.0 * np.arange(8)
    rows = np.stack([np.ones(8), chunks, chunks * (histories + chunks / 2), histories], axis=1)
    result = fit_features(rows, rows @ list(model.as_dict().values()), prior=model)
    assert np.abs(shares(result.model, model) - 1).max() < 0.02
    assert relative_error(result.model, rows, rows @ list(model.as_dict().values())) < 1e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seconds": math.nan}, "sample 3: seconds = nan"),
        ({"seconds": 0.0}, "sample 3: seconds = 0.0 must be finite and above 0"),
        ({"chunk": 0}, "sample 3: chunk = 0.0"),
        ({"history": -1}, "sample 3: history = -1.0"),
        ({"history": math.inf}, "sample 3: history = inf"),
    ],
)
def test_a_bad_sample_is_named(model: CostModel, change: dict[str, float], message: str) -> None:
    columns = {"chunk": CHUNKS.copy(), "history": HISTORIES.copy(), "seconds": model.seconds(CHUNKS, HISTORIES)}
    for name, value in change.items():
        columns[name][2] = value
    with pytest.raises(FitError, match=message):
        fit(**columns)


def test_too_few_samples_are_refused(model: CostModel) -> None:
    with pytest.raises(FitError, match="4 samples are too few"):
        fit(CHUNKS[:4], HISTORIES[:4], model.seconds(CHUNKS[:4], HISTORIES[:4]))


def test_samples_without_history_are_refused(model: CostModel) -> None:
    with pytest.raises(FitError, match="no sample has history"):
        fit(CHUNKS, 0 * HISTORIES, model.seconds(CHUNKS, 0 * HISTORIES))
