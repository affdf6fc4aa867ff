"""What `isochunk demo` decides before it has a server."""

from pathlib import Path

import pytest

from isochunk import CostModel
from isochunk.cli import demo_model
from isochunk.cli.demo import _FEWEST, _MOST, _rounds
from isochunk.core.errors import ConfigError


def test_weights_that_are_not_the_known_ones_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = tmp_path / "weights.gguf"
    weights.write_bytes(b"not these")
    monkeypatch.setattr(demo_model, "_weights", lambda: weights)
    monkeypatch.setenv("ISOCHUNK_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"SHA-256 .* expected .* reinstall"):
        demo_model.demo_model()
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize(("speed", "rounds"), [(0.01, _MOST), (100.0, _FEWEST)])
def test_as_many_rounds_as_fit_the_time(speed: float, rounds: int) -> None:
    model = CostModel(0.005, 20e-6, 20e-9, 0.5e-6).scaled(speed)
    assert _rounds({"model": model.as_dict()}, 60.0) == rounds


def test_without_a_model_there_are_the_fewest_rounds() -> None:
    assert _rounds({"model": None}, 1e6) == _FEWEST
