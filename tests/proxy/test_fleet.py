from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any, cast

import pytest

from isochunk.proxy.config import NodeSpec, Role, Timeouts
from isochunk.proxy.fleet import Fleet
from isochunk.proxy.nodes import Node, Pool
from isochunk.proxy.upstream import Upstream


class Says:
    """Answers probes as the test has it, in place of HTTP."""

    def __init__(self) -> None:
        self.well = True
        self.status: dict[str, Any] = {}
        self.raw: Any = None

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
        return 200, self.raw if self.raw is not None else self.status


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


ODD: list[Any] = [
    {"model": {"c0": float("inf"), "c1": 1e-5, "c2": 1e-9}},
    {"model": {"c0": float("nan"), "c1": 1e-5, "c2": 1e-9}},
    {"model": {"c0": 1e300, "c1": 1e300, "c2": 1e300}},
    {"model": {"c0": "0.01", "c1": [], "c2": {}}},
    {"model": {"c0": 0.01, "c1": 1e-5, "c2": 1e-9, "curve": [[1, 2], "x"]}},
    {"model": {"c0": 0.01, "c1": 1e-5, "c2": 1e-9, "bend": 7}},
    {"stages": float("inf")},
    {"stages": 10**400},
    {"stages": -1},
    {"stages": "2"},
    {"max_num_batched_tokens": None},
    {"block_size": True},
    {"block_size": 1e308},
    {"source": ["guard"]},
    {"model": []},
    {"model": "x"},
]


@pytest.mark.parametrize("odd", [*ODD, [], "x", 7, None, b"<html>", [{}], {"model": 1}], ids=str)
def test_an_odd_status_never_ends_the_watching_of_a_node(odd: Any) -> None:
    async def run() -> None:
        says = Says()
        fleet = Fleet(cast(Upstream, says), Timeouts(probe_s=0.02), {})
        says.cost(1.0)
        node = await fleet.add(Role.PREFILL, NodeSpec("host", 1))
        assert node is not None
        says.raw = {**says.status, **odd} if odd in ODD else odd
        await fleet._look(node)
        await fleet._look(node)
        assert node.alive
        if node.model is not None:
            assert math.isfinite(node.model.price(1_000_000).ttft_s)
        says.raw = None
        await fleet._look(node)
        assert node.model is not None
        assert node.model.cost.c1 == pytest.approx(1e-5)
        assert not fleet._watchers[node].done()
        await fleet.close()

    asyncio.run(run())


def test_a_changed_description_keeps_a_nodes_backlog() -> None:
    pool = Pool(Role.PREFILL)
    node = pool.add(NodeSpec("host", 1))
    assert node is not None
    with node.load.job(1000, 3.0):
        assert pool.add(NodeSpec("host", 1, kv_tokens=5)) is None
        assert [one.load.tokens for one in pool] == [1000]
        assert node.spec.kv_tokens == 5
