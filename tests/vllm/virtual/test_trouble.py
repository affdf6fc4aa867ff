from typing import Any

import pytest

from isochunk.core.cost import CostModel
from isochunk.core.errors import ConfigError
from isochunk.vllm.virtual.stages import Stages
from isochunk.vllm.virtual.trouble import KINDS, Cold, Graphs, Noise, Resume, Slow, Stop, Tiles, parse, read

MODEL = CostModel(0.01, 1e-4, 1e-8, 1e-6)


def test_an_option_names_its_trouble() -> None:
    assert parse("slow,stage=2,factor=3,at=10,seconds=5") == Slow(stage=2, factor=3, at=10, seconds=5)
    assert parse("stop") == Stop()
    assert parse("noise,sigma=0.2,tails=0.01") == Noise(sigma=0.2, tails=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_comes_back_from_its_plain_data(kind: str) -> None:
    trouble = KINDS[kind]()
    assert read(trouble.as_dict()) == trouble


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("slo", "'slo' must be one of noise, cold, slow"),
        ("slow,faktor=3", "did you mean 'factor'"),
        ("slow,factor", "'factor' must be NAME=NUMBER"),
        ("slow,factor=fast", "not a number"),
        ("slow,factor=0", "at least 0.01"),
        ("slow,factor=nan", "must be a number"),
        ("stop,stage=1.5", "whole number"),
        ("stop,stage=-1", "at least 0"),
        ("slow,seconds=0", "above 0"),
        ("resume,now=1", "takes none"),
    ],
)
def test_a_wrong_option_is_named(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse(text)


@pytest.mark.parametrize("data", [{}, {"kind": 3}, {"kind": "slow", "factor": "3"}, {"kind": "slow", "factor": True}])
def test_wrong_plain_data_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        read(data)


def test_a_stage_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="below 4"):
        Stages([MODEL] * 4).tell({"kind": "stop", "stage": 4})


def stages(*troubles: Any, speed: float = 1.0) -> Stages:
    return Stages([MODEL] * 2, speed=speed, troubles=troubles)


def test_a_step_takes_the_seconds_of_its_cost_on_every_stage() -> None:
    expected = MODEL.c0 + MODEL.marginal(512, 1024) + MODEL.marginal(1, 300)
    assert stages().seconds([512, 1], [1024, 300]) == pytest.approx([expected] * 2)
    assert stages(speed=4).seconds([512, 1], [1024, 300]) == pytest.approx([expected / 4] * 2)


def test_each_stage_may_have_a_model_of_its_own() -> None:
    other = MODEL.scaled(2)
    first, second = Stages([MODEL, other]).seconds([512], [0])
    assert second == pytest.approx(2 * first)


def test_the_first_steps_are_cold() -> None:
    cold = stages(Cold(steps=2, factor=10))
    plain = stages().seconds([64], [0])[0]
    assert [cold.seconds([64], [0])[0] / plain for _ in range(3)] == pytest.approx([10, 10, 1])


def test_tiles_and_graphs_make_cliffs() -> None:
    tiled = stages(Tiles(tokens=128))
    assert tiled.seconds([129], [0]) == stages().seconds([256], [0])
    assert tiled.seconds([256], [0]) == stages().seconds([256], [0])
    graphed = stages(Graphs(tokens=512, factor=2))
    assert graphed.seconds([512], [0]) == stages().seconds([512], [0])
    assert graphed.seconds([513], [0])[0] == pytest.approx(2 * stages().seconds([513], [0])[0])


def test_noise_differs_from_stage_to_stage_and_repeats_with_its_seed() -> None:
    noisy = stages(Noise(sigma=0.3, tails=0.5, tail=9, seed=1))
    drawn = [noisy.seconds([64], [0]) for _ in range(50)]
    assert all(a != b for a, b in drawn)
    again = stages(Noise(sigma=0.3, tails=0.5, tail=9, seed=1))
    assert drawn == [again.seconds([64], [0]) for _ in range(50)]
    plain = stages().seconds([64], [0])[0]
    assert max(map(max, drawn)) > 5 * plain


def test_timed_trouble_waits_for_the_first_request() -> None:
    there = stages(Stop(stage=1))
    assert there.pipeline.rates() == [1, 1]
    there.begin()
    assert there.pipeline.rates() == [1, 0]
    there.meet(Resume())
    assert there.pipeline.rates() == [1, 1]


def test_resuming_ends_every_trouble() -> None:
    there = stages(Noise(), Cold(), Tiles(), Graphs(tokens=1), Slow(factor=3))
    there.begin()
    there.meet(Resume())
    assert there.seconds([65], [0]) == stages().seconds([65], [0])
    assert there.pipeline.rates() == [1, 1]


def test_a_dead_worker_is_told_to_the_engine() -> None:
    there = stages()
    told = []
    there.on_death(lambda: told.append(True))
    there.tell({"kind": "die", "stage": 1})
    step = there.enter([4096], [0])
    with pytest.raises(RuntimeError, match="stage 1 died"):
        there.pipeline.wait(step, 60)
    there.close()


def test_decodes_have_a_cost_of_their_own_where_the_profile_has_one() -> None:
    decode = CostModel(0.004, 1e-4, 0.0, 1e-8)
    there = Stages([MODEL] * 2, decode=decode)
    assert there.seconds([], [], [1000, 2000])[0] == pytest.approx(decode.step([1, 1], [1000, 2000]))
    mixed = MODEL.step([512], [0]) + decode.marginal(1, 1000)
    assert there.seconds([512], [0], [1000])[0] == pytest.approx(mixed)
    # Without one a decode is a chunk of one token.
    assert stages().seconds([512], [0], [1000]) == stages().seconds([512, 1], [0, 1000])
