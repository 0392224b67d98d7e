"""Tests of tracing with real processes and a collector: headers of clients, sampling, and collectors that are away."""

import secrets

import grpc
import httpx
import msgspec
import pytest

from fleet.v1 import inference_pb2, inference_pb2_grpc, kserve_pb2, kserve_pb2_grpc
from operators.chart.metric_catalogue import PROCESSES
from tests.support.kvstore.builders import a_short_folder
from tests.support.metric_pages import differences
from tests.support.servers.otlp_collector import CollectedSpan, CollectorMode, OtlpCollector, an_otlp_collector
from tests.support.traced_cluster import TracedCluster, a_traced_cluster
from tests.support.waiting import eventually

pytestmark = pytest.mark.integration

REQUEST, WORKER = "text_completion tiny", "worker aggregated"
BODY = {"model": "tiny", "prompt": "Say something.", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
BAGGAGE = ("baggage", "shop.tier=gold,secret=x")


def a_trace_id() -> str:
    return secrets.token_hex(16)


def traceparent(trace_id: str, *, sampled: bool = True) -> str:
    return f"00-{trace_id}-{'a' * 16}-{1 if sampled else 0:02}"


def baggage_of(spans: list[CollectedSpan]) -> dict[str, object]:
    """Return the members of the baggage that the span of a request shows."""
    (root,) = [span for span in spans if span.name == REQUEST]
    return {key: value for key, value in root.attributes.items() if key.startswith("fleet.baggage.")}


def complete(
    cluster: TracedCluster, headers: dict[str, str] | None = None, *, within: float = 60, **fields
) -> httpx.Response:
    url = f"http://{cluster.http}/v1/completions"
    return httpx.post(url, json={**BODY, **fields}, headers=headers, timeout=within)


def metrics_page(cluster: TracedCluster, process: str) -> str:
    return httpx.get(f"http://{cluster.metrics[process]}/metrics", timeout=60).text


def metric(cluster: TracedCluster, name: str, process: str = "router") -> float:
    """Return a metric of a process; 0 if it has none of this name."""
    for line in metrics_page(cluster, process).splitlines():
        if line.startswith(f"{name} "):
            return float(line.rpartition(" ")[2])
    return 0.0


class World:
    """A cluster with one worker, which samples nothing by itself, and its collector."""

    def __init__(self, collector: OtlpCollector, cluster: TracedCluster) -> None:
        self.collector = collector
        self.cluster = cluster

    def ends_later(self) -> None:
        """Wait until a request that ended now has come to the collector, so that everything before it has come too."""
        trace_id = a_trace_id()
        assert complete(self.cluster, {"traceparent": traceparent(trace_id)}).status_code == 200
        self.collector.wait_for(trace_id, REQUEST, WORKER)


@pytest.fixture(scope="module", params=["grpc", "http"])
def world(request, model_dir):
    with a_short_folder() as folder, an_otlp_collector(folder) as collector:
        tracing = {
            "protocol": request.param,
            "endpoint": collector.grpc if request.param == "grpc" else collector.http,
            "sample_ratio": 0.0,
            "slow_first_token_seconds": 30,
            "baggage": ["shop.tier"],
        }
        records = {"path": f"{folder}/access.jsonl"}
        workers = {"w1": "both"}
        with a_traced_cluster(folder, model_dir, tracing, workers, access_log=True, access_records=records) as cluster:
            yield World(collector, cluster)


def test_sampled_request_is_in_the_collector_and_in_the_log(world):
    trace_id = a_trace_id()
    answer = complete(world.cluster, {"traceparent": traceparent(trace_id), "x-request-id": f"mine-{trace_id}"})
    assert answer.headers["x-request-id"] == f"mine-{trace_id}"

    spans = world.collector.wait_for(trace_id, REQUEST, "placement", "attempt aggregated", WORKER, "prefill", "decode")
    (root,) = [span for span in spans if span.name == REQUEST]
    assert root.parent_id == "a" * 16
    assert root.attributes["fleet.request.id"] == f"mine-{trace_id}"
    assert (root.service, root.instance) == ("fleet-router", "router")
    (log,) = [line for line in world.cluster.log("router").splitlines() if f"mine-{trace_id}" in line]
    assert f"trace={trace_id}" in log


def test_access_record_has_the_trace_id(world):
    trace_id = a_trace_id()
    headers = {"traceparent": traceparent(trace_id, sampled=False), "x-request-id": f"mine-{trace_id}"}
    assert complete(world.cluster, headers).status_code == 200

    def trace_ids():
        lines = (world.cluster.folder / "access.jsonl").read_bytes().splitlines(keepends=True)
        records = [msgspec.json.decode(line) for line in lines if line.endswith(b"\n")]
        return [each["trace_id"] for each in records if each["request_id"] == f"mine-{trace_id}"]

    eventually(lambda: trace_ids() == [trace_id])


def test_unsampled_request_is_not_in_the_collector(world):
    trace_id = a_trace_id()
    assert complete(world.cluster, {"traceparent": traceparent(trace_id, sampled=False)}).status_code == 200
    assert complete(world.cluster).status_code == 200
    before = metric(world.cluster, 'fleet_traces_kept_total{why="sampled"}')
    world.ends_later()
    assert world.collector.trace(trace_id) == []
    assert metric(world.cluster, 'fleet_traces_kept_total{why="sampled"}') == before + 1


def test_failed_request_is_traced_although_it_was_not_sampled(world):
    trace_id = a_trace_id()
    headers = {"traceparent": traceparent(trace_id, sampled=False)}
    late = complete(world.cluster, headers, max_tokens=2000, fleet={"timeout_ms": 1})
    assert late.status_code == 504
    (root,) = [span for span in world.collector.wait_for(trace_id, REQUEST) if span.name == REQUEST]
    assert root.attributes["error.type"] == "deadline_passed"
    assert root.error is not None


def test_refused_request_is_traced_only_if_it_was_sampled(world):
    unsampled, sampled = a_trace_id(), a_trace_id()
    for trace_id in (unsampled, sampled):
        headers = {"traceparent": traceparent(trace_id, sampled=trace_id == sampled)}
        assert complete(world.cluster, headers, model="other").status_code == 404
    (root,) = world.collector.wait_for(sampled, "text_completion other")
    assert root.attributes["error.type"] == "model_not_found"
    assert root.error is not None
    world.ends_later()
    assert world.collector.trace(unsampled) == []


def test_grpc_call_gives_its_trace_by_metadata(world):
    trace_id = a_trace_id()
    message = inference_pb2.GenerateRequest(model="tiny", text="Say something.")
    message.sampling.max_tokens = 4
    metadata = (("traceparent", traceparent(trace_id)), ("tracestate", "a=1"), BAGGAGE)
    with grpc.insecure_channel(world.cluster.grpc) as channel:
        events = list(inference_pb2_grpc.InferenceStub(channel).Generate(message, metadata=metadata, timeout=60))
    spans = world.collector.wait_for(trace_id, REQUEST, WORKER)
    assert {span.state for span in spans if span.service == "fleet-router"} == {"a=1"}
    assert baggage_of(spans) == {"fleet.baggage.shop.tier": "gold"}
    assert events[0].admitted.request_id in {span.attributes.get("fleet.request.id") for span in spans}


def test_kserve_call_gives_its_trace_by_metadata(world):
    trace_id = a_trace_id()
    message = kserve_pb2.ModelInferRequest(model_name="tiny")
    contents = kserve_pb2.InferTensorContents(bytes_contents=[b"Say something."])
    message.inputs.add(name="text_input", datatype="BYTES", shape=[1], contents=contents)
    with grpc.insecure_channel(world.cluster.kserve) as channel:
        stub = kserve_pb2_grpc.GRPCInferenceServiceStub(channel)
        stub.ModelInfer(message, metadata=(("traceparent", traceparent(trace_id)), BAGGAGE), timeout=60)
    assert baggage_of(world.collector.wait_for(trace_id, REQUEST, WORKER)) == {"fleet.baggage.shop.tier": "gold"}


@pytest.mark.parametrize("header", ["garbage", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "0" * 20_000])
def test_unreadable_header_is_counted_and_the_request_served(world, header):
    before = metric(world.cluster, "fleet_traceparents_ignored_total")
    answer = complete(world.cluster, {"traceparent": header, "tracestate": "=" * 1_000, "baggage": "%" * 9_000})
    assert answer.status_code == 200
    assert metric(world.cluster, "fleet_traceparents_ignored_total") == before + 1


def test_header_of_64_kib_is_refused_by_its_size(world):
    answer = complete(world.cluster, {"traceparent": "0" * 65_536})
    assert answer.status_code == 431
    message = inference_pb2.GenerateRequest(model="tiny", text="x")
    with grpc.insecure_channel(world.cluster.grpc) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(
            message, metadata=(("traceparent", "0" * 65_536),), timeout=60
        )
        with pytest.raises(grpc.RpcError) as refused:
            next(call)
    assert refused.value.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
    assert complete(world.cluster).status_code == 200


def test_slow_request_is_traced_over_all_processes(tmp_path, model_dir):
    with a_short_folder() as folder, an_otlp_collector(folder) as collector:
        tracing = {"endpoint": collector.grpc, "sample_ratio": 0.0, "slow_seconds": 0.001}
        with a_traced_cluster(folder, model_dir, tracing, {"w1": "both"}) as cluster:
            trace_id = a_trace_id()
            complete(cluster, {"traceparent": traceparent(trace_id, sampled=False)})
            collector.wait_for(trace_id, REQUEST, "attempt aggregated", WORKER, "prefill", "decode")
            assert metric(cluster, 'fleet_traces_kept_total{why="slow"}') == 1


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize("mode", [CollectorMode.HANGS, CollectorMode.REFUSES])
def test_collector_that_takes_nothing_delays_nothing(model_dir, mode, protocol):
    with a_short_folder() as folder, an_otlp_collector(folder, mode) as collector:
        tracing = {
            "protocol": protocol,
            "endpoint": collector.grpc if protocol == "grpc" else collector.http,
            "sample_ratio": 1.0,
            "timeout_seconds": 0.5,
            "most_waiting": 4,
        }
        with a_traced_cluster(folder, model_dir, tracing, {"w1": "both"}) as cluster:
            for number in range(30):
                prompt = f"{number} says something. " * 20  # long enough for calls at the store node
                assert complete(cluster, prompt=prompt).status_code == 200
                assert metric(cluster, "fleet_traces_waiting") <= 4
            for process in ("router", "w1", "store"):
                dropped = 'fleet_trace_spans_total{result="dropped"}'
                eventually(lambda p=process, d=dropped: metric(cluster, d, p) > 0, otherwise=lambda p=process: p)
                assert "trace collector takes no spans" in cluster.log(process)
            for process, kind in (("w1", "worker"), ("store", "kvstore")):
                assert differences(metrics_page(cluster, process), PROCESSES[kind]) == []

            collector.restart(CollectorMode.TAKES)

            def comes_again() -> bool:
                trace_id = a_trace_id()
                complete(cluster, {"traceparent": traceparent(trace_id)})
                return bool(collector.spans())

            eventually(comes_again)
            cluster.router.terminate()
            assert cluster.router.wait(60) == 0


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_slow_collector_gets_what_its_queue_has_room_for(model_dir, protocol):
    with a_short_folder() as folder, an_otlp_collector(folder, CollectorMode.SLOW) as collector:
        tracing = {
            "protocol": protocol,
            "endpoint": collector.grpc if protocol == "grpc" else collector.http,
            "sample_ratio": 1.0,
            "most_waiting": 4,
            "timeout_seconds": 30,
        }
        with a_traced_cluster(folder, model_dir, tracing, {"w1": "both"}) as cluster:

            def overflows() -> bool:
                for _ in range(6):  # more than the queue holds, in less than one export takes
                    assert complete(cluster).status_code == 200
                assert metric(cluster, "fleet_traces_waiting") <= 4
                return metric(cluster, "fleet_traces_dropped_total") > 0

            eventually(overflows)
            eventually(lambda: metric(cluster, 'fleet_trace_spans_total{result="taken"}') > 0)
            assert metric(cluster, 'fleet_trace_spans_total{result="dropped"}') == 0
            assert collector.spans()


def test_hanging_collector_holds_up_neither_requests_nor_the_end(model_dir):
    with a_short_folder() as folder, an_otlp_collector(folder, CollectorMode.HANGS) as collector:
        tracing = {"endpoint": collector.grpc, "sample_ratio": 1.0, "timeout_seconds": 60}
        with a_traced_cluster(folder, model_dir, tracing, {"w1": "both"}) as cluster:
            for _ in range(5):
                assert complete(cluster, within=30).status_code == 200
            cluster.router.terminate()
            assert cluster.router.wait(30) == 0
