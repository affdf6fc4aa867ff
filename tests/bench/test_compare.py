import asyncio
from itertools import groupby

import pytest
from spoilt_fakes import Cutting, Decoding, Guarded, Meddling, Shared
from starlette.responses import JSONResponse

from isochunk.bench.arms import Arm, policy_arms, sweep_arms
from isochunk.bench.client import Server
from isochunk.bench.compare import compare, different_arms
from isochunk.bench.fake import FakePrefill, serving
from isochunk.bench.summary import verdict
from isochunk.core.errors import ConfigError, ServerError

ARMS = policy_arms(["fixed", "first_chunk", "optimal"], 8192)


def run(url, *, arms=ARMS, lengths=(512, 2048), rounds=2, seed=1, **options):
    async def main():
        async with Server(url) as server:
            return await compare(server, arms=arms, lengths=lengths, rounds=rounds, seed=seed, **options)

    return asyncio.run(main())


def test_every_arm_is_measured_at_every_length_in_every_round(url):
    result = run(url, rounds=3)
    cells = {(s.round, s.tokens, s.arm) for s in result.clean}
    assert len(cells) == len(result.samples) == 3 * 2 * 3
    assert not result.warnings


def test_order_is_random_and_the_arms_of_one_length_follow_each_other(url):
    result = run(url, rounds=6)
    blocks = [list(block) for _, block in groupby(result.samples, key=lambda s: (s.round, s.tokens))]
    assert [len(block) for block in blocks] == [3] * 12
    assert len({tuple(s.arm for s in block) for block in blocks}) > 1
    assert len({tuple(s.tokens for s in result.samples if s.round == r) for r in range(6)}) > 1


def test_no_prompt_is_sent_twice(url, fake):
    run(url)
    assert len({tuple(prompt) for prompt in fake.received}) == len(fake.received)


def test_chunks_are_those_of_the_arm(url):
    result = run(url, arms=[*sweep_arms([256], 8192), Arm("optimal")], lengths=[1024], rounds=1)
    chunks = {s.arm.label: s.record["chunks"] for s in result.samples}
    assert chunks["fixed 256"] == [256] * 4
    assert chunks["isochunk"] != chunks["fixed 256"]
    assert sum(chunks["isochunk"]) == 1024


def test_policy_is_put_back_at_the_end(url, fake):
    fake.policy, fake.chunk = "fixed", 777
    run(url, rounds=1)
    assert (fake.policy, fake.chunk) == ("fixed", 777)


def test_policy_is_put_back_when_cancelled(url, fake):
    fake.policy, fake.chunk = "first_chunk", 4096

    async def main():
        task = asyncio.current_task()
        async with Server(url) as server:
            return await compare(
                server, arms=ARMS, lengths=[512], rounds=9, seed=1, progress=lambda sample: task.cancel()
            )

    result = asyncio.run(main())
    assert len(result.samples) == 1
    assert result.warnings == ["ended early, 1 samples are kept: interrupted"]
    assert (fake.policy, fake.chunk) == ("first_chunk", 4096)


class Breaking(FakePrefill):
    """From prompt ``first`` on it fails ``times`` prompts, some in the middle and some before their beginning."""

    def __init__(self, first, times):
        super().__init__()
        self.failing = range(first, first + times)

    async def _completions(self, request):
        if len(self.received) in self.failing and len(self.received) % 2:
            self.received.append([])
            return JSONResponse({"error": {"message": "the engine is dead"}}, 500)
        return await super()._completions(request)

    async def _answer(self, prompt, output, request_id):
        if len(self.received) - 1 in self.failing:
            raise RuntimeError("the connection ends here")
        async for event in super()._answer(prompt, output, request_id):
            yield event


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_prompt_that_a_failure_broke_off_is_sent_again():
    with serving(Breaking(first=5, times=2)) as url:
        result = run(url, lengths=[512], rounds=2)
    assert len(result.clean) == len(result.samples) == 6
    assert result.ended is None
    assert len(result.warnings) == 2
    assert all(warning.startswith("sent again after: ") for warning in result.warnings)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_was_measured_before_the_server_failed_for_good_is_kept():
    with serving(Breaking(first=9, times=10**6)) as url:
        result = run(url, lengths=[512], rounds=9, patience_s=0.0)
    assert len(result.samples) == 9 - 3  # three of them warmed the server up
    assert result.warnings[0].startswith("ended early, 6 samples are kept: ")
    assert "At 512 tokens" in verdict(result)


def test_spoilt_samples_are_measured_again():
    with serving(Shared()) as url:
        result = run(url, rounds=3)
    assert len(result.clean) == 3 * 2 * 3
    assert len(result.samples) > len(result.clean)
    assert result.warnings == [f"{len(result.samples) - 18} x left out: other traffic on the server"]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Decoding, "other traffic on the server"),
        (Cutting, "the server cut a prompt of 512 tokens to 300"),
        (Meddling, "somebody changed the policy to fixed 640"),
    ],
)
def test_what_never_stops_is_given_up_and_said(kind, reason):
    with serving(kind()) as url:
        result = run(url, lengths=[512], rounds=1)
    assert not result.clean
    assert result.warnings == [f"9 x left out: {reason}"]


def test_prompts_in_the_prefix_cache_are_noticed(url):
    assert not run(url, lengths=[512], rounds=1, seed=5).warnings
    again = run(url, lengths=[512], rounds=1, seed=5)
    assert "prefix hit" in again.warnings[0]
    assert "another seed" in again.warnings[0]


def test_guarded_prompts_count_and_are_said():
    with serving(Guarded()) as url:
        result = run(url, arms=[Arm("optimal")], lengths=[512], rounds=2)
    assert len(result.clean) == 2
    assert result.warnings == ["2 x isochunk's guard used vLLM's own chunks after a plan did harm (counted in)"]


def test_guard_in_place_of_another_policy_is_a_spoilt_sample():
    with serving(Guarded()) as url:
        result = run(url, arms=policy_arms(["first_chunk"], 8192), lengths=[512], rounds=1)
    assert not result.clean
    assert "guard" in result.warnings[0]


def test_busy_server_is_refused(url, fake, monkeypatch):
    monkeypatch.setattr("isochunk.bench.solo._IDLE_SECONDS", 0.1)
    fake.running = 2
    with pytest.raises(ServerError, match="busy with other requests \\(2 running, 0 waiting\\)"):
        run(url)


def test_length_beyond_the_server_is_refused_before_anything_is_sent():
    fake = FakePrefill(max_model_len=2048)
    with serving(fake) as url, pytest.raises(ConfigError, match="length 2048 must be from 1 to 2047"):
        run(url)
    assert not fake.received


@pytest.mark.parametrize("empty", [{"arms": []}, {"lengths": []}, {"rounds": 0}])
def test_nothing_to_compare_is_refused(url, empty):
    with pytest.raises(ConfigError, match="at least 1 of each"):
        run(url, **empty)


def test_fixed_sizes_that_cannot_differ_are_measured_once():
    arms = [Arm("optimal"), *sweep_arms([512, 1024, 2048, 8192], 8192)]
    assert different_arms(arms, 1024) == [Arm("optimal"), Arm("fixed", 512), Arm("fixed", 8192)]
    assert different_arms(arms, 8193) == arms
