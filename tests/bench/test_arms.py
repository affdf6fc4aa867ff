from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isochunk.bench.arms import Arm, policy_arms, powers_of_two, sweep_arms
from isochunk.core.errors import ConfigError


def test_policies_get_the_servers_own_size():
    assert policy_arms(["fixed", "optimal"], 4096) == [Arm("fixed", 4096), Arm("optimal")]


def test_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'best' must be one of optimal, first_chunk, fixed"):
        policy_arms(["best"], 4096)


@pytest.mark.parametrize("size", [0, 4097])
def test_size_beyond_a_step_is_refused(size):
    with pytest.raises(ConfigError, match=rf"fixed size {size} must be from 1 to 4096"):
        sweep_arms([256, size], 4096)


@given(st.integers(1, 10**6))
def test_sweep_doubles_up_to_the_largest(largest):
    sizes = powers_of_two(largest)
    assert sizes[-1] == largest
    assert all(a < b <= 2 * a for a, b in pairwise(sizes))
    sweep_arms(sizes, largest)


def test_labels_name_the_rule_and_its_size():
    arms = (Arm("optimal"), Arm("fixed", 512), Arm("first_chunk", 8192))
    assert [arm.label for arm in arms] == ["isochunk", "fixed 512", "first chunk 8192"]
