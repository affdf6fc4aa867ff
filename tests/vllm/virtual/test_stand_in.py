"""What a rehearsal refuses, and what it lets through."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from isochunk.core.errors import ConfigError
from isochunk.vllm.testing import engine_config
from isochunk.vllm.virtual.rehearsal import Rehearsal
from isochunk.vllm.virtual.stand_in import check

KIMI = Rehearsal(profile="kimi-k2.5-mxfp4@mi355x/pp4tp1")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"enable_lora": True}, "--enable-lora needs real workers"),
        ({"profiler_config": {"profiler": "torch", "torch_profiler_dir": "/tmp"}}, "--profiler-config"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "--speculative-config"),
        ({"pipeline_parallel_size": 8, "max_num_seqs": 8}, r"--stages 8 .* more than the 4 layers"),
    ],
)
def test_what_clocks_cannot_do_is_refused_and_named(tmp_path: Path, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check(engine_config(tmp_path, **options), KIMI)


def test_a_cache_smaller_than_a_prompt_is_refused(tmp_path: Path) -> None:
    small = Rehearsal(profile=KIMI.profile, kv_tokens=4095)
    with pytest.raises(ConfigError, match="--kv-tokens 4095 is less than one prompt of --max-model-len 4096"):
        check(engine_config(tmp_path, max_model_len=4096), small)
    check(engine_config(tmp_path, max_model_len=4096), Rehearsal(profile=KIMI.profile, kv_tokens=4096))


def test_a_connector_that_moves_kv_is_replaced_by_one_that_does_not(tmp_path: Path) -> None:
    config = engine_config(tmp_path, kv_transfer_config={"kv_connector": "ExampleConnector", "kv_role": "kv_producer"})
    check(config, KIMI)
    assert config.kv_transfer_config.kv_connector == "VirtualConnector"
    assert config.kv_transfer_config.kv_role == "kv_producer"
