"""Tests of the ends of endpoint picker calls and of their reservations, with gateways that break off or misbehave."""

import asyncio
import hashlib
import json
import random

import grpc
import pytest
from msgspec import structs

from fleet.core.ids import WorkerId
from fleet.router.messages import WorkerLeft
from fleet.router.tenants import TenantSettings
from fleet.v1 import ext_proc_pb2 as pb
from tests.support.gateway.endpoint_pickers import (
    D1,
    D2,
    EVENT,
    LONG,
    ONE_AT_A_TIME,
    P1,
    a_joined_endpoint,
    a_picker_setup,
)
from tests.support.gateway.envoy import FULL_DUPLEX, a_completion, a_header_map
from tests.support.waiting import pace, until

pytestmark = pytest.mark.integration

TENANTS = {"a": TenantSettings(api_key_sha256=(hashlib.sha256(b"secret").hexdigest(),))}


# Reservations and their ends


async def test_lost_worker_ends_the_reservation_not_the_answer(model_dir):
    async with a_picker_setup(model_dir, D1, D2) as world:
        request = world.request()
        picked = await request.ask(a_completion())
        world.router.hear(WorkerLeft(worker_id=WorkerId(f"d{picked.endpoints[0][7]}")))
        await world.idle()
        await request.answer_begins()
        assert await request.answer_goes_on(EVENT, ends=True) == EVENT


async def test_silent_gateway_loses_its_reservation_but_continues(model_dir):
    async with a_picker_setup(model_dir, D1, picker={"lease_seconds": 0.1}) as world:
        request = world.request()
        await request.ask(a_completion())
        await world.idle()
        await request.answer_begins()
        assert await request.answer_goes_on(EVENT) == EVENT


async def at_head(request):
    await request.head()


async def at_body(request):
    await request.head()
    await request.body(a_completion()[:10], ends=False)


async def when_picked(request):
    await request.ask(a_completion())


async def while_answered(request):
    await request.ask(a_completion())
    await request.answer_begins()
    await request.answer_goes_on(EVENT)


async def when_answered(request):
    await while_answered(request)
    await request.answer_goes_on(EVENT, ends=True)


PHASES = [at_head, at_body, when_picked, while_answered, when_answered]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("cut", [True, False], ids=["cancelled", "ended"])
async def test_ended_call_leaves_no_reservation_in_any_phase(model_dir, phase, cut):
    async with a_picker_setup(model_dir, D1) as world:
        request = world.request()
        await phase(request)
        if cut:
            request.call.cancel()
        else:
            await request.over()
        await world.idle()


async def test_cancelled_call_leaves_the_queue(model_dir):
    async with a_picker_setup(model_dir, ONE_AT_A_TIME, oversubscribe=1.0) as world:
        first, waiting = await world.one_behind_another()
        waiting.call.cancel()
        await until(lambda: world.router.status().queued == 0)
        assert world.booked() == {"d1": 1}
        await first.over()
        await world.idle()


# Errors


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"", 400, None),
        (b"{", 400, None),
        (b"\xff\xfe", 400, None),
        (b"[" * 100_000, 400, None),
        (a_completion(model="other"), 404, "model"),
        (a_completion(""), 400, "prompt"),
        (a_completion(temperature=9), 400, "temperature"),
        (a_completion(list(range(5000))), 400, None),
        (a_completion(fleet={"pin": "nobody"}), 400, "fleet.pin"),
    ],
)
async def test_invalid_request_gets_an_openai_error(model_dir, body, status, param):
    async with a_picker_setup(model_dir, D1) as world:
        picked = await world.request().ask(body)
        assert picked.status == status
        if param is not None:
            assert picked.error["param"] == param
        await world.idle()


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/v1/messages", {"max_tokens": 8, "messages": []}, ("invalid_request_error", "messages")),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}]}, ("invalid_request_error", "max_tokens")),
        ("/v1/responses", {"input": "a", "max_output_tokens": -1}, ("invalid_request_error", "max_output_tokens")),
    ],
)
async def test_invalid_translated_request_gets_its_own_error_form(model_dir, path, body, told):
    async with a_picker_setup(model_dir, D1) as world:
        picked = await world.request().ask(json.dumps({"model": "tiny", **body}).encode(), path)
        answer = json.loads(picked.body)
        assert picked.status == 400
        assert (
            answer["error"]["type"],
            answer["error"].get("param") or answer["error"]["message"].split(":")[0],
        ) == told
        assert ("type" in answer) == (path == "/v1/messages"), "only the Messages API has a type beside the error"
        await world.idle()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/rerank"])
