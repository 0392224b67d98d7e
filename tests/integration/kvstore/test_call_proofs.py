"""Tests of captured proofs of control-plane calls: a proof works once and for its own call only."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from google.protobuf.struct_pb2 import Struct

from kvstore.security.authentication import SKEW_SECONDS, AuthenticationKey, CallProof, Purpose
from kvstore.security.call_proofs import (
    PROOF_KEY,
    Calendar,
    ProofAioUnaryInterceptor,
    ProofServerInterceptor,
    ProofStreamInterceptor,
    ProofUnaryInterceptor,
)
from kvstore.security.call_replays import WINDOW
from kvstore.system_clock import unix_seconds
from kvstore.v1 import blocks_pb2 as pb
from kvstore.v1 import blocks_pb2_grpc as pb_grpc
from tests.support.waiting import SECONDS

pytestmark = pytest.mark.integration

KEY = AuthenticationKey(b"the secret of this deployment", Purpose.CONTROL)
STATS, MATCH, WATCH = (f"/kvstore.v1.BlockStore/{name}" for name in ("Stats", "Match", "Watch"))
CALLER = bytes(range(16))
BODY = pb.MatchRequest(hashes=b"the blocks asked about").SerializeToString()


class CountingStore(pb_grpc.BlockStoreServicer):
    """Store that counts the accepted calls."""

    def __init__(self) -> None:
        self.served = 0

    async def Stats(self, request, context):  # noqa: N802 - named by the protocol
        self.served += 1
        return pb.StatsResponse(store_id="asked")

    async def Match(self, request, context):  # noqa: N802 - named by the protocol
        self.served += 1
        return pb.MatchResponse()

    async def Watch(self, request, context):  # noqa: N802 - named by the protocol
        self.served += 1
        yield pb.BlockChanges(sequence=1)


async def _echo(request, context):
    return request


@asynccontextmanager
async def a_server(now: Calendar = unix_seconds) -> AsyncIterator[tuple[CountingStore, str]]:
    server = grpc.aio.server(interceptors=[ProofServerInterceptor(KEY, now)])
    servicer = CountingStore()
    pb_grpc.add_BlockStoreServicer_to_server(servicer, server)
    echo = grpc.unary_unary_rpc_method_handler(_echo, Struct.FromString, Struct.SerializeToString)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Maps", {"Echo": echo}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield servicer, f"127.0.0.1:{port}"
    await server.stop(None)


def a_proof(
    method: str = MATCH, request: bytes = BODY, *, number: int = 0, ago: int = 0, now: Calendar = unix_seconds
) -> str:
    proof = CallProof.of(KEY, method, request, unix_seconds=now() - ago, caller=CALLER, number=number)
    return proof.text


async def send(channel: grpc.aio.Channel, method: str, request: bytes, proof: str) -> None:
    """Send these bytes with that proof, like an eavesdropper."""
    metadata = ((PROOF_KEY, proof),)
    if method == WATCH:
        async for _ in channel.unary_stream(method)(request, metadata=metadata, timeout=SECONDS):
            pass
    else:
        await channel.unary_unary(method)(request, metadata=metadata, timeout=SECONDS)


async def rejection(channel: grpc.aio.Channel, method: str, request: bytes, proof: str) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await send(channel, method, request, proof)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    return caught.value.details() or ""


async def test_captured_proof_is_rejected_a_second_time():
    async with a_server() as (server, address), grpc.aio.insecure_channel(address) as channel:
        proof = a_proof()
        await send(channel, MATCH, BODY, proof)

        assert "accepted once" in await rejection(channel, MATCH, BODY, proof)

        assert server.served == 1


async def test_captured_proof_is_rejected_after_a_restart():
    def first() -> int:
        return 1_700_000_000

    def later() -> int:
        return first() + 20

    proof = a_proof(now=first)
    async with a_server(first) as (server, address), grpc.aio.insecure_channel(address) as channel:
        await send(channel, MATCH, BODY, proof)
        assert server.served == 1
    async with a_server(later) as (server, address), grpc.aio.insecure_channel(address) as channel:
        assert "before this port opened" in await rejection(channel, MATCH, BODY, proof)

        assert server.served == 0
        await send(channel, MATCH, BODY, a_proof(number=1, now=later))


async def test_captured_proof_is_rejected_with_another_body():
    async with a_server() as (server, address), grpc.aio.insecure_channel(address) as channel:
        other = pb.MatchRequest(hashes=b"other blocks").SerializeToString()

        assert "another call" in await rejection(channel, MATCH, other, a_proof())

        assert server.served == 0
        await send(channel, MATCH, BODY, a_proof())  # a rejected call does not use up its number


async def test_captured_proof_is_rejected_for_another_method():
    async with a_server() as (server, address), grpc.aio.insecure_channel(address) as channel:
        for method in (STATS, WATCH):
            assert "another call" in await rejection(channel, method, BODY, a_proof())
        assert server.served == 0


async def test_captured_proof_of_a_stream_is_rejected_a_second_time():
    async with a_server() as (server, address), grpc.aio.insecure_channel(address) as channel:
        proof = a_proof(WATCH, b"")
        await send(channel, WATCH, b"", proof)

        assert "accepted once" in await rejection(channel, WATCH, b"", proof)

        assert server.served == 1


async def test_calls_may_overtake_each_other_within_the_window():
    async with a_server() as (server, address), grpc.aio.insecure_channel(address) as channel:
        for number in (WINDOW, 1, WINDOW - 1, 2):
            await send(channel, MATCH, BODY, a_proof(number=number))
        assert "overtaken" in await rejection(channel, MATCH, BODY, a_proof(number=0))
        assert server.served == 4


@pytest.mark.parametrize("ago", [SKEW_SECONDS + 10, -SKEW_SECONDS - 10])
async def test_clock_that_is_off_is_rejected_with_the_hint(ago):
    async with a_server() as (server, address), grpc.aio.insecure_channel(address) as channel:
        says = await rejection(channel, MATCH, BODY, a_proof(ago=ago))
        assert f"{-ago} s ahead" in says
        assert "set the clocks" in says
        assert server.served == 0


async def test_proof_of_an_older_version_is_rejected_and_says_so():
    async with a_server() as (_, address), grpc.aio.insecure_channel(address) as channel:
        older = f"{unix_seconds()}.{bytes(16).hex()}.{bytes(32).hex()}"
        assert "update the caller's software" in await rejection(channel, MATCH, BODY, older)


async def test_request_that_is_not_proven_is_not_parsed():
    """Check that only requests with a valid proof reach the parser."""
    async with a_server() as (_, address), grpc.aio.insecure_channel(address) as channel:
        assert "asks for a proof" in await rejection(channel, MATCH, b"\xff" * 40, "no proof")


async def test_clients_prove_the_bytes_they_send():
    calls = [ProofStreamInterceptor(KEY), ProofAioUnaryInterceptor(KEY)]
    async with a_server() as (server, address), grpc.aio.insecure_channel(address, interceptors=calls) as channel:
        stub = pb_grpc.BlockStoreStub(channel)
        answers = stub.Watch(pb.WatchRequest(), timeout=SECONDS)
        assert [each.sequence async for each in answers] == [1]
        await asyncio.gather(*(stub.Stats(pb.StatsRequest(), timeout=SECONDS) for _ in range(200)))
        assert server.served == 201


async def test_clients_prove_messages_with_maps():
    """Check maps, whose entries have no fixed order; the proven bytes must be the sent ones."""
    calls = [ProofAioUnaryInterceptor(KEY)]
    async with a_server() as (_, address), grpc.aio.insecure_channel(address, interceptors=calls) as channel:
        echo = channel.unary_unary("/test.Maps/Echo", Struct.SerializeToString, Struct.FromString)
        for entries in range(0, 2000, 100):
            message = Struct()
            message.update({f"key {each}": each for each in range(entries)})
            assert await echo(message, timeout=SECONDS) == message


async def test_answer_is_proven_to_synchronous_clients():
    def ask() -> str:
        with grpc.insecure_channel(address) as channel:
            stub = pb_grpc.BlockStoreStub(grpc.intercept_channel(channel, ProofUnaryInterceptor(KEY)))
            return stub.Stats(pb.StatsRequest(), timeout=SECONDS).store_id

    async with a_server() as (_, address):
        assert await asyncio.to_thread(ask) == "asked"
