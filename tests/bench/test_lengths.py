from random import Random
from statistics import mean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isochunk.bench.lengths import Fixed, Normal, Uniform, parse_lengths
from isochunk.core.errors import ConfigError


def draw(text, count=2000):
    lengths, random = parse_lengths(text), Random(1)
    return [lengths.draw(random) for _ in range(count)]


def test_forms():
    assert parse_lengths("4096") == Fixed(4096)
    assert parse_lengths("uniform:10:20") == Uniform(10, 20)
    assert parse_lengths("normal:100:20:50:200") == Normal(100, 20, 50, 200)


def test_uniform_reaches_both_ends_evenly():
    drawn = draw("uniform:10:13")
    assert sorted(set(drawn)) == [10, 11, 12, 13]
    assert max(drawn.count(n) for n in set(drawn)) < 1.3 * min(drawn.count(n) for n in set(drawn))


def test_normal_has_its_mean_and_deviation():
    drawn = draw("normal:1000:100:1:5000")
    assert mean(drawn) == pytest.approx(1000, abs=10)
    assert stdev(drawn) == pytest.approx(100, rel=0.05)


def test_cut_tails_are_not_heaped_at_the_ends():
    drawn = draw("normal:1000:1000:900:1100")
    assert drawn.count(900) + drawn.count(1100) < 60


@given(st.integers(1, 10**6), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 10**9), st.integers())
def test_normal_stays_between_its_cuts(low, below, above, deviation, seed):
    lengths = parse_lengths(f"normal:{low + below}:{deviation}:{low}:{low + below + above}")
    assert low <= lengths.draw(Random(seed)) <= lengths.longest


@pytest.mark.parametrize(
    "text",
    ["", "many", "0", "-5", "uniform:5", "uniform:9:5", "uniform:0:5", "normal:1:2:3", "gamma:1:2", "1:2", "1.5"],
)
def test_what_is_no_distribution_is_refused(text):
    with pytest.raises(ConfigError, match="input lengths"):
        parse_lengths(text)


@pytest.mark.parametrize("text", ["normal:500:10:1:100", "normal:50:-1:1:100", "normal:50:0:1:100"])
def test_normal_needs_its_mean_inside_and_a_deviation(text):
    with pytest.raises(ConfigError, match="mean must lie"):
        parse_lengths(text)
