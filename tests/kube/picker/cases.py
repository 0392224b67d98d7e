"""Cases of the conformance suite. The name of a case is its function's name, and its claim is the docstring."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from tests.kube.picker.client import (
    DESTINATION,
    METADATA,
    Decision,
    Exchange,
    NotApplicable,
    PickerUnderTest,
    Violation,
    checked_endpoints,
)
from tests.support.waiting import pace

ABSENT = "192.0.2.1:8000"
"""An endpoint of no pool: the address is reserved for documentation (RFC 5737)."""

LARGEST_PIECE = 64 * 1024
"""Envoy takes no larger message in a full-duplex stream by default."""

LARGE = 220_000
"""Bytes of the body of a request with about 50,000 tokens."""

TOGETHER = 50
SERVING = health_pb2.HealthCheckResponse.SERVING
ANSWER = (b'data: {"choices":[{"text":"a"}]}\n\n', b"data: [DONE]\n\n")

Case = Callable[[PickerUnderTest], Awaitable[None]]


# Health


async def health_liveness_is_serving(picker: PickerUnderTest) -> None:
    """The health service `liveness` is SERVING while the process lives."""
    await _health(picker, "liveness", serving=True)


async def health_readiness_is_serving(picker: PickerUnderTest) -> None:
    """The health service `readiness` is SERVING while requests can be placed."""
    await _health(picker, "readiness", serving=True)


async def health_of_ext_proc_is_serving(picker: PickerUnderTest) -> None:
    """The health service with the name of Envoy's service is SERVING while requests can be placed."""
    await _health(picker, "envoy.service.ext_proc.v3.ExternalProcessor", serving=True)


async def health_readiness_is_not_serving(picker: PickerUnderTest) -> None:
    """The health service `readiness` is NOT_SERVING while no endpoint is ready."""
    await _health(picker, "readiness", serving=False)


# Destination


async def destination_is_ip_and_port(picker: PickerUnderTest) -> None:
    """The header names endpoints as ip:port, each of them once, and the best one first."""
    decision = await picker.ask()
    decision.destination()
    checked_endpoints(decision.endpoints)


async def header_and_metadata_agree(picker: PickerUnderTest) -> None:
    """The metadata `envoy.lb` has the same endpoints in the same order as the header."""
    decision = await picker.ask()
    header = decision.destination()
    space = decision.metadata.get(METADATA)
    told = space.get(DESTINATION) if isinstance(space, dict) else None
    if told != header:
        raise Violation(f"header {header!r}, metadata {told!r}")


async def fallbacks_follow_the_first_endpoint(picker: PickerUnderTest) -> None:
    """The endpoints after the first one are other endpoints of the pool, and belong to the subset."""
    picker.two_endpoints()
    decision = await picker.ask(subset=picker.endpoints)
    decision.destination()
    checked_endpoints(decision.endpoints)
    if len(decision.endpoints) == 1:
        raise NotApplicable("the picker names no fallbacks")
    _within(decision, picker.endpoints)


async def destination_of_the_client_is_replaced(picker: PickerUnderTest) -> None:
    """A destination header that the client sends has no effect, and the picker replaces it."""
    exchange = picker.exchange()
    await exchange.head(**{DESTINATION: ABSENT})
    await exchange.pieces(picker.body())
    decision = await exchange.decision()
    decision.destination()
    if ABSENT in decision.endpoints:
        raise Violation("the picker took the client's own destination")
    if DESTINATION in decision.appended:
        raise Violation("the destination is appended to the client's own instead of replacing it")
    exchange.cancel()


async def request_without_a_body_gets_an_endpoint(picker: PickerUnderTest) -> None:
    """A request that ends with its headers is placed at once."""
    exchange = picker.exchange()
    await exchange.head("/v1/models", method="GET", ends=True)
    decision = await exchange.decision()
    decision.destination()
    checked_endpoints(decision.endpoints)
    await exchange.answer_head(ends=True)
    await exchange.over()


# Subsets


async def subset_of_one_is_obeyed(picker: PickerUnderTest) -> None:
    """If the subset hint has one endpoint, the picker names only this one, whichever it is."""
    for endpoint in picker.two_endpoints():
        decision = await picker.ask(subset=[endpoint])
        decision.destination()
        _within(decision, [endpoint])


async def subset_skips_unknown_endpoints(picker: PickerUnderTest) -> None:
    """A subset may contain endpoints that the picker does not know; it picks a known endpoint of the subset."""
    first, _ = picker.two_endpoints()
    decision = await picker.ask(subset=[ABSENT, first])
    decision.destination()
    _within(decision, [first])


async def subset_without_ready_endpoints_gives_503(picker: PickerUnderTest) -> None:
    """A request whose subset has no ready endpoint is answered with 503."""
    _answered(await picker.ask(subset=[ABSENT]), 503)


# Refusals


