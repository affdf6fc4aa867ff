"""A request's span carries its plan: told by the scheduler, over vLLM's own wire, to vLLM's own span."""

import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import opentelemetry.trace
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, output_processor
from vllm.v1.metrics.stats import IterationStats, RequestStateStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from isochunk.core.errors import ConfigError
from isochunk.vllm import compat
from isochunk.vllm.prompts import PromptRecord
from isochunk.vllm.span import LONGEST, span_attributes
from isochunk.vllm.testing import Engine

ON = {"enabled": True}
TRACED = {"otlp_traces_endpoint": "http://127.0.0.1:9"}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

Make = Callable[..., Engine]


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], tuple[ReadableSpan, ...]]]:
    """What vLLM's tracer exports in this process."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(opentelemetry.trace, "_TRACER_PROVIDER", provider)
    yield exporter.get_finished_spans
    provider.shutdown()


def outputs(engine: Engine) -> list[EngineCoreOutput]:
    """What vLLM's engine core sends of all that is queued, as the front end decodes it."""
    came: list[EngineCoreOutput] = []
    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)

    def answered(output: Any, told: dict[int, EngineCoreOutputs]) -> None:
        for each in told.values():
            came.extend(decoder.decode(encoder.encode(each)).outputs)

    engine.answered = answered  # type: ignore[method-assign]
    engine.run()
    return came


def front_end(output: EngineCoreOutput) -> None:
    """vLLM's own making of the span of a request that ends with this output."""
    state = SimpleNamespace(
        stats=RequestStateStats(arrival_time=1e9),
        prompt_token_ids=[1, 2, 3],
        prompt_embeds=None,
        external_req_id=output.request_id,
        **dict.fromkeys(("top_p", "max_tokens_param", "temperature", "n")),
    )
    processor = output_processor.OutputProcessor(None, log_stats=True, tracing_enabled=True)
    processor.do_tracing(output, state, IterationStats())


def isochunks(span: ReadableSpan) -> dict[str, Any]:
    return {name: value for name, value in (span.attributes or {}).items() if name.startswith("isochunk")}


def test_the_span_of_a_request_carries_its_plan(make_engine: Make, spans: Any) -> None:
    engine = make_engine(ON, **TRACED)
    engine.add("a", list(range(7200)), output_tokens=3)
    came = outputs(engine)
    assert len(came) == 3
    front_end(came[-1])
    (span,) = spans()
    (record,) = engine.scheduler.isochunk.as_dict()["prompts"]
    assert span.name == "llm_request"
    assert span.attributes["gen_ai.request.id"] == "a"
    assert isochunks(span)["isochunk.chunks"] == tuple(record["chunks"])
    assert isochunks(span)["isochunk.policy"] == "optimal"
    assert isochunks(span)["isochunk.predicted_ttft_s"] == pytest.approx(record["predicted_ttft_s"], abs=1e-6)
    assert isochunks(span)["isochunk.measured_ttft_s"] == pytest.approx(record["measured_ttft_s"], abs=1e-6)
    assert isochunks(span)["isochunk.stages"] == 2


def test_whoever_ends_the_answer_the_plan_is_there(make_engine: Make, spans: Any) -> None:
    """A stop string is found by the front end, in an output that is not the engine's last."""
    engine = make_engine(ON, **TRACED)
    engine.add("a", list(range(5000)), output_tokens=9)
    for output in outputs(engine):
        front_end(output)
    assert len({isochunks(span)["isochunk.chunks"] for span in spans()}) == 1


def test_the_callers_trace_goes_on(make_engine: Make, spans: Any) -> None:
    engine = make_engine(ON, **TRACED)
    engine.add("a", list(range(3000)))
    engine.scheduler.requests["a"].trace_headers = {"traceparent": PARENT}
    (output,) = outputs(engine)
    front_end(output)
    (span,) = spans()
    assert format(span.context.trace_id, "032x") == PARENT.split("-")[1]
    assert isochunks(span)["isochunk.steps"] > 1
    assert output.trace_headers == {"traceparent": PARENT}


def test_a_request_without_a_caller_has_no_trace_headers_left(make_engine: Make, spans: Any) -> None:
    engine = make_engine(ON, **TRACED)
    engine.add("a", list(range(3000)))
    (output,) = outputs(engine)
    front_end(output)
    assert output.trace_headers is None
    (span,) = spans()
    assert span.parent is None


def test_the_fixed_policy_is_told_too(make_engine: Make, spans: Any) -> None:
    engine = make_engine({**ON, "policy": "fixed"}, **TRACED)
    engine.add("a", list(range(5000)))
    front_end(outputs(engine)[-1])
    (span,) = spans()
    assert isochunks(span)["isochunk.policy"] == "fixed"
    assert isochunks(span)["isochunk.chunks"] == (2048, 2048, 904)


@pytest.mark.parametrize(("section", "options"), [(ON, {}), (None, TRACED)])
def test_without_tracing_or_isochunk_outputs_are_vllms_own(
    make_engine: Make, section: dict[str, Any] | None, options: dict[str, Any]
) -> None:
    engine = make_engine(section, **options)
    engine.add("a", list(range(3000)))
    (output,) = outputs(engine)
    assert output.trace_headers is None


@pytest.mark.parametrize("told", ["", "{", "[1]", "7", "null", None, 3])
def test_what_cannot_be_read_leaves_the_span_as_it_is(make_engine: Make, spans: Any, told: Any) -> None:
    make_engine(ON, **TRACED)
    front_end(EngineCoreOutput(request_id="a", new_token_ids=[7], trace_headers={"isochunk": told}))
    (span,) = spans()
    assert isochunks(span) == {}
    assert span.attributes["gen_ai.request.id"] == "a"


def test_an_error_in_telling_does_not_stop_the_answer(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(ON, **TRACED)
    monkeypatch.setattr("isochunk.vllm.scheduler.span_attributes", lambda *_: 1 / 0)
    engine.add("a", list(range(3000)))
    (output,) = outputs(engine)
    assert output.finished
    assert engine.scheduler.isochunk.health.reasons == {"telling the span of a request": 1}


def test_a_vllm_that_makes_its_spans_otherwise_serves_and_says_so(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(output_processor.OutputProcessor, "do_tracing")
    with pytest.raises(ConfigError, match=r"no OutputProcessor.do_tracing"):
        compat.add_to_spans()
    engine = make_engine(ON, **TRACED)
    assert "will not carry their plans" in said.text
    engine.add("a", list(range(3000)))
    assert outputs(engine)[-1].finished


def test_what_is_told_is_small_however_long_the_prompt() -> None:
    record = PromptRecord(request_id="a", policy="fixed", chunk=512, cached=0, predicted_ttft_s=None)
    record.chunks = [512] * 5000
    record.histories = list(range(0, 512 * 5000, 512))
    record.predicted_s = record.measured_s = [1 / 3] * 5000
    told = span_attributes(record, 16)
    assert told["isochunk.steps"] == 5000
    assert len(told["isochunk.chunks"]) == LONGEST
    assert "isochunk.predicted_ttft_s" not in told
    assert len(json.dumps(told)) < 4000
