import sys
from pathlib import Path

import numpy as np
import pytest

from isochunk.core.errors import ConfigError
from isochunk.core.profile import Profile, load_profile, save_profile
from isochunk.simulator.silicon import Silicon, estimate

pytest.importorskip("aiconfigurator_core", reason="the extra 'silicon' is not installed")

LLAMA = Silicon(system="h100_sxm", model="meta-llama/Meta-Llama-3.1-70B", tensor_parallel=4, stages=4)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return estimate(LLAMA)


def test_the_model_follows_the_measured_kernels_between_its_own_points(profile: Profile) -> None:
    from aiconfigurator_core.sdk.engine import EngineHandle

    engine = EngineHandle.compile(LLAMA.model, LLAMA.system, LLAMA.backend, tp_size=4)
    rng = np.random.default_rng(1)
    off = []
    for _ in range(60):
        chunk, history = int(rng.integers(64, 12_000)), int(rng.integers(0, 110_000))
        true = engine.predict_prefill_latency(1, history + chunk, history) / 1e3 / LLAMA.stages + LLAMA.step_s
        off.append(abs(profile.model.seconds(chunk, history) / true - 1))
    assert np.median(off) < 0.03
    assert max(off) < 0.15


def test_small_steps_take_what_reading_the_weights_takes(profile: Profile) -> None:
    assert profile.model.seconds(1, 0) == pytest.approx(profile.model.seconds(96, 0), rel=0.15)
    assert profile.model.seconds(4096, 0) > 5 * profile.model.seconds(1, 0)


def test_decodes_cost_more_in_larger_batches_and_after_longer_histories(profile: Profile) -> None:
    assert profile.decode is not None
    one, many = profile.decode.step([1], [4096]), profile.decode.step([1] * 64, [4096] * 64)
    far = profile.decode.step([1] * 64, [65_536] * 64)
    assert one < many < far < 64 * one


def test_a_stage_of_twice_as_many_takes_half_beside_the_steps_own_seconds(profile: Profile) -> None:
    other = estimate(Silicon(system=LLAMA.system, model=LLAMA.model, tensor_parallel=4, stages=8))
    whole, half = (p.model.seconds(2048, 8192) - LLAMA.step_s for p in (profile, other))
    assert half == pytest.approx(whole / 2, rel=0.02)


def test_the_profile_says_that_it_is_an_estimate_and_from_what(profile: Profile, tmp_path: Path) -> None:
    save_profile(tmp_path / "p.json", profile)
    again = load_profile(tmp_path / "p.json")
    assert (again.model, again.decode, again.source) == (profile.model, profile.decode, "estimate")
    about = again.fit["estimate"]
    assert "aiconfigurator-core" in about["data"]
    assert "h100_sxm" in about["data"]
    assert 0 <= about["modelled_share"] < 0.5
    assert about["modelled"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"system": "h100"}, "did you mean h100_"),
        ({"system": "abacus"}, "knows .*h200_sxm"),
        ({"backend": "none"}, "--backend none"),
        ({"stages": 0}, "--stages"),
        ({"tensor_parallel": 0}, "--tensor-parallel"),
        ({"longest": 5}, "--longest"),
        ({"step_s": 0}, "--step-seconds"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        estimate(Silicon(**{"system": LLAMA.system, "model": LLAMA.model, **options}))  # type: ignore[arg-type]


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiconfigurator_core.sdk.engine", None)
    with pytest.raises(ConfigError, match=r"pip install 'isochunk\[silicon\]'"):
        estimate(LLAMA)
