import numpy as np
import pytest

from isochunk import CostModel, plan
from isochunk.core.calibrator import Calibrator
from isochunk.core.cost import features
from isochunk.core.planner import evaluate


def serve(calibrator: Calibrator, true: CostModel, tokens: int, noise: float = 0.0, seed: int = 0) -> None:
    """One prompt of ``tokens`` tokens, cut as the present model plans it and measured on the true one."""
    rng = np.random.default_rng(seed)
    chunks = list(plan(calibrator.model or true, tokens, 2, max_chunk=8192, block=16).chunks)
    if calibrator.doubted:
        place = len(chunks) // 2
        chunks[place : place + 1] = [chunks[place] // 2, chunks[place] - chunks[place] // 2]
    at = 0
    for chunk in chunks:
        seconds = true.seconds(chunk, at) * (1 + noise * abs(rng.standard_normal()))
        calibrator.add(features([chunk], [at]), seconds, seed)
        at += chunk


@pytest.mark.parametrize("factor", [0.25, 4.0])
@pytest.mark.parametrize("wrong", ["c0", "c1", "c2", "c3", "all"])
def test_five_long_prompts_mend_a_wrong_model(model: CostModel, wrong: str, factor: float) -> None:
    start = {k: v * factor if wrong in (k, "all") else v for k, v in model.as_dict().items()}
    calibrator = Calibrator(CostModel(**start), window=30)
    for prompt in range(5):
        serve(calibrator, model, 16_000, noise=0.01, seed=prompt)
        calibrator.refit()
    assert calibrator.model is not None
    chosen = plan(calibrator.model, 16_000, 2, max_chunk=8192, block=16)
    real = plan(model, 16_000, 2, max_chunk=8192, block=16)
    at = np.concatenate(([0], np.cumsum(chosen.chunks)[:-1]))
    times = model.seconds(np.array(chosen.chunks, dtype=float), at.astype(float))
    taken = float(times.sum() + times.max())
    assert chosen.ttft_s == pytest.approx(taken, rel=0.1)
    assert taken < 1.1 * real.ttft_s


def test_a_good_model_is_left_alone(model: CostModel) -> None:
    calibrator = Calibrator(model)
    serve(calibrator, model, 16_000, noise=0.01)
    assert calibrator.refit() is None
    assert calibrator.model is model


def test_three_tiny_requests_change_nothing(model: CostModel) -> None:
    calibrator = Calibrator(model)
    for prompt in range(3):
        calibrator.add(features([20], [0]), 5 * model.seconds(20, 0), prompt)
    assert calibrator.refit() is None


def test_noise_without_a_message_changes_nothing(model: CostModel) -> None:
    calibrator = Calibrator(model)
    rng = np.random.default_rng(1)
    for step in range(30):
        calibrator.add(features([500], [500 * step]), model.seconds(500, 500 * step) * rng.lognormal(0, 0.05))
    calibrator.refit()
    chosen = plan(calibrator.model or model, 16_000, 2, block=16)
    assert chosen.target_s == pytest.approx(plan(model, 16_000, 2, block=16).target_s, rel=0.25)


def test_noise_does_not_wear_down_the_step_cost(model: CostModel) -> None:
    rng = np.random.default_rng(0)
    calibrator = Calibrator(model)
    for prompt in range(60):
        serve(calibrator, model.scaled(rng.normal(1, 0.04)), int(rng.choice([2048, 4096, 8192])), 0.04, prompt)
        calibrator.refit()
        assert calibrator.model is not None
        assert calibrator.model.c0 > 0.6 * model.c0


@pytest.mark.parametrize("seed", range(5))
def test_heavy_tailed_noise_on_one_step_in_five_moves_no_coefficient(model: CostModel, seed: int) -> None:
    rng = np.random.default_rng(seed)
    calibrator = Calibrator(model)
    for _ in range(30):
        at = 0
        assert calibrator.model is not None
        for step, chunk in enumerate(plan(calibrator.model, 16_000, 2, max_chunk=8192, block=16).chunks):
            late = 0.3 * abs(rng.standard_t(2)) if step % 5 == 0 else 0.0
            calibrator.add(
                features([chunk], [at]), model.seconds(chunk, at) * (1 + late + 0.01 * rng.standard_normal())
            )
            at += chunk
        calibrator.refit()
        assert calibrator.model.as_dict() == pytest.approx(model.as_dict(), rel=0.1)


def test_drift_is_followed(model: CostModel) -> None:
    slower = model.scaled(1.3)
    calibrator = Calibrator(model)
    for prompt in range(3):
        serve(calibrator, slower, 16_000, noise=0.02, seed=prompt)
    assert calibrator.drift() == pytest.approx(1.3, rel=0.05)
    assert calibrator.refit() is not None
    assert calibrator.model.seconds(1000, 8000) == pytest.approx(slower.seconds(1000, 8000), rel=0.05)


def test_a_first_model_is_learnt_from_traffic_alone(model: CostModel) -> None:
    calibrator = Calibrator(None, window=60)
    at = 0
    for chunk in (64, 64, 256, 256, 1024, 1024, 2048, 64, 64, 256, 256, 1024, 1024):
        calibrator.add(features([chunk], [at]), model.seconds(chunk, at))
        at += chunk
    learnt = calibrator.refit()
    assert learnt is not None
    assert learnt.model.c0 == pytest.approx(model.c0, rel=0.05)


def test_first_chunks_alone_teach_no_first_model(model: CostModel) -> None:
    calibrator = Calibrator(None)
    for chunk in range(100, 2100, 100):
        calibrator.add(features([chunk], [0]), model.seconds(chunk, 0))
    assert calibrator.refit() is None


def test_the_window_is_bounded(model: CostModel) -> None:
    calibrator = Calibrator(model, window=30)
    for _ in range(1000):
        calibrator.add(features([500], [0]), 1.0)
    assert len(calibrator) == 30


def proportions(model: CostModel) -> list[float]:
    return [model.c0 / model.c1, model.c2 / model.c1, model.c3 / model.c1]


@pytest.mark.parametrize("speeds", [[1, 1, 2, 2], [1, 5, 1, 1], [1, 3, 0.5, 1.7]])
def test_a_slow_day_changes_the_speed_and_no_proportion(model: CostModel, speeds: list[float]) -> None:
    calibrator = Calibrator(model)
    for prompt in range(24):
        speed = speeds[prompt % len(speeds)]
        serve(calibrator, model.scaled(speed), 16_000, noise=0.02, seed=prompt)
        calibrator.refit()
        assert calibrator.model is not None
        assert proportions(calibrator.model) == pytest.approx(proportions(model), rel=1e-6)
        assert calibrator.model.seconds(1000, 8000) == pytest.approx(speed * model.seconds(1000, 8000), rel=0.1)
    assert calibrator.proven


def test_many_short_prompts_move_no_proportion(model: CostModel) -> None:
    calibrator = Calibrator(model)
    rng = np.random.default_rng(0)
    for prompt in range(500):
        tokens = int(rng.integers(1, 300))
        calibrator.add(features([tokens], [0]), rng.uniform(1, 2) * model.seconds(tokens, 0), prompt)
        calibrator.refit()
    assert calibrator.model is not None
    assert proportions(calibrator.model) == pytest.approx(proportions(model), rel=1e-6)


@pytest.mark.parametrize("factor", [4.0, 8.0, 20.0])
@pytest.mark.parametrize("work", [1.0, 0.25])
def test_a_step_cost_that_is_too_large_is_unlearnt(model: CostModel, factor: float, work: float) -> None:
    stored = CostModel(factor * model.c0, work * model.c1, work * model.c2, factor * model.c3)
    calibrator = Calibrator(stored)
    for prompt in range(20):
        serve(calibrator, model, 16_000, noise=0.02, seed=prompt)
        calibrator.refit()
    assert calibrator.model is not None
    cut = plan(calibrator.model, 16_000, 2, max_chunk=8192, block=16).chunks
    assert evaluate(model, cut, 2) < 1.03 * plan(model, 16_000, 2, max_chunk=8192, block=16).ttft_s


@pytest.mark.parametrize("factor", [0.9, 1.12, 1.3])
def test_drift_is_followed_under_traffic_of_one_kind_too(model: CostModel, factor: float) -> None:
    calibrator = Calibrator(model)
    for prompt in range(20):
        serve(calibrator, model.scaled(factor), 2048, noise=0.01, seed=prompt)
        calibrator.refit()
    assert calibrator.model is not None
    chosen = plan(calibrator.model, 2048, 2, max_chunk=8192, block=16)
    at = np.concatenate(([0], np.cumsum(chosen.chunks)[:-1])).astype(float)
    times = factor * model.seconds(np.array(chosen.chunks, dtype=float), at)
    assert chosen.ttft_s == pytest.approx(float(times.sum() + times.max()), rel=0.07)
