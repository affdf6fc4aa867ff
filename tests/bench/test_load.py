import asyncio
import json
from itertools import pairwise

import pytest

from isochunk.bench.client import Server
from isochunk.bench.fake import FakePrefill, serving
from isochunk.bench.lengths import Fixed, Uniform
from isochunk.bench.load import Load, prepare, send
from isochunk.bench.load_summary import line, summarise, warnings
from isochunk.core.cost import CostModel
from isochunk.core.errors import ConfigError

DONE = "data: [DONE]\n\n"


def run(url, load):
    async def main():
        async with Server(url) as server:
            requests = await prepare(server, load)
            return requests, await send(server, requests, load.concurrency)

    return asyncio.run(main())


class Counting(FakePrefill):
    """Notes how many requests are under way when each arrives, and answers none before ``gather`` of them are."""

    def __init__(self, gather=1, **options):
        super().__init__(**options)
        self.under_way = []
        self._here = 0
        self._gather = gather
        self._enough = asyncio.Event()

    async def _answer(self, prompt, output, request_id):
        self._here += 1
        self.under_way.append(self._here)
        if self._here >= self._gather:
            self._enough.set()
        await self._enough.wait()
        async for event in super()._answer(prompt, output, request_id):
            if event == DONE:
                self._here -= 1
            yield event


@pytest.mark.parametrize("concurrency", [1, 4])
def test_no_more_are_under_way_than_asked_for(concurrency):
    fake = Counting(gather=concurrency)
    with serving(fake) as url:
        _, outcomes = run(url, Load(requests=12, lengths=Fixed(500), concurrency=concurrency))
    assert max(fake.under_way) == concurrency
    assert [o.request.tokens for o in outcomes if o.answer] == [500] * 12


def test_rate_sends_when_due_however_many_are_under_way():
    fake = Counting(gather=10)  # it answers when all are there: none may wait for an answer
    with serving(fake) as url:
        _, outcomes = run(url, Load(requests=10, lengths=Fixed(32), concurrency=None, rate=50.0, seed=3))
    assert max(fake.under_way) == 10
    assert min(o.sent_s - o.request.due_s for o in outcomes) >= 0
    assert [o.request.tokens for o in outcomes if o.answer] == [32] * 10


def test_arrivals_are_a_poisson_process(url):
    async def main():
        async with Server(url) as server:
            return await prepare(server, Load(requests=400, lengths=Fixed(4), concurrency=None, rate=20.0, seed=1))

    due = [0.0, *(r.due_s for r in asyncio.run(main()))]
    gaps = [b - a for a, b in pairwise(due)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((g - mean) ** 2 for g in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(1 / 20, rel=0.15)
    assert deviation == pytest.approx(mean, rel=0.2)


def test_same_seed_sends_the_same_load_and_another_one_another(url):
    def bodies(seed):
        load = Load(requests=5, lengths=Uniform(50, 500), concurrency=None, rate=1000.0, seed=seed)
        return [(r.due_s, r.body) for r in run(url, load)[0]]

    assert bodies(1) == bodies(1) != bodies(2)


def test_shared_part_is_shared_and_the_rest_is_not(url):
    requests, outcomes = run(url, Load(requests=4, lengths=Fixed(640), shared=0.5, seed=2))
    prompts = [json.loads(r.body)["prompt"] for r in requests]
    assert len({tuple(p[:320]) for p in prompts}) == 1
    assert len({tuple(p[320:328]) for p in prompts}) == 4
    assert [o.answer.cached_tokens for o in outcomes] == [0, 320, 320, 320]
    assert warnings(outcomes) == []


def test_summary_counts_tokens_and_gaps():
    with serving(FakePrefill(model=CostModel(0.01, 1e-9, 0.0))) as url:
        _, outcomes = run(url, Load(requests=4, lengths=Fixed(100), output_tokens=3))
    summary = summarise(outcomes, cards=2)
    assert (summary["requests"], summary["input_tokens"], summary["output_tokens"]) == (4, 400, 12)
    assert summary["input_tokens_per_s"] == pytest.approx(400 / summary["seconds"])
    assert summary["input_tokens_per_s_per_card"] == pytest.approx(summary["input_tokens_per_s"] / 2)
    assert summary["ttft_s"]["p50"] >= 0.02
    assert summary["gap_s"]["p50"] >= 0.005
    assert summary["ttft_s"]["p50"] <= summary["ttft_s"]["p99"] <= summary["ttft_s"]["max"]
    assert summarise(outcomes, cards=1)["total_s"]["mean"] > summary["ttft_s"]["mean"]


def test_one_output_token_has_no_gaps(url):
    _, outcomes = run(url, Load(requests=1, lengths=Fixed(10)))
    assert summarise(outcomes, 1)["gap_s"] is None


class Flaky(FakePrefill):
    """Fails every second request in the middle."""

    async def _answer(self, prompt, output, request_id):
        if len(self.received) % 2:
            async for event in super()._answer(prompt, output, request_id):
                yield event
        else:
            yield 'data: {"error": {"message": "out of memory"}}\n\n'


def test_failed_requests_are_counted_and_the_others_go_on():
    with serving(Flaky()) as url:
        _, outcomes = run(url, Load(requests=6, lengths=Fixed(10)))
    summary = summarise(outcomes, 1)
    assert (summary["requests"], summary["failed"]) == (3, 3)
    assert "3 of 6 requests failed" in warnings(outcomes)[0]
    assert "out of memory" in warnings(outcomes)[0]
    assert [line(i, o)["ttft_s"] is None for i, o in enumerate(outcomes)] == [False, True] * 3


class Cutting(FakePrefill):
    def _answer(self, prompt, output, request_id):
        return super()._answer(prompt[:30], output, request_id)


def test_interrupted_it_returns_what_has_come_back():
    fake = FakePrefill()

    async def main(url):
        task = asyncio.current_task()
        async with Server(url) as server:
            requests = await prepare(server, Load(requests=50, lengths=Fixed(10)))
            return await send(server, requests, 1, lambda outcome: task.cancel()), server.notes

    with serving(fake) as url:
        outcomes, notes = asyncio.run(main(url))
    assert [outcome.answer is None for outcome in outcomes] == [False]
    assert notes == ["interrupted: 49 of 50 requests are missing"]


def test_cut_prompts_are_said():
    with serving(Cutting()) as url:
        _, outcomes = run(url, Load(requests=2, lengths=Fixed(40)))
    assert warnings(outcomes) == [
        "the server counted other lengths than were sent for 2 prompts; does something cut them?"
    ]


def test_prompts_in_the_cache_are_said(url):
    load = Load(requests=2, lengths=Fixed(40), seed=4)
    run(url, load)
    assert "take another seed" in warnings(run(url, load)[1])[0]


def test_prompts_too_long_for_the_server_are_refused_before_they_are_made():
    fake = FakePrefill(max_model_len=1000)
    with serving(fake) as url, pytest.raises(ConfigError, match="prompts of 999 tokens with 2 tokens of answer"):
        run(url, Load(requests=1, lengths=Uniform(5, 999), output_tokens=2))


@pytest.mark.parametrize(
    "wrong",
    [
        {"requests": 0},
        {"output_tokens": 0},
        {"concurrency": 0},
        {"concurrency": 2, "rate": 1.0},
        {"concurrency": None},
        {"concurrency": None, "rate": 0.0},
        {"concurrency": None, "rate": float("nan")},
        {"shared": 1.0},
        {"shared": -0.1},
    ],
)
def test_values_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError):
        Load(**{"requests": 1, "lengths": Fixed(1)} | wrong)
