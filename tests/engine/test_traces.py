"""vLLM's own spans, exported to a receiver of OTLP: the plan of each request is in its span."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: these tests start real servers")

from isochunk.cli.rehearsed import MODEL_NAME, running_rehearsal
from isochunk.vllm.virtual.rehearsal import Rehearsal

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
