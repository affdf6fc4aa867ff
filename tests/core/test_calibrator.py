import numpy as np
import pytest

from isochunk import CostModel, plan
from isochunk.core.calibrator import Calibrator
from isochunk.core.cost import features


def serve(calibrator: Calibrator, true: CostModel, tokens: int, noise: float = 0.0, seed: int = 0) -> None:
    """One prompt of ``tokens`` tokens, cut as the present model plans it and measured on the true one."""
    rng = np.random.default_rng(seed)
    at = 0
    for chunk in plan(calibrator.model or true, tokens, 2, max_chunk=8192, block=16).chunks:
        seconds = true.seconds(chunk, at) * (1 + noise * abs(rng.standard_normal()))
        calibrator.add(features([chunk], [at]), seconds)
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
    for _ in range(3):
        calibrator.add(features([20], [0]), 5 * model.seconds(20, 0))
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


def special(calibrator: Calibrator, true: CostModel, bend: float, chunk: int, start: int) -> None:
    """Traffic of one kind, on which the machine is ``bend`` off the law."""
    for at in range(start, start + 40 * chunk, chunk):
        calibrator.add(features([chunk], [at]), bend * true.seconds(chunk, at))
    calibrator.refit()


def test_traffic_of_one_kind_does_not_spoil_the_model_for_another(model: CostModel) -> None:
    places = [(c, h) for c in (64, 256, 1024, 4096) for h in (0, 2000, 8000, 30_000)]
    probe = [(features([c], [h]), float(model.seconds(c, h))) for c, h in places]
    calibrator = Calibrator(model, remembered=probe)
    for turn in range(12):
        special(calibrator, model, 1.07 if turn % 2 else 0.94, 256, 8000)
        special(calibrator, model, 0.94 if turn % 2 else 1.07, 2048, 0)
    assert calibrator.model is not None
    for chunk, history in places:
        assert calibrator.model.seconds(chunk, history) == pytest.approx(model.seconds(chunk, history), rel=0.09)
    assert calibrator.model.c1 == pytest.approx(model.c1, rel=0.15)


def test_what_is_remembered_is_bounded_and_odd_steps_are_not(model: CostModel) -> None:
    calibrator = Calibrator(model)
    for step in range(20_000):
        chunk, history = 1 + step % 5000, 97 * step
        calibrator.add(features([chunk], [history]), model.seconds(chunk, history) * (10 if step % 7 == 0 else 1))
    assert len(calibrator._places) <= 64
    rows = np.array([row for row, _ in calibrator._places.values()])
    seconds = np.array([second for _, second in calibrator._places.values()])
    assert (seconds < 1.5 * model.predict(rows)).all()


def test_after_a_false_alarm_the_model_is_what_it_was(model: CostModel) -> None:
    places = [(c, h) for c in (64, 256, 1024, 4096) for h in (0, 2000, 8000, 30_000)]
    probe = [(features([c], [h]), float(model.seconds(c, h))) for c, h in places]
    calibrator = Calibrator(model, remembered=probe)
    calibrator.alarm(CostModel(10 * model.c0, model.c1, model.c2, model.c3))
    for turn in range(3):
        serve(calibrator, model, 16_000, noise=0.01, seed=turn)
        calibrator.refit()
    for chunk, history in places:
        assert calibrator.model is not None
        assert calibrator.model.seconds(chunk, history) == pytest.approx(model.seconds(chunk, history), rel=0.05)


@pytest.mark.parametrize("factor", [0.9, 1.12, 1.3])
def test_drift_is_followed_under_traffic_of_one_kind_too(model: CostModel, factor: float) -> None:
    places = [(c, h) for c in (64, 256, 1024, 4096) for h in (0, 2000, 8000, 30_000)]
    probe = [(features([c], [h]), float(model.seconds(c, h))) for c, h in places]
    calibrator = Calibrator(model, remembered=probe)
    for prompt in range(20):
        serve(calibrator, model.scaled(factor), 2048, noise=0.01, seed=prompt)
        calibrator.refit()
    assert calibrator.model is not None
    chosen = plan(calibrator.model, 2048, 2, max_chunk=8192, block=16)
    at = np.concatenate(([0], np.cumsum(chosen.chunks)[:-1])).astype(float)
    times = factor * model.seconds(np.array(chosen.chunks, dtype=float), at)
    assert chosen.ttft_s == pytest.approx(float(times.sum() + times.max()), rel=0.07)
