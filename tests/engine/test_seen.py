"""What people see of a server: spans at a receiver of OTLP, the page in Chromium, metrics, report and explanation."""

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: these tests start real servers")

from typer.testing import CliRunner

from isochunk import CostModel, plan
from isochunk.cli.app import app
from isochunk.cli.rehearsed import MODEL_NAME, running_rehearsal
from isochunk.vllm.virtual.rehearsal import Rehearsal
from tests.vllm.live.browser import browsing

grpc = pytest.importorskip("grpc")
service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

STAGES = 4
PARENT = "0af7651916cd43dd8448eb211c80319c"


class Receiver(grpc.GenericRpcHandler):  # type: ignore[misc]
    """An OTLP collector's trace service; spans named ``llm_request`` arrive in `spans`, their attributes plain."""

    def __init__(self) -> None:
        self.spans: SimpleQueue[dict[str, Any]] = SimpleQueue()

    def service(self, details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(
            self._export,
            request_deserializer=service.ExportTraceServiceRequest.FromString,
            response_serializer=service.ExportTraceServiceResponse.SerializeToString,
        )

    def _export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                if span.name == "llm_request":
                    told = {attribute.key: plain(attribute.value) for attribute in span.attributes}
                    self.spans.put({**told, "trace": span.trace_id.hex()})
        return service.ExportTraceServiceResponse()


def plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [plain(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@pytest.fixture(scope="module")
def receiver() -> Iterator[tuple[Receiver, str]]:
    found = Receiver()
    server = grpc.server(ThreadPoolExecutor(2), handlers=[found])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield found, f"http://127.0.0.1:{port}"
    server.stop(None)


@pytest.fixture(scope="module")
def server(receiver: tuple[Receiver, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("traces")
    options = ["--max-num-batched-tokens", "8192", "--max-model-len", "30000", "--otlp-traces-endpoint", receiver[1]]
    environ = {"ISOCHUNK_CACHE": str(folder), "OTEL_BSP_SCHEDULE_DELAY": "100"}
    with (
        running_rehearsal(
            Rehearsal(profile="kimi-k2.5-mxfp4@mi355x/pp4tp1", speed=20),
            options,
            stages=STAGES,
            log=folder / "log",
            environ=environ,
        ) as url,
        httpx.Client(base_url=url, timeout=300) as client,
    ):
        yield client


@pytest.mark.parametrize("policy", ["optimal", "fixed"])
def test_a_span_says_what_the_status_says_of_its_prompt(
    server: httpx.Client, receiver: tuple[Receiver, str], policy: str
) -> None:
    assert server.post("/isochunk/policy", json={"policy": policy}).status_code == 200
    body = {"model": MODEL_NAME, "prompt": random.choices(range(100, 40_000), k=25_000), "max_tokens": 3}
    trace = {"traceparent": f"00-{PARENT}-b7ad6b7169203331-01", "X-Request-Id": f"one-{policy}"}
    assert server.post("/v1/completions", json={**body, "prompt": body["prompt"][::-1]}).status_code == 200
    assert server.post("/v1/completions", json=body, headers=trace).status_code == 200
    told = [receiver[0].spans.get(timeout=300) for _ in range(2)]
    (span,) = [span for span in told if span["trace"] == PARENT]
    asked = server.get("/isochunk/status", params={"request_id": f"one-{policy}"}).json()
    (record,) = [prompt for prompt in asked["prompts"] if prompt["request_id"]]
    assert span["gen_ai.request.id"] in record["request_id"]
    assert span["isochunk.policy"] == policy
    assert span["isochunk.stages"] == STAGES
    for name in ("chunks", "histories", "tokens", "cached", "alone"):
        assert span[f"isochunk.{name}"] == record[name]
    for name in ("predicted_s", "measured_s", "predicted_ttft_s", "measured_ttft_s"):
        assert span[f"isochunk.{name}"] == pytest.approx(record[name], abs=1e-6)
    assert len(record["chunks"]) > 2


_SEEN = """({
  facts: Object.fromEntries([...document.querySelectorAll('dd')].map((each) => [each.dataset.name, each.innerText])),
  captions: [...document.querySelectorAll('figcaption')].map((each) => each.innerText),
  headline: byId('headline').innerText,
  dots: document.querySelector('.dots').getAttribute('d').split('M').length - 1,
  policy: chosen(),
})"""


def three(value: float) -> str:
    """As the page writes seconds."""
    return f"{float(f'{value:.3g}'):g} s"


def test_the_page_and_the_metrics_show_what_the_status_says(server: httpx.Client, tmp_path: Path) -> None:
    server.post("/isochunk/policy", json={"policy": "optimal"})
    for _ in range(3):
        body = {"model": MODEL_NAME, "prompt": random.choices(range(100, 40_000), k=20_000), "max_tokens": 1}
        assert server.post("/v1/completions", json=body).status_code == 200
    with browsing(tmp_path) as page:
        page.show(f"{server.base_url}/isochunk")
        seen = page.run(_SEEN)
    told = server.get("/isochunk/status").json()
    assert seen["policy"] == told["policy"] == "optimal"
    for name, value in told["counters"].items():
        assert seen["facts"][name] == str(value)
    for name in ("c0", "c1", "c2", "c3"):
        assert float(seen["facts"][name]) == pytest.approx(told["model"][name], rel=1e-3)
    newest = told["prompts"][::-1][: len(seen["captions"])]
    assert len(newest) >= 3
    for caption, record in zip(seen["captions"], newest, strict=True):
        assert caption.startswith(f"{record['tokens']:,} tokens, {record['policy']}, {len(record['chunks'])} chunk")
        assert three(record["measured_ttft_s"]) in caption
        assert f"predicted {three(record['predicted_ttft_s'])}" in caption
    assert f"first token after {three(newest[0]['measured_ttft_s'])}" in seen["headline"]
    assert seen["dots"] == sum(len(record["chunks"]) for record in told["prompts"])
    lines = server.get("/metrics").text.splitlines()
    metrics = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}
    for name, value in told["counters"].items():
        assert metrics[f"isochunk_{name}_total"] == value
    assert metrics["isochunk_prompts_total"] == told["totals"]["prompts"] == len(told["prompts"])
    assert metrics["isochunk_step_seconds_sum"] == pytest.approx(told["totals"]["steps"]["sum"])


def test_a_report_and_an_explanation_are_made_of_a_running_server(server: httpx.Client, tmp_path: Path) -> None:
    page, trace = tmp_path / "r.html", tmp_path / "t.json"
    report = ["report", "--url", str(server.base_url), "-o", str(page), "--trace", str(trace)]
    assert CliRunner().invoke(app, report).exit_code == 0
    told = server.get("/isochunk/status").json()
    assert f"{told['prompts'][-1]['tokens']:,}" in page.read_text()
    slices = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    prefills = [event for event in slices if event["name"].startswith("prefill")]
    assert [event["args"]["measured_ttft_s"] for event in prefills] == [p["measured_ttft_s"] for p in told["prompts"]]
    said = CliRunner().invoke(app, ["explain", "--url", str(server.base_url), "--tokens", "20000", "--json"])
    chosen = plan(CostModel.of(told["model"]), 20_000, STAGES, max_chunk=8192, block=told["alignment"])
    assert json.loads(said.output)["chunks"] == list(chosen.chunks)