async def no_ready_endpoint_gives_503(picker: PickerUnderTest) -> None:
    """A request is answered with 503 while no endpoint is ready."""
    _answered(await picker.ask(), 503)


async def shed_request_gives_429(picker: PickerUnderTest) -> None:
    """The picker answers some requests with 429 if more come than the pool can take, and places the others."""
    if not picker.options.overload:
        raise NotApplicable("needs --overload: the number of requests at once that the picker cannot all take")
    exchanges = [picker.exchange() for _ in range(picker.options.overload)]

    async def placed(exchange: Exchange) -> Decision:
        await exchange.head()
        await exchange.pieces(picker.body())
        return await exchange.decision()

    decisions = await _together([placed(each) for each in exchanges])
    for exchange in exchanges:
        exchange.cancel()
    statuses = {each.status for each in decisions}
    if statuses - {0, 429}:
        raise Violation(f"requests were answered with {sorted(statuses - {0, 429})}")
    if statuses != {0, 429}:
        raise Violation("all requests were shed" if 0 not in statuses else "no request was shed")
    while (decision := await picker.ask()).status == 429:  # until the picker knows that the requests are over
        await pace(0.05, "the next question")
    decision.destination()


async def malformed_body_is_decided(picker: PickerUnderTest) -> None:
    """The picker answers a body that is not JSON with a status from 400 to 499, or passes it on unchanged."""
    exchange = picker.exchange()
    await exchange.head()
    await exchange.pieces(b'{"model": ')
    decision = await exchange.decision()
    if decision.status and not 400 <= decision.status < 500:
        raise Violation(f"it was answered with {decision.status}")
    if not decision.status and decision.body != b'{"model": ':
        raise Violation("it was changed")
    exchange.cancel()


# Bodies


async def body_goes_on_whole(picker: PickerUnderTest) -> None:
    """The picker passes the body of a request on with the same content; `content-length` is right if it is set."""
    await _forwarded(picker, picker.body())


async def body_in_pieces_goes_on_whole(picker: PickerUnderTest) -> None:
    """The picker passes on all bytes of a body in pieces, even if a piece ends in the middle of a character."""
    body = picker.body("für alle Fälle: ∀").replace(b"\\u2200", "∀".encode())
    await _forwarded(picker, *(body[at : at + 7] for at in range(0, len(body), 7)))


async def empty_last_piece_ends_a_body(picker: PickerUnderTest) -> None:
    """A last piece without bytes ends the body."""
    await _forwarded(picker, picker.body(), b"")


async def large_body_goes_on_in_small_pieces(picker: PickerUnderTest) -> None:
    """The picker passes on all bytes of a body of 220 KB, in pieces of at most 64 KiB."""
    body = picker.body(user="x" * LARGE)
    decision = await _forwarded(picker, *(body[at : at + LARGEST_PIECE] for at in range(0, len(body), LARGEST_PIECE)))
    if (longest := max(map(len, decision.pieces))) > LARGEST_PIECE:
        raise Violation(f"a piece has {longest} bytes; gateways take {LARGEST_PIECE}")


async def trailers_end_a_body(picker: PickerUnderTest) -> None:
    """The picker passes on a complete request that ends with trailers, and its trailers."""
    exchange = picker.exchange()
    await exchange.head()
    await exchange.pieces(picker.body(), ends=False)
    await exchange.trailers()
    decision = await exchange.decision()
    decision.destination()
    _same(picker.body(), decision)
    exchange.cancel()


# Answers


async def answer_passes_unchanged(picker: PickerUnderTest) -> None:
    """The body of an answer reaches the client unchanged, and the call ends without an error."""
    exchange = await _placed(picker)
    await exchange.answer_head()
    _passed(await exchange.answer_pieces(*ANSWER))
    await exchange.over()


async def answer_with_trailers_passes(picker: PickerUnderTest) -> None:
    """An answer may end with trailers."""
    exchange = await _placed(picker)
    await exchange.answer_head()
    _passed(await exchange.answer_pieces(*ANSWER, ends=False))
    await exchange.answer_trailers()
    await exchange.over()


async def served_report_is_taken(picker: PickerUnderTest) -> None:
    """A gateway may report that another endpoint than the first one has answered."""
    _, other = picker.two_endpoints()
    exchange = await _placed(picker)
    await exchange.answer_head(served=other)
    _passed(await exchange.answer_pieces(*ANSWER))
    await exchange.over()


async def served_report_of_a_stranger_is_taken(picker: PickerUnderTest) -> None:
    """A report about an endpoint that the picker does not know does no harm."""
    exchange = await _placed(picker)
    await exchange.answer_head(served=ABSENT)
    _passed(await exchange.answer_pieces(*ANSWER))
    await exchange.over()


# Calls


