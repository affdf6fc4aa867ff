import json

import pytest

from isochunk.core.cost import CostModel
from isochunk.core.errors import WorkloadError
from isochunk.simulator import Deployment, OpenLoop, read_trace, simulate
from isochunk.simulator.trace import PrefixCache


def write(path, *rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


ROW = {"timestamp": 0, "input_length": 1500, "output_length": 5, "hash_ids": [1, 2, 3]}


def test_a_shared_prefix_is_computed_once(tmp_path):
    later = ROW | {"timestamp": 60000, "hash_ids": [1, 2, 9]}
    deployment = Deployment(models=(CostModel(0.01, 1e-5, 1e-10),) * 2)
    result = simulate(deployment, OpenLoop(read_trace(write(tmp_path / "t", ROW, later))))
    assert result.as_dict()["computed_tokens"] == 1500 + 1500 - 1024


def test_the_last_token_of_a_full_hit_is_computed_again():
    cache = PrefixCache()
    cache.store([1, 2])
    assert cache.hit([1, 2], 1024) == 512


def test_the_cache_forgets_the_end_of_a_prefix_before_its_start():
    cache = PrefixCache(capacity=2)
    cache.store([1, 2, 3])
    assert cache.hit([1, 2, 3], 10000) == 1024


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (ROW | {"colour": 1}, "line 2: unknown column 'colour'"),
        (ROW | {"timestamp": -1}, "line 2: timestamp = -1"),
        (ROW | {"input_length": 9000}, "line 2: input_length = 9000 is above the limit of 8000"),
        (ROW | {"input_length": 0}, "line 2: input_length = 0"),
        ({"timestamp": 0}, "line 2: column 'input_length' is missing"),
        ([1], "line 2: a list"),
        (ROW | {"hash_ids": ["x"]}, "line 2: hash_ids"),
    ],
)
def test_a_bad_line_is_named(tmp_path, row, message):
    with pytest.raises(WorkloadError, match=message):
        read_trace(write(tmp_path / "t", ROW, row), max_tokens=8000)


def test_an_empty_or_missing_trace_is_refused(tmp_path):
    with pytest.raises(WorkloadError, match="no requests"):
        read_trace(write(tmp_path / "t"))
    with pytest.raises(WorkloadError, match="can't read"):
        read_trace(tmp_path / "none")
