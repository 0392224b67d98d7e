"""Conformance suite for endpoint pickers: Fleet's picker passes, and each fault of a picker fails the right case."""

import asyncio
import itertools
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from fleet.v1 import ext_proc_pb2 as pb
from tests.kube.picker.cases import EMPTY_CASES, READY_CASES
from tests.kube.picker.client import DESTINATION, METADATA, PROCESS, SERVED, SUBSET, SUBSET_METADATA, PickerOptions
from tests.kube.picker.suite import CaseOutcome, run_suite
from tests.support.gateway.endpoint_pickers import a_joined_endpoint, a_picker_setup
from tests.support.gateway.envoy import fields

OPTIONS = PickerOptions(overload=80, seconds=60)
WORKERS = tuple(a_joined_endpoint(f"d{each}", f"10.0.0.{each}:8000", max_running=16) for each in (1, 2, 3))
LIMITS = {"picker": {"wait_seconds": 0.2, "fallbacks": 2}, "oversubscribe": 1.0}
POOL = ["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"]
STRANGER = "192.0.2.9:8000"


def named(report, outcome):
    return {each.name: each.detail for each in report.cases if each.outcome is outcome}


async def test_fleets_picker_passes_every_case(model_dir):
    async with a_picker_setup(model_dir, *WORKERS, **LIMITS) as world:
        report = await run_suite(world.picker.address, OPTIONS)

        assert named(report, CaseOutcome.FAILED) == named(report, CaseOutcome.SKIPPED) == {}
        assert report.passed == len(READY_CASES)
        assert sorted(report.endpoints) == ["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"]
        await world.idle()


async def test_fleets_picker_without_workers_passes(model_dir):
    async with a_picker_setup(model_dir) as world:
        report = await run_suite(world.picker.address, OPTIONS, empty=True)

    assert report.passed == len(EMPTY_CASES)


async def test_command_writes_a_report_and_exits_by_the_result(model_dir):
    async def command(*arguments):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.kube.picker", *arguments, "--json", "-", stdout=asyncio.subprocess.PIPE
        )
        output, _ = await process.communicate()
        return process.returncode, json.loads(output)

    async with a_picker_setup(model_dir, *WORKERS, **LIMITS) as world:
        address = world.picker.address
        code, report = await command("--address", address, "--overload", "80", "--seconds", "60")
        assert (code, report["failed"], report["skipped"]) == (0, 0, 0)
        code, report = await command("--address", address, "--empty", "--seconds", "60")
        assert (code, report["passed"], report["failed"]) == (1, 1, 2), "its pool is not empty"


async def test_absent_picker_fails_every_case_and_hangs_none():
    report = await run_suite("127.0.0.1:1", PickerOptions(seconds=5))

    assert report.passed == 0
    assert "UNAVAILABLE" in named(report, CaseOutcome.FAILED)["body_goes_on_whole"]


