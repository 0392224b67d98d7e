"""Tests of messages of a newer peer on each link: unknown fields and messages are skipped, and unknown values end no stream."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.client.results import decode_status
from fleet.core.clock import Nanos
from fleet.core.errors import Reason
from fleet.core.requests import Finish, Source
from fleet.planner.sources.wire import decode_report
from fleet.v1 import control_pb2, worker_pb2
from fleet.wire.worker import (
    MalformedMessage,
    decode_router_message,
    decode_worker_message,
    encode_router_message,
    encode_worker_message,
)
from kvstore.namespace import KvNamespace
from kvstore.protocol import wire
from kvstore.protocol.range_messages import range_message
from kvstore.v1 import blocks_pb2
from tests.support.builders import a_start
from tests.support.versions.newer_peers import unknown_fields, unknown_values, with_unknown_fields
from tests.unit.wire.test_worker import router_messages, worker_messages

NAMESPACE = KvNamespace(
    model="m",
    revision="r",
    dtype="float32",
    block_tokens=16,
    layers=2,
    kv_heads=4,
    head_dim=8,
    layout="LHND",
    block_bytes=4096,
)


@given(router_messages, unknown_fields)
def test_worker_skips_unknown_fields_and_messages_of_a_router(message, fields):
    assert decode_router_message(with_unknown_fields(encode_router_message(message), fields)) == message
    assert decode_router_message(worker_pb2.RouterMessage.FromString(fields)) is None


@given(worker_messages, unknown_fields)
def test_router_skips_unknown_fields_and_messages_of_a_worker(message, fields):
    assert decode_worker_message(with_unknown_fields(encode_worker_message(message), fields)) == message
    assert decode_worker_message(worker_pb2.WorkerMessage.FromString(fields)) is None


@given(unknown_values, st.integers(4, 2**31 - 1))
def test_unknown_value_in_an_attempt_rejects_that_attempt_alone(value, phase):
    for change in ({"phase": phase}, {"kv_path": value}, {"handoff": worker_pb2.Handoff(kv_path=value)}):
        message = encode_router_message(a_start())
        for name, changed in change.items():
            if name == "handoff":
                message.start.handoff.CopyFrom(changed)
            else:
                setattr(message.start, name, changed)
        with pytest.raises(MalformedMessage) as refused:
            decode_router_message(message)
        assert refused.value.request_id == a_start().request_id


@given(unknown_values)
def test_unknown_value_in_a_step_costs_at_most_its_attempt(value):
    report = worker_pb2.KvPhaseReport(
        prompt_blocks=3,
        origins=[
            worker_pb2.KvOriginReport(source=value, blocks=2),
            worker_pb2.KvOriginReport(source="store", blocks=1),
        ],
    )
    progress = [
        worker_pb2.Progress(request_id="a", token_ids=[1], finish=value, kv=report),
        worker_pb2.Progress(request_id="b", token_ids=[2], finish="stop", handoff=worker_pb2.Handoff(kv_path=value)),
        worker_pb2.Progress(request_id="c", token_ids=[3]),
    ]
    step = decode_worker_message(worker_pb2.WorkerMessage(step=worker_pb2.Step(progress=progress)))

    first, second, third = step.progress
    assert (first.finish, [each.source for each in first.kv.origins]) == (
        Finish.CANCELLED,
        [Source.COMPUTED, Source.STORE],
    )
    assert (second.finish, second.handoff) == (Finish.STOP, None)
    assert (third.finish, third.token_ids) == (None, (3,))


@given(unknown_values)
def test_unknown_values_of_a_worker_leave_it_usable(value):
    description = worker_pb2.Description(
        worker_id="w", incarnation="1", model="m", role="both", block_tokens=16, max_model_len=64, kv_blocks=9, max_running=1,
        kv_paths=["store", value], kv=worker_pb2.KvFingerprint(hash_algorithm=value),
    )  # fmt: skip
    decoded = decode_worker_message(worker_pb2.WorkerMessage(description=description))
    assert (decoded.kv_paths, decoded.kv) == (("store",), None)

    rejected = decode_worker_message(
        worker_pb2.WorkerMessage(rejected=worker_pb2.Rejected(request_id="r", reason=value))
    )
    assert rejected.reason is Reason.INTERNAL


@given(unknown_values, unknown_fields)
def test_planner_leaves_out_workers_of_unknown_roles(value, fields):
    workers = [
        control_pb2.WorkerDemand(worker_id="new", role=value),
        control_pb2.WorkerDemand(worker_id="w", role="both"),
    ]
    report = control_pb2.DemandReport(router_id="r", incarnation="1", workers=workers)
    (known,) = decode_report(with_unknown_fields(report, fields), Nanos(0)).workers
    assert known.worker_id == "w"


@given(unknown_fields)
def test_client_skips_unknown_fields_of_a_status(fields):
    worker = control_pb2.WorkerStatus(worker_id="w", protocol=2, product="1")
    status = control_pb2.StatusResponse(
        pools=[control_pb2.PoolStatus(model="m", role="new role", workers=[worker])],
        router=control_pb2.RouterStatus(models=["m"]),
        incompatible=[control_pb2.IncompatiblePeer(link="new link", name="x", cause="y")],
        protocols=range_message(),
    )
    assert decode_status(with_unknown_fields(status, fields)) == decode_status(status)


@given(unknown_fields)
def test_store_node_and_client_skip_unknown_fields(fields):
    hello = blocks_pb2.HelloRequest(
        namespace=wire.namespace_message(NAMESPACE), digest=NAMESPACE.digest, protocols=range_message()
    )
    assert wire.parse_hello(with_unknown_fields(hello, fields)) == NAMESPACE
    assert wire.agree_with_client("s", with_unknown_fields(hello, fields)) == 2
    slots = blocks_pb2.MatchResponse(lease_id=1, slots=bytes(20), risen=[blocks_pb2.Risen(tier="new tier", blocks=1)])
    names = [bytes(16)]
    assert wire.parse_match(with_unknown_fields(slots, fields), "i", names) == wire.parse_match(slots, "i", names)
