from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import pytest

from isochunk.proxy.config import NodeSpec, Role, Timeouts
from isochunk.proxy.fleet import Fleet
from isochunk.proxy.nodes import Node
from isochunk.proxy.upstream import Upstream


class Says:
    """Answers probes as the test has it, in place of HTTP."""

    def __init__(self) -> None:
        self.well = True
        self.status: dict[str, Any] = {}

    def cost(self, factor: float, source: str = "traffic") -> None:
        model = {"c0": 0.01 * factor, "c1": 1e-5 * factor, "c2": 1e-9 * factor, "c3": 0.0}
        self.status = {
            "model": model,
            "source": source,
            "stages": 2,
            "max_num_batched_tokens": 8192,
            "block_size": 16,
        }

    async def get(self, url: str, headers: Mapping[str, str], timeout: float) -> tuple[int, Any]:
        if not self.well:
            raise OSError("connection refused")
        return 200, self.status


def c1_after(*tells: tuple[float, str] | None) -> float:
    """What the proxy thinks a token costs after these answers; the first says 1, and None is a node that is down."""

    async def run() -> float:
        says = Says()
        fleet = Fleet(cast(Upstream, says), Timeouts(probe_s=0.02), {})
        says.cost(1.0)
        node = await fleet.add(Role.PREFILL, NodeSpec("host", 1))
        assert isinstance(node, Node)
        for tell in tells:
            says.well = tell is not None
            if tell:
                says.cost(*tell)
            await fleet._look(node)
        await fleet.close()
        assert node.model is not None
        return node.model.cost.c1 / 1e-5

    return asyncio.run(run())


def test_a_refit_is_followed_little_by_little() -> None:
    assert 1.0 < c1_after((1.3, "traffic")) < 1.02
    assert c1_after(*[(1.3, "traffic")] * 100) == pytest.approx(1.3, rel=0.02)


def test_a_large_change_is_believed_at_once_but_not_an_alarm() -> None:
    assert c1_after((3.0, "traffic")) == pytest.approx(3.0)
    assert c1_after((3.0, "guard")) == pytest.approx(1.0)
    assert c1_after((3.0, "guard"), (3.0, "traffic")) == pytest.approx(3.0)


def test_a_node_that_was_down_is_known_afresh() -> None:
    assert c1_after(None, (1.3, "traffic")) == pytest.approx(1.3)
    assert c1_after(None, (3.0, "guard")) == pytest.approx(3.0)
