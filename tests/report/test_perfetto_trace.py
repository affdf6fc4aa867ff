import json
from itertools import pairwise

from tests.vllm.live.statuses import status

from isochunk.report.trace import trace


def events(told, kind, process):
    return [event for event in told["traceEvents"] if event["ph"] == kind and event["pid"] == process]


def test_every_step_is_on_every_stage_and_no_stage_does_two_at_once():
    given = status(stages=4, prompts=3)
    told = json.loads(json.dumps(trace(given)))
    steps = sum(len(prompt["chunks"]) for prompt in given["prompts"])
    slices = events(told, "X", 1)
    assert len(slices) == 4 * steps
    for stage in range(4):
        mine = sorted((event["ts"], event["dur"]) for event in slices if event["tid"] == stage)
        assert all(start + took <= following + 1e-3 for (start, took), (following, _) in pairwise(mine))


def test_a_step_with_chunks_of_two_prompts_is_one_step():
    given = status(stages=2, prompts=2)
    first, second = given["prompts"]
    second["entered_s"][0], second["measured_s"][0] = first["entered_s"][0], first["measured_s"][0]
    told = trace(given)
    shared = [event for event in events(told, "X", 1) if len(event["args"]["chunks"]) == 2]
    assert len(shared) == 2  # one on each stage
    assert "of cmpl-0" in shared[0]["args"]["chunks"][0]
    assert "of cmpl-1" in shared[0]["args"]["chunks"][1]


def test_a_request_spans_its_chunks():
    given = status(prompts=1)
    told = trace(given)
    whole, *chunks = events(told, "X", 2)
    assert whole["args"]["tokens"] == 32_768
    assert len(chunks) == len(given["prompts"][0]["chunks"])
    assert chunks[0]["ts"] == whole["ts"]
    assert abs(chunks[-1]["ts"] + chunks[-1]["dur"] - whole["ts"] - whole["dur"]) < 1


def test_without_prompts_there_is_an_empty_trace():
    assert events(trace(status(prompts=0)), "X", 1) == []
