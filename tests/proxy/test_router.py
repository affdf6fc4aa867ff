from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from isochunk.core.cost import CostModel
from isochunk.proxy.config import NodeSpec, Role
from isochunk.proxy.errors import ProxyError
from isochunk.proxy.nodes import Node, Pool
from isochunk.proxy.price import NodeModel
from isochunk.proxy.prompt import Prompt
from isochunk.proxy.router import choose_decode, choose_prefill

FAST = NodeModel(cost=CostModel(0.01, 1e-5, 1e-10), stages=2)
SLOW = NodeModel(cost=CostModel(0.01, 4e-5, 4e-10), stages=2)
PROMPT = Prompt("ids", 4096, 1000, (1, 2, 3))


def pool_of(*models: NodeModel | None, role: Role = Role.PREFILL) -> tuple[Pool, list[Node]]:
    pool = Pool(role)
    nodes = []
    for index, model in enumerate(models):
        node = pool.add(NodeSpec("host", 8000 + index))
        assert node is not None
        node.model, node.alive = model, True
        nodes.append(node)
    return pool, nodes


@contextmanager
def work(*jobs: tuple[Node, int, float]) -> Iterator[None]:
    with ExitStack() as stack:
        for node, tokens, busy_s in jobs:
            stack.enter_context(node.load.job(tokens, busy_s))
        yield


def test_the_faster_node_is_chosen_when_both_are_idle() -> None:
    pool, nodes = pool_of(SLOW, FAST)
    assert {choose_prefill(pool, PROMPT, 10_000).node for _ in range(4)} == {nodes[1]}


def test_a_queue_counts_in_seconds_and_not_in_requests() -> None:
    pool, (long, short) = pool_of(FAST, FAST)
    with work((long, 32_000, 3.0), (short, 1000, 0.1), (short, 1000, 0.1)):
        choice = choose_prefill(pool, PROMPT, 1000)
        assert choice.node is short
        assert choice.ttft_s == pytest.approx(0.2 + FAST.price(1000).ttft_s, rel=0.05)


def test_a_prefix_hit_outweighs_a_short_queue_and_not_a_long_one() -> None:
    pool, (warm, cold) = pool_of(FAST, FAST)
    warm.prefix.add(PROMPT.prints)
    with work((warm, 1000, 0.05)):
        assert choose_prefill(pool, PROMPT, 20_000).node is warm
    with work((warm, 1000, 5.0)):
        assert choose_prefill(pool, PROMPT, 20_000).node is cold


def test_tokens_decide_while_one_node_has_no_model() -> None:
    pool, (known, unknown) = pool_of(FAST, None)
    with work((known, 5000, 0.01)):
        choice = choose_prefill(pool, PROMPT, 1000)
    assert (choice.node, choice.ttft_s) == (unknown, None)


def test_equal_nodes_take_turns() -> None:
    pool, nodes = pool_of(FAST, FAST, FAST)
    chosen = [choose_prefill(pool, PROMPT, 1000).node for _ in range(6)]
    assert [chosen.count(node) for node in nodes] == [2, 2, 2]


def test_a_node_that_failed_is_tried_again_only_when_there_is_no_other() -> None:
    pool, (first, second) = pool_of(FAST, FAST)
    failed = frozenset({first.name})
    assert {choose_prefill(pool, PROMPT, 10, failed).node for _ in range(3)} == {second}
    second.alive = False
    assert choose_prefill(pool, PROMPT, 10, failed).node is first


def test_no_usable_node_is_an_error_that_says_when_to_come_back() -> None:
    pool, nodes = pool_of(FAST, FAST)
    nodes[0].alive = False
    pool.drain(nodes[1].name)
    with pytest.raises(ProxyError, match="none of 2 prefill nodes") as error:
        choose_prefill(pool, PROMPT, 10)
    assert (error.value.status, error.value.retry_after_s) == (503, 2)


def test_decode_goes_to_the_node_with_the_least_tokens_and_requests() -> None:
    pool, (one, other) = pool_of(None, None, role=Role.DECODE)
    with work((one, 5000, 0), (other, 10, 0), (other, 10, 0)):
        assert choose_decode(pool) is other
    with work((one, 100, 0), (other, 10, 0), (other, 10, 0)):
        assert choose_decode(pool) is one


def test_after_a_failing_decode_node_comes_one_that_has_proved_itself() -> None:
    pool, nodes = pool_of(None, None, None, role=Role.DECODE)
    nodes[2].health.well()
    with work((nodes[2], 50_000, 0)):
        assert choose_decode(pool, wary=True) is nodes[2]
        assert choose_decode(pool) is not nodes[2]
        with nodes[0].health.attempt(), nodes[0].health.attempt(), nodes[1].health.attempt() as answered:
            assert choose_decode(pool) is nodes[1]
            with nodes[1].health.attempt():
                assert choose_decode(pool) is nodes[2]
                answered()
                assert choose_decode(pool) is nodes[1]


def test_while_none_has_proved_itself_few_requests_try_each() -> None:
    pool, nodes = pool_of(None, None, role=Role.DECODE)
    with ExitStack() as stack:
        for _ in range(16):
            node = choose_decode(pool, patient=True)
            assert node is not None
            stack.enter_context(node.health.attempt())
            stack.enter_context(node.load.job(1))
        assert choose_decode(pool, patient=True) is None
        assert choose_decode(pool) is not None
    assert choose_decode(pool, patient=True) is not None
    pool.drain(nodes[0].name)
    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(nodes[1].health.attempt())
        assert choose_decode(pool, patient=True) is nodes[1]


def test_the_last_node_is_used_whatever_it_did() -> None:
    pool, nodes = pool_of(FAST, FAST)
    for node in nodes:
        for _ in range(5):
            node.health.failed()
    assert all(node.health.ejected for node in nodes)
    assert choose_prefill(pool, PROMPT, 10).node in nodes


def test_a_load_is_exactly_zero_after_its_last_request() -> None:
    _, (node, _) = pool_of(FAST, FAST)
    with work(*[(node, 3, 0.1)] * 7):
        assert (len(node.load), node.load.tokens) == (7, 21)
    assert (len(node.load), node.load.tokens, node.load.busy_s, node.load.backlog_s()) == (0, 0, 0.0, 0.0)


def test_a_backlog_shrinks_while_its_oldest_request_runs_but_not_past_it() -> None:
    now = [0.0]
    node = Node(NodeSpec("host", 1), Role.PREFILL, clock=lambda: now[0])
    with work((node, 1, 2.0), (node, 1, 3.0)):
        now[0] = 1.5
        assert node.load.backlog_s() == pytest.approx(3.5)
        now[0] = 60
        assert node.load.backlog_s() == pytest.approx(3.0)


def test_a_drained_node_leaves_when_it_is_idle_and_stays_when_added_again() -> None:
    pool, (node, other) = pool_of(FAST, FAST)
    with node.load.job(1), node.hold():
        pool.drain(node.name)
        pool.sweep()
        assert list(pool) == [node, other]
        pool.add(node.spec)
        assert not node.draining
        pool.drain(node.name)
    pool.sweep()
    assert list(pool) == [other]


def test_losing_a_node_ends_the_waits_for_it() -> None:
    async def run() -> None:
        node = Node(NodeSpec("host", 1), Role.DECODE)
        async with asyncio.timeout(60) as timeout:
            with node.wait(timeout):
                node.lost()
                await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        asyncio.run(run())
