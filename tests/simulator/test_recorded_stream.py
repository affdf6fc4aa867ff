"""The simulator against a stream that was recorded on a real vLLM (``benchmarks/stream.py``)."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.stream import simulated

RECORDING = Path(__file__).parents[2] / "benchmarks/results/stream-smollm2.json"


@pytest.mark.parametrize("arm", ["isochunk", "fixed 1024", "fixed 8192"])
def test_the_mean_ttft_of_30_mixed_prompts_is_simulated_within_a_tenth(arm: str) -> None:
    recording = json.loads(RECORDING.read_text(encoding="utf-8"))
    assert len(recording["lengths"]) == 30
    runs = [run for run in recording["runs"] if run["arm"] == arm]
    assert len(runs) == 2
    told = np.mean([simulated(recording, run) for run in runs])
    assert told == pytest.approx(np.mean([run["ttft_s"] for run in runs]), rel=0.1)
