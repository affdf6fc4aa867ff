import itertools

import pytest

from isochunk.core.cost import CostModel
from isochunk.core.planner import evaluate, plan

MODEL = CostModel(0.0261, 6.03e-6, 6.5e-10, 5.39e-7)


def uneven(stages, slow, factor=1.2):
    return tuple(MODEL.scaled(factor if stage == slow else 1.0) for stage in range(stages))


def best_of_all_cuts(models, units, unit):
    """Every cut of the prompt at multiples of ``unit``."""
    best = float("inf")
    for inner in itertools.product([False, True], repeat=units - 1):
        ends = [index + 1 for index, cut in enumerate(inner) if cut] + [units]
        chunks = [(b - a) * unit for a, b in zip([0, *ends], ends, strict=False)]
        best = min(best, evaluate(models, chunks))
    return best


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_no_cut_of_a_short_prompt_beats_the_plan(stages, where):
    slow = {"first": 0, "middle": stages // 2, "last": stages - 1}[where]
    models = uneven(stages, slow, 1.5)
    best = best_of_all_cuts(models, 12, 4096)
    assert plan(models, 12 * 4096, block=16).ttft_s <= best * 1.005


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("last", [True, False])
def test_the_tapered_cut_gains_on_the_equal_time_cut(stages, last):
    models = uneven(stages, stages - 1 if last else 0)
    equal = min(evaluate(models, plan(MODEL.scaled(1.2), 131072, n, block=16).chunks) for n in range(2, 2 * stages + 2))
    assert plan(models, 131072, block=16).ttft_s < equal * 0.965


def test_steps_grow_towards_a_slow_last_stage_and_shrink_after_a_slow_first_one():
    growing = plan(uneven(4, 3), 131072, block=16).step_seconds
    shrinking = plan(uneven(4, 0), 131072, block=16).step_seconds
    assert growing[0] < 0.9 * max(growing)
    assert shrinking[-1] < 0.9 * max(shrinking)


def test_an_uneven_plan_keeps_to_limit_and_prompt():
    chunks = plan(uneven(4, 3), 100000, block=16, cached=1600, max_chunk=8192).chunks
    assert sum(chunks) == 98400
    assert max(chunks) <= 8192
