import json

import pytest

from isochunk.core.cost import CostModel
from isochunk.core.errors import WorkloadError
from isochunk.simulator import Deployment, OpenLoop, read_trace, simulate


def write(path, *rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


ROW = {"timestamp": 0, "input_length": 1500, "output_length": 5, "hash_ids": [1, 2, 3]}


def computed(path, **changes):
    deployment = Deployment(models=(CostModel(0.01, 1e-5, 1e-10),) * 2, **changes)
    return simulate(deployment, OpenLoop(read_trace(path))).as_dict()["computed_tokens"]


def test_a_shared_prefix_is_computed_once(tmp_path):
    later = ROW | {"timestamp": 60000, "hash_ids": [1, 2, 9]}
    assert computed(write(tmp_path / "t", ROW, later)) == 1500 + 1500 - 1024


def test_a_hash_id_means_its_prefix_too(tmp_path):
    later = ROW | {"timestamp": 60000, "hash_ids": [2, 1, 3]}
    assert computed(write(tmp_path / "t", ROW, later)) == 2 * 1500


def test_the_same_prompt_again_is_computed_from_its_last_block_on(tmp_path):
    assert computed(write(tmp_path / "t", ROW, ROW | {"timestamp": 60000})) == 1500 + 1500 % 16
    whole = ROW | {"input_length": 1536}
    assert computed(write(tmp_path / "t", whole, whole | {"timestamp": 60000})) == 1536 + 16


def test_prompts_that_wait_find_what_was_computed_meanwhile(tmp_path):
    assert computed(write(tmp_path / "t", *[ROW] * 5), max_tokens=1024) == 1500 + 4 * (1500 % 16)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (ROW | {"colour": 1}, "line 2: unknown column 'colour'"),
        (ROW | {"timestamp": -1}, "line 2: timestamp = -1"),
        (ROW | {"timestamp": "5"}, "line 2: timestamp = '5'"),
        (ROW | {"timestamp": ""}, "line 2: timestamp = ''"),
        (ROW | {"timestamp": None}, "line 2: timestamp = None"),
        (ROW | {"timestamp": True}, "line 2: timestamp = True"),
        (ROW | {"timestamp": float("nan")}, "line 2: timestamp = nan"),
        (ROW | {"timestamp": float("inf")}, "line 2: timestamp = inf"),
        (ROW | {"timestamp": 10**400}, "line 2: timestamp = 1000"),
        (ROW | {"input_length": 9000}, "line 2: input_length = 9000 is above the limit of 8000"),
        (ROW | {"input_length": 0}, "line 2: input_length = 0"),
        (ROW | {"input_length": 1500.0}, "line 2: input_length = 1500.0"),
        (ROW | {"output_length": -1}, "line 2: output_length = -1"),
        (ROW | {"output_length": "many"}, "line 2: output_length = 'many'"),
        ({"timestamp": 0}, "line 2: column 'input_length' is missing"),
        ([1], "line 2: a list"),
        (ROW | {"hash_ids": ["x"]}, "line 2: hash_ids"),
        (ROW | {"hash_ids": [1, 2, True]}, "line 2: hash_ids"),
        (ROW | {"hash_ids": {}}, "line 2: hash_ids"),
    ],
)
def test_a_bad_line_is_named(tmp_path, row, message):
    with pytest.raises(WorkloadError, match=message):
        read_trace(write(tmp_path / "t", ROW, row), max_tokens=8000)


@pytest.mark.parametrize(
    ("hashes", "message"),
    [
        # Prompts of 1500 and 3000 tokens.
        ((range(94), range(188)), "line 1: 94 hash_ids .* a block of 16 tokens would fit the whole trace"),
        (
            (range(3), range(7)),
            "line 2: 7 hash_ids don't fit input_length = 3000.* a block of 448 tokens would fit this line",
        ),
        ((range(1), range(1)), "line 1: 1 hash_ids .* a block of 4096 tokens would fit the whole trace"),
        ((range(15), range(30)), "line 1: 15 hash_ids .* a block of 100 tokens would fit the whole trace"),
        ((range(3000), range(6)), "line 1: 3000 hash_ids .* no block size fits it"),
    ],
)
def test_hash_ids_that_do_not_fit_are_refused_with_the_block_that_would(tmp_path, hashes, message):
    rows = [ROW | {"input_length": 1500 * n, "hash_ids": list(ids)} for n, ids in enumerate(hashes, 1)]
    with pytest.raises(WorkloadError, match=message):
        read_trace(write(tmp_path / "t", *rows))


def test_the_block_of_the_hash_ids_can_be_given(tmp_path):
    row = ROW | {"hash_ids": list(range(94))}
    path = write(tmp_path / "t", row, row | {"timestamp": 60000})
    deployment = Deployment(models=(CostModel(0.01, 1e-5, 1e-10),) * 2)
    assert simulate(deployment, OpenLoop(read_trace(path, block=16))).hit_tokens == 1488
    with pytest.raises(WorkloadError, match="trace block = 0"):
        read_trace(path, block=0)


def test_lines_may_be_unordered_alike_empty_or_windows_and_begin_with_a_byte_order_mark(tmp_path):
    rows = [ROW | {"timestamp": 1.7e12 + ms} for ms in (5000, 0, 0, 2500.5)]
    text = "\r\n\r\n".join(json.dumps(row) for row in rows)
    (tmp_path / "t").write_bytes(b"\xef\xbb\xbf" + text.encode() + b"\r\n")
    requests = read_trace(tmp_path / "t")
    assert [request.arrival for request in requests] == [5.0, 0.0, 0.0, 2.5005]
    assert [request.key for request in OpenLoop(requests).requests] == ["line3", "line5", "line7", "line1"]


def test_a_line_without_hash_ids_shares_nothing(tmp_path):
    bare = {"timestamp": 0, "input_length": 1500}
    assert computed(write(tmp_path / "t", bare, bare, bare | {"hash_ids": []})) == 4500


@pytest.mark.parametrize("text", ["[" * 100_000, "{", '{"timestamp": 0', "1" * 5000, "\x00"])
def test_what_is_no_json_is_named(tmp_path, text):
    (tmp_path / "t").write_text(text)
    with pytest.raises(WorkloadError, match="line 1"):
        read_trace(tmp_path / "t")


def test_an_empty_missing_or_binary_trace_is_refused(tmp_path):
    for content in (b"", b"\n \n", b"\xef\xbb\xbf"):
        (tmp_path / "t").write_bytes(content)
        with pytest.raises(WorkloadError, match="no requests"):
            read_trace(tmp_path / "t")
    (tmp_path / "t").write_bytes(b"\xff\xfe{\x00}\x00")
    for path in ("t", "none", "."):
        with pytest.raises(WorkloadError, match="can't read"):
            read_trace(tmp_path / path)


def test_output_lengths_count_only_on_nodes_that_decode(tmp_path):
    path = write(tmp_path / "t", ROW, ROW | {"output_length": 0}, {"timestamp": 0, "input_length": 7})
    assert [request.output for request in read_trace(path)] == [1, 1, 1]
    assert [request.output for request in read_trace(path, decode=True)] == [5, 1, 1]