class RoundRobinPicker:
    """Implements a picker that names the endpoints of its pool in turn, and that has one fault on request."""

    def __init__(self, fault="", pool=POOL, capacity=40):
        self.fault = fault
        self.pool = pool
        self.capacity = capacity
        self.turn = itertools.count()
        self.running = 0
        self.one_at_a_time = asyncio.Lock()

    def endpoints(self, message, headers):
        spaces = message.metadata_context.filter_metadata
        if not self.pool and self.fault == "places requests on nothing":
            return [STRANGER]
        start = next(self.turn) % max(1, len(self.pool))
        pool = [*self.pool[start:], *self.pool[:start]]
        if SUBSET_METADATA in spaces and self.fault != "ignores the subset":
            allowed = [each.string_value for each in spaces[SUBSET_METADATA].fields[SUBSET].list_value.values]
            if self.fault == "believes the subset":
                return allowed
            if self.fault == "knows all of a subset or none" and not set(allowed) <= set(pool):
                return []
            pool = [each for each in pool if each in allowed]
            if self.fault == "leaves the subset for fallbacks" and pool:
                return [*pool, STRANGER]
        if self.fault == "believes the client" and DESTINATION in headers:
            return [headers[DESTINATION]]
        if self.fault == "repeats an endpoint":
            return pool[:1] * 2
        if self.fault == "names hosts":
            return ["worker-1:8000"]
        if self.fault == "falls back to strangers":
            return [*pool[:1], STRANGER]
        return pool[:1] if self.fault == "has no fallbacks" else pool

    def headed(self, endpoints, length):
        destination = ",".join(endpoints)
        told = {} if self.fault == "sets no header" else {DESTINATION: destination}
        if length is not None:
            told["content-length"] = f"{length + (self.fault == 'miscounts')}"
        action = 0 if self.fault == "appends the header" else pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
        options = [
            pb.HeaderValueOption(header=pb.HeaderValue(key=key, raw_value=value.encode()), append_action=action)
            for key, value in told.items()
        ]
        space = ",".join(reversed(endpoints)) if self.fault == "reverses the metadata" else destination
        common = pb.CommonResponse(header_mutation=pb.HeaderMutation(set_headers=options))
        return pb.ProcessingResponse(
            request_headers=pb.HeadersResponse(response=common),
            dynamic_metadata=fields({} if self.fault == "sets no metadata" else {METADATA: {DESTINATION: space}}),
        )

    async def process(self, messages, context) -> AsyncIterator[pb.ProcessingResponse]:
        self.running += 1
        try:
            async with self.one_at_a_time if self.fault == "serves one call at a time" else nullcontext():
                async for response in self.exchange(messages, context):
                    yield response
        finally:
            self.running -= self.fault != "forgets nothing"

    async def exchange(self, messages, context):
        body, endpoints = b"", []
        async for message in messages:
            match message.WhichOneof("request"):
                case "request_headers":
                    headers = {each.key: each.raw_value.decode() for each in message.request_headers.headers.headers}
                    endpoints = self.endpoints(message, headers)
                    refused = 0 if endpoints else 503
                    if self.running > self.capacity and self.fault != "never sheds":
                        refused = 500 if self.fault == "fails under load" else 429
                    if refused:
                        refused = 500 if self.fault == "gives 500 for 503" and refused == 503 else refused
                        status = pb.HttpStatus(code=refused)
                        yield pb.ProcessingResponse(immediate_response=pb.ImmediateResponse(status=status))
                        return
                    if message.request_headers.end_of_stream:
                        if self.fault == "waits for a body":
                            continue
                        yield self.headed(endpoints, None)
                case "request_body":
                    body += message.request_body.body
                    if self.fault == "ignores empty pieces" and not message.request_body.body:
                        continue
                    if message.request_body.end_of_stream:
                        async for response in self.forwarded(endpoints, body, ends=True):
                            yield response
                case "request_trailers":
                    async for response in self.forwarded(endpoints, body, ends=False):
                        yield response
                    if self.fault != "swallows trailers":
                        yield pb.ProcessingResponse(request_trailers=pb.TrailersResponse())
                case "response_headers":
                    reported = message.metadata_context.filter_metadata[METADATA].fields[SERVED].string_value
                    faults = ("fails on reports",) if reported in POOL else ("fails on reports of strangers",)
                    if reported and self.fault in faults:
                        await context.abort(grpc.StatusCode.INTERNAL, "served by whom?")
                    yield pb.ProcessingResponse(response_headers=pb.HeadersResponse())
                case "response_body":
                    piece = message.response_body
                    text = b"" if self.fault == "swallows answers" else piece.body
                    yield pb.ProcessingResponse(response_body=streamed(text, ends=piece.end_of_stream))
                case "response_trailers":
                    if self.fault == "stops at trailers":
                        return
                    yield pb.ProcessingResponse(response_trailers=pb.TrailersResponse())

    async def forwarded(self, endpoints, body, *, ends):
        if self.fault == "refuses what is no JSON" and not body.endswith(b"}"):
            yield pb.ProcessingResponse(immediate_response=pb.ImmediateResponse(status=pb.HttpStatus(code=500)))
            return
        if self.fault == "reads as text":
            body = body.decode("ascii", "replace").encode()
        if self.fault == "cuts bodies":
            body = body[:50_000]
        yield self.headed(endpoints, len(body))
        size = len(body) if self.fault == "sends one piece" else 60_000
        for at in range(0, max(1, len(body)), size):
            yield pb.ProcessingResponse(
                request_body=streamed(body[at : at + size], ends=ends and at + size >= len(body))
            )


def streamed(body, *, ends):
    piece = pb.StreamedBodyResponse(body=body, end_of_stream=ends)
    return pb.BodyResponse(response=pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=piece)))


