from pathlib import Path
from typing import Any

import pytest

from isochunk.core.cost import CostModel
from isochunk.core.errors import ConfigError, ProfileError
from isochunk.core.profile import Profile, save_profile
from isochunk.core.published import published_profiles
from isochunk.vllm.virtual.rehearsal import VARIABLE, Rehearsal, rehearsal_of

KIMI = "kimi-k2.5-mxfp4@mi355x/pp4tp1"


def test_vllms_processes_read_what_was_written() -> None:
    rehearsal = Rehearsal(profile=KIMI, speed=4, hand_over=0.001, kv_tokens=9000, troubles=("stop,stage=1",))
    assert rehearsal_of(rehearsal.as_environ()) == rehearsal
    assert rehearsal_of({}) is None
    assert rehearsal_of({VARIABLE: ""}) is None


@pytest.mark.parametrize("name", published_profiles())
def test_published_models_are_there_by_name(name: str) -> None:
    stages = Rehearsal(profile=name).stages(8)
    assert len(stages.models) == 8
    assert stages.models[0].c0 > 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"speed": 0}, "--speed"),
        ({"hand_over": -1}, "--hand-over"),
        ({"back": float("nan")}, "--return-time"),
        ({"kv_tokens": 0}, "--kv-tokens"),
        ({"answer_tokens": 0}, "--answer-tokens"),
        ({"troubles": ("slow,stage=x",)}, "--trouble"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Rehearsal(profile=KIMI, **options)


def test_a_name_that_is_none_is_met_with_the_nearest() -> None:
    with pytest.raises(ProfileError, match=f"did you mean {KIMI}"):
        Rehearsal(profile="kimi-k2.5-mxfp4@mi355x").stages(4)


def test_a_file_that_is_no_profile_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text("{}")
    with pytest.raises(ProfileError, match=r"p\.json is not an isochunk profile"):
        Rehearsal(profile=str(tmp_path / "p.json")).stages(4)


def test_stage_models_must_be_as_many_as_stages(tmp_path: Path) -> None:
    model = CostModel(0.01, 1e-5, 1e-9)
    models = (model, model.scaled(2), model)
    save_profile(tmp_path / "p.json", Profile(model=model, stage_models=models))
    rehearsal = Rehearsal(profile=str(tmp_path / "p.json"))
    assert rehearsal.stages(3).models == models
    with pytest.raises(ConfigError, match="models of 3 stages"):
        rehearsal.stages(4)


def test_trouble_for_a_stage_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="--trouble stop,stage=4: stage = 4 must be below 4"):
        Rehearsal(profile=KIMI, troubles=("stop,stage=4",)).stages(4)


def test_other_costs_are_another_deployment() -> None:
    keys = {
        Rehearsal(profile=name, speed=speed, hand_over=hand_over).key()
        for name in published_profiles()
        for speed in (1, 2)
        for hand_over in (0, 0.001)
    }
    assert len(keys) == 4 * len(published_profiles())
    assert Rehearsal(profile=KIMI).key() == Rehearsal(profile=KIMI, kv_tokens=5).key()