async def calls_on_one_connection_do_not_wait_for_each_other(picker: PickerUnderTest) -> None:
    """An unfinished request does not hold up others on the same connection."""
    slow = picker.exchange()
    await slow.head()
    await slow.pieces(picker.body()[:10], ends=False)
    for decision in await _together([picker.ask() for _ in range(4)]):
        decision.destination()
    await slow.pieces(picker.body()[10:])
    (await slow.decision()).destination()
    slow.cancel()


async def cancelled_calls_leave_nothing_behind(picker: PickerUnderTest) -> None:
    """After many calls that were cancelled at every stage, requests are placed as before."""
    for number in range(TOGETHER):
        exchange = picker.exchange()
        await exchange.head()
        if number % 3:
            await exchange.pieces(picker.body(), ends=number % 3 == 1)
        exchange.cancel()
    (await picker.ask()).destination()


READY_CASES: tuple[Case, ...] = (
    health_liveness_is_serving,
    health_readiness_is_serving,
    health_of_ext_proc_is_serving,
    destination_is_ip_and_port,
    header_and_metadata_agree,
    fallbacks_follow_the_first_endpoint,
    destination_of_the_client_is_replaced,
    request_without_a_body_gets_an_endpoint,
    subset_of_one_is_obeyed,
    subset_skips_unknown_endpoints,
    subset_without_ready_endpoints_gives_503,
    shed_request_gives_429,
    malformed_body_is_decided,
    body_goes_on_whole,
    body_in_pieces_goes_on_whole,
    empty_last_piece_ends_a_body,
    large_body_goes_on_in_small_pieces,
    trailers_end_a_body,
    answer_passes_unchanged,
    answer_with_trailers_passes,
    served_report_is_taken,
    served_report_of_a_stranger_is_taken,
    calls_on_one_connection_do_not_wait_for_each_other,
    cancelled_calls_leave_nothing_behind,
)
"""Cases of a picker whose pool has ready endpoints."""

EMPTY_CASES: tuple[Case, ...] = (
    health_liveness_is_serving,
    health_readiness_is_not_serving,
    no_ready_endpoint_gives_503,
)
"""Cases of a picker whose pool has no ready endpoint."""


async def _health(picker: PickerUnderTest, service: str, *, serving: bool) -> None:
    request = health_pb2.HealthCheckRequest(service=service)
    try:
        answer = await HealthStub(picker.channel).Check(request, timeout=picker.options.seconds)
    except grpc.aio.AioRpcError as error:
        raise Violation(f"the health service {service} answered {error.code().name}") from None
    if (answer.status == SERVING) is not serving:
        raise Violation(f"it is {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}")


async def _placed(picker: PickerUnderTest) -> Exchange:
    """Send a request, and return its call after the picker has placed it."""
    exchange = picker.exchange()
    await exchange.head()
    await exchange.pieces(picker.body())
    (await exchange.decision()).destination()
    return exchange


async def _forwarded(picker: PickerUnderTest, *pieces: bytes) -> Decision:
    """Send a body in these pieces, and check that the picker passes on all of its bytes."""
    exchange = picker.exchange()
    await exchange.head(content_length=f"{len(b''.join(pieces))}")
    async with asyncio.TaskGroup() as tasks:  # a picker may send pieces back before it has the last one
        deciding = tasks.create_task(exchange.decision())
        await exchange.pieces(*pieces)
    decision = deciding.result()
    exchange.cancel()
    decision.destination()
    _same(b"".join(pieces), decision)
    if decision.headers.get("content-length", f"{len(decision.body)}") != f"{len(decision.body)}":
        raise Violation(f"content-length is {decision.headers['content-length']} for {len(decision.body)} bytes")
    return decision


def _same(sent: bytes, decision: Decision) -> None:
    """Check that the passed body has the same content; a picker may format JSON differently, and rename the model."""
    if decision.body == sent:
        return
    try:
        before, after = json.loads(sent), json.loads(decision.body)
    except ValueError:
        raise Violation(f"{len(sent)} bytes went on as {len(decision.body)} other bytes") from None
    if before | {"model": ""} != after | {"model": ""}:
        raise Violation("the body went on with other content")


def _passed(body: bytes) -> None:
    if body != b"".join(ANSWER):
        raise Violation(f"the answer of {len(b''.join(ANSWER))} bytes reaches the client as {len(body)} bytes")


def _within(decision: Decision, allowed: list[str]) -> None:
    if outside := [each for each in decision.endpoints if each not in allowed]:
        raise Violation(f"{', '.join(outside)}: outside of the subset {', '.join(allowed)}")


def _answered(decision: Decision, status: int) -> None:
    if decision.status != status:
        said = f"was answered with {decision.status}" if decision.status else f"goes to {decision.endpoints}"
        raise Violation(f"the request {said}; expected {status}")


async def _together(calls: list[Awaitable[Decision]]) -> list[Decision]:
    async def one(call: Awaitable[Decision]) -> Decision:
        return await call

    async with asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(one(call)) for call in calls]
    return [each.result() for each in started]
