"""Costs of steps that no machine was measured to have, drawn within the range of those that were."""

from __future__ import annotations

import random

import numpy as np

from isochunk.core.cost import Bend, CostModel
from isochunk.core.curve import Curve

__all__ = ["random_model"]

_LIMIT = 8192


def random_model(seed: int) -> CostModel:
    """A floor, tiles, waves, a cliff where graphs end, attention with a bend or without; the same for a seed.

    Seeds below 100 were in sight when constants were chosen, those from 100 on judge.
    """
    draw = random.Random(f"curve {seed}")
    sizes = np.unique(
        np.concatenate((np.arange(16, 1024, 16), np.geomspace(1024, _LIMIT, draw.choice((40, 120))))) // 16 * 16
    )
    token = 10 ** draw.uniform(-6, -4)
    seconds = np.maximum(draw.uniform(30, 700) * token, sizes * token)  # reading the weights, then computing
    tile = draw.choice((32, 64, 128, 256))
    tiled = np.ceil(sizes / tile) * tile
    wave = draw.choice((512, 640, 768, 1056, 1408, 2112))
    lost = draw.uniform(0, 0.5)  # of a wave's time, however little of it is full
    waves = np.ceil(tiled / wave) * wave
    seconds = np.maximum(seconds, token * (lost * waves + (1 - lost) * tiled))
    if draw.random() < 0.5:
        graphs = draw.choice((256, 512, 1024))
        seconds = seconds + np.where(sizes > graphs, draw.uniform(0, 300) * token, 0.0)
    if draw.random() < 0.3:  # large steps are computed better
        seconds = seconds * (1 + draw.uniform(0, 0.3) * (1 - np.minimum(sizes / 2048, 1)))
    seconds = np.maximum.accumulate(seconds) + draw.choice((0.001, 0.004, 0.015))
    pair = token / 10 ** draw.uniform(3.5, 5.5)
    reread = token * draw.choice((0.0, 10 ** draw.uniform(-4, -1.5)))
    bend = Bend(draw.choice((8192, 32_768)), draw.uniform(1.1, 2.0)) if draw.random() < 0.25 else None
    return CostModel.measured(Curve(tuple(sizes.tolist()), tuple(seconds.tolist())), pair, reread, bend)
