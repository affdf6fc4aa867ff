"""The probe, the fit and the plan together, in vLLM's own engine loop over stages that take what a model says."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.curves import best_fixed, gpu_models
from isochunk import CostModel
from isochunk.simulator import Deployment, Request
from isochunk.vllm.testing import Engine
from tests.vllm.clocked import _Run

LIMIT = 8192


class Server:
    """vLLM's engine core as the probe and a client see it."""

    def __init__(
        self, make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, true: CostModel, stages: int
    ):
        section = {"enabled": True, "profile": "off", "need_timing": False, "max_probe_seconds": self.SECONDS}
        engine = make_engine(section, max_model_len=65_536, max_num_batched_tokens=LIMIT, pipeline_parallel_size=stages)
        self.run = _Run(engine, Deployment(models=(true,) * stages, max_tokens=LIMIT, block=16), [])
        self.session: Any = engine.scheduler.isochunk
        self.session.controller.use_model(None, None)
        clock = SimpleNamespace(monotonic=lambda: self.run.now, time=lambda: self.run.now)
        for name in ("scheduler", "probe"):
            monkeypatch.setattr(f"isochunk.vllm.{name}.time", clock)

    SECONDS = 30.0

    def has_work(self) -> bool:
        return bool(self.run.batch_queue) or self.run.scheduler.has_requests()

    def is_running(self) -> bool:
        return True

    def step_fn(self) -> None:
        self.run.step_with_batch_queue()

    def serve(self, key: str, tokens: int) -> Any:
        self.run._coming.append(Request(key=key, arrival=self.run.now, tokens=tokens, output=1))
        self.run.result()
        return self.session.as_dict()["prompts"][-1]


@pytest.mark.parametrize("stages", [2, 8])
@pytest.mark.parametrize("name", list(gpu_models(1)))
def test_a_gpus_prompts_take_what_was_predicted_and_no_longer_than_with_the_best_fixed_size(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, name: str, stages: int
) -> None:
    true = gpu_models(stages)[name]
    server = Server(make_engine, monkeypatch, true, stages)
    server.session.start(server)
    assert server.run.now <= server.SECONDS
    assert server.session.controller.model.curve is not None
    for tokens in (1024, 2048, 4096, 8192, 16_384, 32_768):
        told = server.serve(f"p{tokens}", tokens)
        assert told["measured_ttft_s"] == pytest.approx(told["predicted_ttft_s"], rel=0.05)
        assert told["measured_ttft_s"] <= 1.035 * best_fixed(true, stages, tokens, LIMIT)


@pytest.mark.parametrize("stages", [2, 8])
def test_a_slow_machines_probe_ends_in_its_time(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, stages: int
) -> None:
    true = CostModel(0.01, 0.0028, 2.4e-6)  # 100 s for the token limit
    server = Server(make_engine, monkeypatch, true, stages)
    server.session.start(server)
    assert server.run.now <= server.SECONDS + 2 * stages * true.seconds(16)
    if stages == 2:  # on eight stages not even a step with history fits
        assert server.session.controller.model is not None
    assert not server.has_work()
