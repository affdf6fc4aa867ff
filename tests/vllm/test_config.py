from typing import Any

import pytest

from isochunk.core.errors import ConfigError
from isochunk.vllm.config import ChunkConfig, read_config


def section(**keys: Any) -> dict[str, Any]:
    return {"scheduler_config": {"profiling_chunk_config": keys}}


@pytest.mark.parametrize("config", [None, {}, {"scheduler_config": {}}, {"other": 1}, section()])
def test_off_unless_enabled(config: Any) -> None:
    assert read_config(config) == ChunkConfig()
    assert not read_config(config).enabled


def test_all_keys_are_read() -> None:
    keys = {
        "enabled": True,
        "planner": "isochunk",
        "smooth_factor": 0.5,
        "min_chunk": 64,
        "need_timing": False,
        "max_fit_chunk": 60,
        "policy": "first_chunk",
        "profile": "off",
        "max_probe_seconds": 5.0,
        "max_queue_delay": 2.5,
        "least_work_first": 60.0,
        "max_inter_token_latency": 0.2,
    }
    assert read_config(section(**keys)).model_dump() == keys


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"enabled": "yes"}, "enabled = 'yes'"),
        ({"enabled": 1}, "enabled = 1"),
        ({"smooth_factor": 1.5}, "smooth_factor = 1.5.*less than or equal to 1"),
        ({"smooth_factor": -0.1}, "smooth_factor = -0.1.*greater than or equal to 0"),
        ({"smooth_factor": "0.5"}, "smooth_factor = '0.5'"),
        ({"min_chunk": 0}, "min_chunk = 0.*greater than 0"),
        ({"min_chunk": 12.5}, "min_chunk = 12.5"),
        ({"need_timing": None}, "need_timing = None"),
        ({"max_fit_chunk": 5}, "max_fit_chunk = 5.*greater than 5"),
        ({"policy": "best"}, "policy = 'best'.*'optimal', 'first_chunk' or 'fixed'"),
        ({"profile": 3}, "profile = 3"),
        ({"profile": ""}, "profile = ''.*path of a file"),
        ({"profile": "/"}, "profile = '/'.*path of a file"),
        ({"max_probe_seconds": -1.0}, "max_probe_seconds = -1.0.*greater than or equal to 0"),
        ({"max_probe_seconds": float("nan")}, "max_probe_seconds = nan.*finite"),
        ({"max_probe_seconds": "60"}, "max_probe_seconds = '60'"),
        ({"max_queue_delay": -0.5}, "max_queue_delay = -0.5.*greater than or equal to 0"),
        ({"least_work_first": -1.0}, "least_work_first = -1.0.*greater than or equal to 0"),
        ({"least_work_first": True}, "least_work_first = True"),
        ({"max_queue_delay": float("inf")}, "max_queue_delay = inf.*finite"),
        ({"smooth_factor": float("nan")}, "smooth_factor = nan"),
        ({"smoth_factor": 1}, "unknown key 'smoth_factor'; did you mean 'smooth_factor'"),
    ],
)
def test_wrong_values_and_unknown_keys_are_named(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(section(**keys))


@pytest.mark.parametrize(
    "config", [[], {"scheduler_config": 1}, {"scheduler_config": {"profiling_chunk_config": True}}]
)
def test_a_section_that_is_no_object_is_named(config: Any) -> None:
    with pytest.raises(ConfigError, match="object"):
        read_config(config)