@pytest.mark.parametrize("sent", [{}, {"authorization": "Bearer wrong"}, {"x_api_key": "wrong"}])
async def test_unknown_key_is_refused_at_the_headers(model_dir, path, sent):
    async with a_picker_setup(model_dir, D1, tenants=TENANTS) as world:
        request = world.request()
        await request.head(path, **sent)
        picked = await request.picked()  # no byte of the body was sent
        assert (picked.status, picked.error["code"]) == (401, "unauthenticated")
        assert picked.headers["www-authenticate"] == "Bearer"
        assert await request.hears() is None
        await world.idle()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/rerank"])
@pytest.mark.parametrize("sent", [{"authorization": "Bearer secret"}, {"x_api_key": "secret"}])
async def test_known_key_in_either_header_is_taken(model_dir, path, sent):
    async with a_picker_setup(model_dir, D1, tenants=TENANTS) as world:
        assert (await world.request().ask(a_completion(), path, **sent)).endpoints == ["10.0.0.1:8000"]


async def test_rate_limited_tenant_is_told_its_limits(model_dir):
    limited = {"a": structs.replace(TENANTS["a"], requests_per_minute=1)}
    async with a_picker_setup(model_dir, D1, tenants=limited) as world:
        await world.request().ask(a_completion(), authorization="Bearer secret")
        picked = await world.request().ask(a_completion(), authorization="Bearer secret")

        assert (picked.status, picked.error["code"]) == (429, "rate_limited")
        assert picked.headers["x-ratelimit-limit-requests"] == "1"
        assert int(picked.headers["retry-after"]) > 0


async def test_too_long_body_is_rejected_while_it_arrives(model_dir):
    async with a_picker_setup(model_dir, D1, picker={"max_body_bytes": 10_000}) as world:
        request = world.request()
        await request.head()
        await request.body(b" " * 6000, b" " * 6000, ends=False)
        picked = await request.picked()
        assert (picked.status, picked.error["code"]) == (413, "too_large")
        assert await request.hears() is None
        await world.idle()


async def test_bodies_beyond_the_total_limit_are_shed(model_dir):
    async with a_picker_setup(model_dir, D1, picker={"max_held_bytes": 10_000}) as world:
        slow, other = world.request(), world.request()
        await slow.head()
        await slow.body(b" " * 8000, ends=False)
        await until(lambda: world.picker.held_bytes == 8000)
        assert (await other.ask(b" " * 8000)).status == 429
        slow.call.cancel()
        await world.idle()
        assert (await world.request().ask(a_completion() + b" " * 8000)).endpoints


async def test_incomplete_request_times_out(model_dir):
    async with a_picker_setup(model_dir, D1, picker={"body_seconds": 0.1}) as world:
        request = world.request()
        await request.head()
        await request.body(b"{", ends=False)
        picked = await request.picked()
        assert picked.status == 504
        assert picked.headers["retry-after"] == "1"
        assert "x-should-retry" not in picked.headers, "the client has set no deadline"
        assert await request.hears() is None
        await world.idle()


BODY = pb.HttpBody(body=a_completion(), end_of_stream=True)
HEADERS = pb.HttpHeaders(headers=a_header_map({":path": "/v1/completions"}))
OUT_OF_TURN = [
    (),
    ({"request_body": BODY},),
    ({"response_headers": HEADERS},),
    ({"response_body": BODY},),
    ({"request_trailers": pb.HttpTrailers()},),
    ({"request_headers": HEADERS}, {"request_headers": HEADERS}),
    ({"request_headers": HEADERS}, {"response_body": BODY}),
    ({"request_headers": HEADERS}, {"request_body": BODY}, {"request_body": BODY}),
    ({"request_headers": HEADERS}, {"request_body": BODY}, {"response_trailers": pb.HttpTrailers()}),
    (
        {"request_headers": HEADERS},
        {"request_body": BODY},
        {"response_headers": HEADERS},
        {"response_headers": HEADERS},
    ),
    ({"request_headers": HEADERS}, {"request_body": BODY}, {"response_headers": HEADERS}, {"request_body": BODY}),
    (
        {"request_headers": HEADERS},
        {"request_body": BODY},
        {"response_headers": HEADERS},
        {"response_body": BODY},
        {"response_body": BODY},
    ),
]


async def status_of(call):
    async def to_the_end():
        while await call.read() is not grpc.aio.EOF:
            pass

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await to_the_end()
    return caught.value.code()