@asynccontextmanager
async def a_round_robin_picker(fault="", pool=POOL):
    server, picker = grpc.aio.server(), RoundRobinPicker(fault, pool)
    service, _, method = PROCESS[1:].partition("/")
    handler = grpc.stream_stream_rpc_method_handler(
        picker.process, pb.ProcessingRequest.FromString, pb.ProcessingResponse.SerializeToString
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    servicer = health.HealthServicer()
    add_HealthServicer_to_server(servicer, server)
    ready = (bool(pool) or fault == "is always ready") and fault != "is never ready"
    for name, serving in (("liveness", fault != "is never alive"), ("readiness", ready), (service, ready)):
        if not (fault == "has no health name" and name == service):
            status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
            await servicer.set(name, status)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def test_correct_picker_of_another_kind_passes_every_case():
    async with a_round_robin_picker() as address:
        report = await run_suite(address, OPTIONS)

    assert named(report, CaseOutcome.FAILED) == named(report, CaseOutcome.SKIPPED) == {}


async def test_correct_picker_without_endpoints_passes():
    async with a_round_robin_picker(pool=()) as address:
        report = await run_suite(address, OPTIONS, empty=True)

    assert report.passed == len(EMPTY_CASES)


FAULTS = (
    ("is never alive", "health_liveness_is_serving"),
    ("is never ready", "health_readiness_is_serving"),
    ("has no health name", "health_of_ext_proc_is_serving"),
    ("sets no header", "destination_is_ip_and_port"),
    ("names hosts", "destination_is_ip_and_port"),
    ("repeats an endpoint", "destination_is_ip_and_port"),
    ("sets no metadata", "header_and_metadata_agree"),
    ("reverses the metadata", "header_and_metadata_agree"),
    ("falls back to strangers", "subset_of_one_is_obeyed"),
    ("leaves the subset for fallbacks", "fallbacks_follow_the_first_endpoint"),
    ("believes the client", "destination_of_the_client_is_replaced"),
    ("appends the header", "destination_of_the_client_is_replaced"),
    ("waits for a body", "request_without_a_body_gets_an_endpoint"),
    ("ignores the subset", "subset_of_one_is_obeyed"),
    ("knows all of a subset or none", "subset_skips_unknown_endpoints"),
    ("believes the subset", "subset_without_ready_endpoints_gives_503"),
    ("gives 500 for 503", "subset_without_ready_endpoints_gives_503"),
    ("never sheds", "shed_request_gives_429"),
    ("fails under load", "shed_request_gives_429"),
    ("forgets nothing", "cancelled_calls_leave_nothing_behind"),
    ("refuses what is no JSON", "malformed_body_is_decided"),
    ("reads as text", "body_in_pieces_goes_on_whole"),
    ("ignores empty pieces", "empty_last_piece_ends_a_body"),
    ("cuts bodies", "large_body_goes_on_in_small_pieces"),
    ("sends one piece", "large_body_goes_on_in_small_pieces"),
    ("miscounts", "body_goes_on_whole"),
    ("swallows trailers", "trailers_end_a_body"),
    ("swallows answers", "answer_passes_unchanged"),
    ("stops at trailers", "answer_with_trailers_passes"),
    ("fails on reports", "served_report_is_taken"),
    ("fails on reports of strangers", "served_report_of_a_stranger_is_taken"),
    ("serves one call at a time", "calls_on_one_connection_do_not_wait_for_each_other"),
)
FAULTS_OF_EMPTY_POOLS = (
    ("is never alive", "health_liveness_is_serving"),
    ("is always ready", "health_readiness_is_not_serving"),
    ("places requests on nothing", "no_ready_endpoint_gives_503"),
)


@pytest.mark.parametrize(("fault", "case"), FAULTS)
async def test_fault_of_a_picker_is_found_by_its_case(fault, case):
    async with a_round_robin_picker(fault) as address:
        report = await run_suite(address, PickerOptions(overload=80, seconds=3))

    assert case in named(report, CaseOutcome.FAILED)


@pytest.mark.parametrize(("fault", "case"), FAULTS_OF_EMPTY_POOLS)
async def test_fault_of_an_empty_picker_is_found_by_its_case_alone(fault, case):
    async with a_round_robin_picker(fault, pool=()) as address:
        report = await run_suite(address, PickerOptions(seconds=3), empty=True)

    assert list(named(report, CaseOutcome.FAILED)) == [case]


def test_each_case_has_a_fault_that_it_finds():
    assert {case for _, case in FAULTS} == {each.__name__ for each in READY_CASES}
    assert {case for _, case in FAULTS_OF_EMPTY_POOLS} == {each.__name__ for each in EMPTY_CASES}


async def test_picker_without_fallbacks_is_not_blamed():
    async with a_round_robin_picker("has no fallbacks") as address:
        report = await run_suite(address, OPTIONS)

    assert named(report, CaseOutcome.FAILED) == {}
    assert named(report, CaseOutcome.SKIPPED) == {
        "fallbacks_follow_the_first_endpoint": "the picker names no fallbacks"
    }
