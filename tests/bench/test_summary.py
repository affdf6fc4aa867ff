import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isochunk.bench.arms import Arm, policy_arms, sweep_arms
from isochunk.bench.results import Comparison, Sample
from isochunk.bench.summary import as_dict, paired_ratio, reference_arm, summarise, verdict

ARMS = tuple(policy_arms(["fixed", "first_chunk", "optimal"], 8192))


def sample(arm, seconds, number=0, tokens=1024, **options):
    record = {"policy": arm.policy, "chunks": [tokens], "predicted_ttft_s": seconds * 0.9, "measured_ttft_s": seconds}
    return Sample(round=number, tokens=tokens, arm=arm, ttft_s=seconds, record=record, **options)


def comparison(samples, arms=ARMS, lengths=(1024,)):
    return Comparison(
        url="http://localhost",
        model="m",
        seed=1,
        arms=tuple(arms),
        lengths=tuple(lengths),
        rounds=5,
        status={"max_num_batched_tokens": 8192},
        samples=tuple(samples),
    )


def rounds(times):
    return [sample(arm, seconds, number) for arm, series in times.items() for number, seconds in enumerate(series)]


def test_ratio_is_paired_by_round():
    # The machine slows down by half from round to round; every pair says 2.
    slow = [sample(ARMS[0], 2.0 * 1.5**i, i) for i in range(5)]
    fast = [sample(ARMS[2], 1.0 * 1.5**i, i) for i in reversed(range(5))]
    ratio = paired_ratio(slow, fast)
    assert (ratio.ratio, ratio.low, ratio.high) == pytest.approx((2, 2, 2))


@given(st.lists(st.floats(0.1, 10), min_size=3, max_size=12))
def test_interval_holds_the_ratio_and_lies_within_the_rounds(times):
    ratio = paired_ratio(
        [sample(ARMS[0], t, i) for i, t in enumerate(times)], [sample(ARMS[2], 1.0, i) for i in range(12)]
    )
    assert min(times) <= ratio.low <= ratio.ratio <= ratio.high <= max(times)


def test_interval_covers_the_truth_about_as_often_as_it_says():
    import numpy as np

    random = np.random.default_rng(1)
    reference = [sample(ARMS[2], 1.0, i) for i in range(15)]
    hits = 0
    for _ in range(200):
        times = 1.3 * np.exp(random.normal(0, 0.1, 15))
        ratio = paired_ratio([sample(ARMS[0], t, i) for i, t in enumerate(times)], reference)
        hits += ratio.low <= 1.3 <= ratio.high
    assert hits / 200 > 0.9


def test_two_rounds_give_no_interval_and_unpaired_ones_no_ratio():
    ratio = paired_ratio([sample(ARMS[0], 2.0, i) for i in range(2)], [sample(ARMS[2], 1.0, i) for i in range(2)])
    assert (ratio.ratio, ratio.low, str(ratio)) == (2.0, None, "2.00")
    assert paired_ratio([sample(ARMS[0], 2.0, 0)], [sample(ARMS[2], 1.0, 1)]) is None


def test_disturbed_samples_are_left_out():
    good = rounds({ARMS[0]: [2.0] * 3, ARMS[2]: [1.0] * 3})
    spoilt = [sample(ARMS[2], 50.0, 0, disturbed="other traffic")]
    row = summarise(comparison(good + spoilt))[1]
    assert (row.samples, row.ttft_s, row.q75_s) == (3, 1.0, 1.0)


def test_prediction_error_is_against_the_time_shown():
    row = summarise(comparison(rounds({ARMS[2]: [1.0, 2.0, 3.0]})))[0]
    assert row.prediction_error == pytest.approx(-0.1)


def test_reference_is_isochunk_or_else_the_first():
    assert reference_arm(ARMS) == Arm("optimal")
    assert reference_arm(ARMS[:2]) == ARMS[0]


@pytest.mark.parametrize(
    ("fixed", "says"),
    [
        ([1.5, 1.6, 1.7], "1.60 times sooner than with vLLM's own fixed size"),
        ([0.5, 0.5, 0.5], "2.00 times later than with vLLM's own fixed size"),
        ([0.9, 1.0, 1.1], "within the noise as soon as with vLLM's own fixed size"),
    ],
)
def test_verdict_says_which_is_sooner(fixed, says):
    text = verdict(comparison(rounds({ARMS[0]: fixed, ARMS[2]: [1.0] * 3})))
    assert text == f"At 1024 tokens, isochunk's first token came {says}; medians of 3 paired rounds."


def test_verdict_names_the_best_fixed_size_of_a_sweep():
    arms = [*ARMS, *sweep_arms([512, 1024], 8192)]
    samples = rounds({arms[0]: [2.0] * 3, arms[2]: [1.0] * 3, arms[3]: [1.2] * 3, arms[4]: [1.1] * 3})
    assert "1.10 times sooner than with the best of 3 fixed sizes (1024)" in verdict(comparison(samples, arms))


def test_verdict_without_samples_says_so():
    assert "nothing to compare" in verdict(comparison([]))


def test_results_are_plain_json():
    data = json.loads(json.dumps(as_dict(comparison(rounds({ARMS[0]: [2.0] * 3, ARMS[2]: [1.0] * 3})))))
    assert data["summary"][0]["ratio"] == {"ratio": 2.0, "low": 2.0, "high": 2.0}
    assert len(data["samples"]) == 6
    assert data["verdict"].startswith("At 1024 tokens")