@pytest.mark.parametrize("messages", OUT_OF_TURN)
async def test_out_of_order_messages_end_the_call(model_dir, messages):
    async with a_picker_setup(model_dir, D1) as world:
        request = world.request()
        for message in messages or ({},):
            await request.say(**message)
        assert await status_of(request.call) is grpc.StatusCode.INVALID_ARGUMENT
        await world.idle()


@pytest.mark.parametrize("content", [b"\xff", b"\x12\xff\xff\xff\xff\x0f", b"\x22\x05abc", b"GET / HTTP/1.1\r\n\r\n"])
async def test_malformed_message_ends_the_call(model_dir, content):
    async with a_picker_setup(model_dir, D1) as world:
        call = world.gateway.raw()
        await call.write(content)
        assert await status_of(call) is grpc.StatusCode.INVALID_ARGUMENT


async def test_empty_call_ends(model_dir):
    async with a_picker_setup(model_dir, D1) as world:
        await world.request().over()


async def test_gateways_own_answer_may_precede_the_whole_request(model_dir):
    async with a_picker_setup(model_dir, D1) as world:
        request = world.request()
        await at_body(request)
        await request.answer_begins("text/plain")
        assert await request.answer_goes_on(b"too slow", ends=True) == b"too slow"
        await world.idle()


@pytest.mark.parametrize("mode", [pb.NONE, pb.STREAMED, pb.BUFFERED, pb.BUFFERED_PARTIAL, 5, 77])
async def test_gateway_that_keeps_bodies_is_told_what_to_set(model_dir, mode):
    async with a_picker_setup(model_dir, D1) as world:
        request = world.request()
        await request.head(modes=pb.ProtocolConfiguration(request_body_mode=mode))
        picked = await request.picked()
        assert picked.status == 500
        assert "FULL_DUPLEX_STREAMED" in picked.error["message"]


async def test_gateways_without_body_mode_send_full_duplex(model_dir):
    async with a_picker_setup(model_dir, D1) as world:
        request = world.request()
        assert (await request.ask(a_completion(), modes=None)).endpoints
        await request.answer_begins()
        assert await request.answer_goes_on(EVENT) == EVENT


async def test_watching_call_gets_nothing_and_reserves_nothing(model_dir):
    async with a_picker_setup(model_dir, D1) as world:
        request = world.request()
        await request.say(request_headers=HEADERS, observability_mode=True, protocol_config=FULL_DUPLEX)
        await request.say(request_body=BODY, observability_mode=True)
        await request.over()
        assert world.booked() == {}


async def test_random_gateway_messages_leave_no_reservation(model_dir):
    """Run sixty calls side by side with random courses and ends, while workers come and go."""
    chance = random.Random(7)
    bodies = [a_completion([number] * 40) for number in range(5)] + [a_completion(LONG), b"{", b""]
    served = ["", "", "10.0.0.1:8000", "10.0.0.2:8000", "10.9.9.9:1"]

    async def call(world):
        request = world.request()
        body, modes = chance.choice(bodies), chance.choice([FULL_DUPLEX, FULL_DUPLEX, None])

        async def whole_body():
            await request.body(body[:9], body[9:])
            await request.picked()

        steps = [
            lambda: request.head(subset=chance.choice([None, None, ["10.0.0.1:8000"], []]), modes=modes),
            whole_body,
            lambda: request.answer_begins(served=chance.choice(served)),
            lambda: request.answer_goes_on(EVENT),
            lambda: request.answer_goes_on(EVENT * 40),
            lambda: request.answer_goes_on(b"", ends=True),
        ]
        if chance.random() < 0.3:
            steps.insert(chance.randrange(6), lambda: request.say(**chance.choice(chance.choice(OUT_OF_TURN[1:]))))
        try:
            for step in steps[: chance.randrange(1, 8)]:
                await step()
                await pace(chance.random() / 100, "a drawn moment of the other calls")
            if chance.random() < 0.5:
                await request.over()
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError, AssertionError, AttributeError):
            pass  # the picker has ended the call
        request.call.cancel()

    small = {"max_running": 4}
    async with a_picker_setup(
        model_dir, D1, P1, a_joined_endpoint("d2", "10.0.0.2:8000", **small), picker={"wait_seconds": 0.05}
    ) as world:
        async with asyncio.TaskGroup() as calls:
            for number in range(60):
                calls.create_task(call(world))
                if number % 20 == 10:
                    world.router.hear(WorkerLeft(worker_id=WorkerId("d2")))
                    await pace(0.02, "the worker is away for a while")
                    world.router.hear(a_joined_endpoint("d2", "10.0.0.2:8000", **small))
        await world.idle()
        world.machine.check()
        assert world.router.status().counters.ended > 20
        assert not world.selection.bookings
