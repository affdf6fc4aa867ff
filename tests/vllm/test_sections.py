"""The section is found under each of its keys, and stands where only the planner that is to read it looks."""

from pathlib import Path
from typing import Any

import pytest

from isochunk.core.errors import ConfigError
from isochunk.vllm import compat
from isochunk.vllm.config import read_config
from isochunk.vllm.sections import KEY, TOP, find_section, given_back, set_apart
from isochunk.vllm.settings import chunk_config, claim_section
from isochunk.vllm.testing import engine_config

ON = {"enabled": True, "smooth_factor": 0.5}
NESTED = {"scheduler_config": {"profiling_chunk_config": ON, "other": 1}, "x": 2}
ON_TOP = {"profiling_chunk_config": ON, "x": 2}
BOTH = {**NESTED, "profiling_chunk_config": {"enabled": True, "smooth_factor": 1.0}}


@pytest.mark.parametrize(("config", "where"), [(NESTED, KEY), (ON_TOP, TOP), (BOTH, KEY)])
def test_each_place_is_read_and_the_nested_one_wins(config: dict[str, Any], where: str) -> None:
    assert find_section(config) == (where, ON)
    assert read_config(config).smooth_factor == 0.5


@pytest.mark.parametrize("config", [NESTED, ON_TOP, BOTH])
def test_set_apart_nobody_else_finds_it_and_isochunk_does_again(config: dict[str, Any]) -> None:
    apart = set_apart(config)
    assert "profiling_chunk_config" not in apart
    assert "profiling_chunk_config" not in apart.get("scheduler_config", {})
    assert apart["x"] == 2
    assert read_config(apart) == read_config(config)
    assert set_apart(apart) == apart
    assert find_section(config)[1] == ON  # what was given is left as it is


@pytest.mark.parametrize("config", [NESTED, ON_TOP, BOTH])
@pytest.mark.parametrize("nested", [True, False])
def test_given_back_it_stands_in_one_place(config: dict[str, Any], nested: bool) -> None:
    back = given_back(set_apart(config), nested=nested)
    assert find_section(back) == (KEY if nested else TOP, ON)
    assert given_back(back, nested=nested) == back


@pytest.mark.parametrize("config", [NESTED, ON_TOP, BOTH])
def test_vllms_configuration_is_made_without_it_and_plans(tmp_path: Path, config: dict[str, Any]) -> None:
    made = engine_config(tmp_path, additional_config=config)
    assert made.scheduler_config.scheduler_cls == "isochunk.vllm.Scheduler"
    assert "profiling_chunk_config" not in str(made.additional_config)
    assert chunk_config(made).smooth_factor == 0.5


@pytest.mark.parametrize("config", [None, {}, {"x": 1}, {"profiling_chunk_config": {"need_timing": False}}])
def test_a_configuration_that_enables_nothing_is_left_as_it_is(config: Any) -> None:
    assert claim_section(config) is config


def test_naming_the_class_by_hand_takes_the_section_too() -> None:
    config = {"profiling_chunk_config": {"need_timing": True}}
    assert claim_section(config, "isochunk.vllm.Scheduler") == {"isochunk": {"need_timing": True}}


def test_of_two_sections_the_one_that_does_not_count_is_said(said: pytest.LogCaptureFixture) -> None:
    claim_section(BOTH)
    assert f"{TOP} is ignored" in said.text


@pytest.mark.parametrize("config", [NESTED, ON_TOP])
def test_errors_name_the_key_that_the_user_wrote(tmp_path: Path, config: dict[str, Any]) -> None:
    where, section = find_section(config)
    wrong = {**section, "smooth_factor": 3}
    given = given_back(config, nested=where == KEY)
    place = given["scheduler_config"] if where == KEY else given
    place["profiling_chunk_config"] = wrong
    with pytest.raises(ConfigError, match=rf"{where}\.smooth_factor = 3"):
        engine_config(tmp_path, additional_config=given)


@pytest.mark.parametrize(
    "keys", [{"smooth_factor": 1}, {"smooth_factor": 0.0}, {"min_chunk": 4096}, {"max_fit_chunk": 6}]
)
def test_what_ascend_documents_is_accepted(keys: dict[str, Any]) -> None:
    assert read_config({"profiling_chunk_config": {"enabled": True, **keys}}).enabled


def test_without_ascend_its_planner_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "ascend_version", lambda: None)
    with pytest.raises(ConfigError, match="vLLM-Ascend is not installed"):
        claim_section({"profiling_chunk_config": {**ON, "planner": "ascend"}})


@pytest.mark.parametrize(
    ("config", "variable", "said"),
    [
        ({}, "1", "VLLM_ASCEND_BALANCE_SCHEDULING=1"),
        ({}, "0", None),
        ({}, "", None),
        ({"enable_balance_scheduling": False}, "1", None),
        ({"enable_balance_scheduling": True}, "0", "additional_config.enable_balance_scheduling"),
        (
            {"scheduler_config": {"enable_balance_scheduling": True}},
            None,
            "additional_config.scheduler_config.enable_balance_scheduling",
        ),
    ],
)
def test_balance_scheduling_is_found_in_keys_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], variable: str | None, said: str | None
) -> None:
    if variable is not None:
        monkeypatch.setenv("VLLM_ASCEND_BALANCE_SCHEDULING", variable)
    assert compat.balance_scheduling(config) == said
    given = {**config, "isochunk": ON}
    if said is None:
        engine_config(tmp_path, additional_config=given)
    else:
        with pytest.raises(ConfigError, match=f"{said} and isochunk exclude each other: balance scheduling replaces"):
            engine_config(tmp_path, additional_config=given)
