import asyncio
import json

import pytest
from spoilt_fakes import Cutting, Decoding, Guarded, Meddling, Shared
from starlette.responses import JSONResponse

from isochunk.bench.calibrate import as_dict, calibrate, verdict
from isochunk.bench.client import Server
from isochunk.bench.fake import FakePrefill, serving
from isochunk.core.cost import CostModel
from isochunk.core.errors import ConfigError, ServerError

TRUTH = CostModel(1e-3, 5e-6, 3e-9, 3e-9)
WRONG = CostModel(2.5e-4, 1.25e-6, 7.5e-10, 7.5e-10)


def run(url, *, tokens=2048, requests=5, seed=1, **options):
    async def main():
        async with Server(url) as server:
            return await calibrate(server, tokens=tokens, requests=requests, seed=seed, **options)

    return asyncio.run(main())


def test_prompts_have_the_exact_length_and_share_no_block(url, fake):
    result = run(url, tokens=777)
    assert [len(prompt) for prompt in fake.received] == [777] * 5
    assert len({tuple(prompt[: fake.block]) for prompt in fake.received}) == 5
    assert [turn.answer.output_tokens for turn in result.turns] == [1] * 5
    assert len(result.clean) == 5


def test_default_length_is_the_longest_that_the_server_takes():
    fake = FakePrefill(max_model_len=1000)
    with serving(fake) as url:
        assert run(url, tokens=None, requests=1).tokens == 999
    assert len(fake.received[0]) == 999


@pytest.mark.parametrize("wrong", [WRONG, CostModel(4e-3, 2e-5, 1.2e-8, 1.2e-8)], ids=["quarter", "fourfold"])
def test_wrong_model_is_corrected_and_both_errors_are_told(wrong):
    with serving(FakePrefill(model=wrong, truth=TRUTH)) as url:
        result = run(url)
    assert result.error(result.before) > 0.5
    assert result.error(result.after) < 0.05
    assert result.moved["refits"] >= 1
    assert (result.before["source"], result.after["source"]) == ("stored", "traffic")
    assert "changed" in verdict(result)
    assert not result.warnings


def test_each_request_is_told_with_the_prediction_it_was_planned_on():
    with serving(FakePrefill(model=WRONG, truth=TRUTH)) as url:
        data = as_dict(run(url))
    first, last = data["requests"][0], data["requests"][-1]
    assert first["predicted_s"] == pytest.approx(first["predicted_before_s"])
    assert first["predicted_s"] < first["engine_s"] / 2
    assert last["predicted_s"] == pytest.approx(last["engine_s"], rel=0.05)
    assert last["ttft_s"] >= last["engine_s"]


def test_true_model_is_left_as_it_was(url):
    result = run(url, tokens=4096)
    assert "refits" not in result.moved
    assert result.before["model"] == result.after["model"]
    assert verdict(result).startswith("The model was left as it was")
    assert not result.warnings


def test_server_that_may_not_learn_is_told_apart():
    with serving(FakePrefill(model=WRONG, truth=TRUTH, need_timing=False)) as url:
        result = run(url)
    assert set(result.moved) == {"steps", "planned"}
    assert len(result.warnings) == 1
    assert "need_timing is off" in result.warnings[0]


def test_too_few_steps_to_learn_from_are_said():
    with serving(FakePrefill(model=WRONG, truth=TRUTH)) as url:
        result = run(url, requests=1, tokens=32)
    assert result.warnings == [
        f"nothing was learnt from {len(result.turns[0].record['chunks'])} steps although the model is far off; "
        "send more or longer prompts (--requests, --tokens)"
    ]


class Unprobed(FakePrefill):
    """Has no cost model: its probe was off."""

    async def _status(self, request):
        told = json.loads((await super()._status(request)).body)
        return JSONResponse(told | {"model": None, "source": None})

    def _record(self, chosen, tokens, cached, entered):
        return super()._record(chosen, tokens, cached, entered) | {"predicted_ttft_s": None}


def test_server_that_has_and_gets_no_model_is_said():
    with serving(Unprobed()) as url:
        result = run(url, requests=2)
    assert verdict(result) == "The server has no cost model and learnt none: vLLM's own chunks are used."
    assert as_dict(result)["requests"][0]["predicted_after_s"] is None


def test_policy_in_force_is_said_switched_and_put_back(url, fake):
    fake.policy, fake.chunk = "fixed", 777
    result = run(url, requests=2)
    assert [turn.record["policy"] for turn in result.turns] == ["optimal"] * 2
    assert (fake.policy, fake.chunk) == ("fixed", 777)
    assert result.warnings == ["the policy was fixed 777; the run used optimal and put it back"]


def test_policy_is_put_back_when_cancelled(url, fake):
    fake.policy, fake.chunk = "first_chunk", 4096

    async def main():
        task = asyncio.current_task()
        async with Server(url) as server:
            return await calibrate(server, tokens=512, requests=99, seed=1, progress=lambda turn: task.cancel())

    result = asyncio.run(main())
    assert len(result.turns) == len(fake.received) == 1
    assert result.warnings[0] == "ended early, 1 prompts are kept: interrupted"
    assert (fake.policy, fake.chunk) == ("first_chunk", 4096)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Decoding, "other traffic on the server"),
        (Cutting, "the server cut a prompt of 2048 tokens to 300"),
        (Meddling, "somebody changed the policy to fixed 640"),
    ],
)
def test_what_spoils_every_prompt_is_said(kind, reason):
    with serving(kind()) as url:
        result = run(url, requests=2)
    assert f"2 x left out: {reason}" in result.warnings
    assert verdict(result) == "No prompt was clean, so nothing can be said about the model."
    assert as_dict(result)["after"]["median_error"] is None


def test_spoilt_prompts_are_left_out_of_the_medians():
    with serving(Shared()) as url:
        result = run(url)
    assert [turn.disturbed for turn in result.turns] == [None] * 3 + ["other traffic on the server", None]
    assert len(result.clean) == 4


def test_prompts_in_the_prefix_cache_are_noticed(url):
    assert not run(url, requests=1, seed=5).warnings
    (warning,) = run(url, requests=1, seed=5).warnings
    assert "prefix hit: 2032 tokens" in warning


def test_guarded_prompts_count_and_are_said():
    with serving(Guarded()) as url:
        result = run(url, requests=2)
    assert len(result.clean) == 2
    assert result.warnings == ["2 x isochunk's guard used vLLM's own chunks after a plan did harm (counted in)"]


def test_busy_server_is_refused(url, fake, monkeypatch):
    monkeypatch.setattr("isochunk.bench.solo._IDLE_SECONDS", 0.1)
    fake.running = 2
    with pytest.raises(ServerError, match="busy with other requests \\(2 running, 0 waiting\\)"):
        run(url)
    assert not fake.received


def test_server_without_isochunk_is_refused():
    fake = FakePrefill(isochunk=False)
    with serving(fake) as url, pytest.raises(ServerError, match="runs no isochunk"):
        run(url)
    assert not fake.received


def test_prompts_elsewhere_than_on_the_server_are_an_error(url, monkeypatch):
    monkeypatch.setattr("isochunk.bench.solo._RECORD_SECONDS", 0.1)

    async def main(other):
        async with Server(url) as server, Server(other) as front:
            await calibrate(server, tokens=512, requests=1, seed=1, front=front)

    with serving(FakePrefill()) as other, pytest.raises(ServerError, match="did a proxy send it to another node"):
        asyncio.run(main(other))


def test_length_beyond_the_server_is_refused_and_nothing_is_sent():
    fake = FakePrefill(max_model_len=2048)
    with serving(fake) as url, pytest.raises(ConfigError, match="length 2048 must be from 1 to 2047"):
        run(url)
    assert not fake.received


def test_no_requests_are_refused(url):
    with pytest.raises(ConfigError, match="requests = 0 must be at least 1"):
        run(url, requests=0)
