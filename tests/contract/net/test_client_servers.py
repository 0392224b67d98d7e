"""Contract tests of the gRPC servers of client ports: every gRPC library that Fleet can serve with keeps the same promises."""

import asyncio
import contextlib
from contextlib import asynccontextmanager

import grpc
import pytest

from fleet.net.grpc.client_servers import client_server
from fleet.net.settings import GrpcLibrary, GrpcSettings
from tests.support.frontend.counting_service import CountingService, status_of
from tests.support.waiting import until, until_answered

pytestmark = [pytest.mark.integration, pytest.mark.parametrize("library", list(GrpcLibrary))]

SEPARATE = (("grpc.use_local_subchannel_pool", 1),)


class ClientServerSetup:
    def __init__(self, server, service, port):
        self.server = server
        self.service = service
        self.address = f"127.0.0.1:{port}"

    def channel(self, **more):
        return grpc.aio.insecure_channel(self.address, options=SEPARATE, **more)


def a_server(library, *, shared=False, **limits):
    return client_server(GrpcSettings(library=library, **limits), shared=shared, max_held_bytes=1 << 30)


@asynccontextmanager
async def serving(library, **limits):
    server, service = a_server(library, **limits), CountingService()
    server.add_generic_rpc_handlers(service.handlers())
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with asyncio.timeout(100):
        yield ClientServerSetup(server, service, port)
        await server.stop(None)


@pytest.fixture
async def world(library):
    async with serving(library) as world:
        yield world


@pytest.fixture
async def crowded_world(library):
    """Open a server that accepts at most three connections."""
    async with serving(library, max_connections=3) as world:
        yield world


@pytest.mark.parametrize("path", ["/x.Y/No", "/", "/x.Z/Thrice"])
async def test_unknown_method_is_unimplemented(world, path):
    async with world.channel() as channel:
        assert await status_of(channel.unary_stream(path)(b"")) is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_clients_may_compress(world, compression):
    prose = " ".join(map(str, range(400_000))).encode()
    async with world.channel(compression=compression) as channel:
        for content in (b"", b"a" * 200_000, prose):
            assert [each async for each in channel.unary_stream("/x.Y/Thrice")(content)] == [content] * 3
        call = channel.stream_stream("/x.Y/LateEcho")()
        for number in range(3):
            await call.write(b"%d" % number * 10_000)
            assert await call.read() == b"%d" % number * 10_000
        await call.done_writing()
    await until(lambda: world.server.held_bytes == 0)


async def test_metadata_goes_both_ways_as_text_and_as_bytes(world):
    async with world.channel() as channel:
        call = channel.unary_unary("/x.Y/One")(b"", metadata=(("x-a", "b c"), ("x-b-bin", b"\x00\xfe")))
        assert await call == b"b c,\x00\xfe"
        assert dict(await call.trailing_metadata()) == {"x-bin": b"\x00\xff", "y": "z"}


async def test_a_deadline_ends_a_call_on_both_sides(world):
    async with world.channel() as channel:

        async def asked():
            status = await status_of(channel.unary_stream("/x.Y/Wait")(b"", timeout=0.3))
            assert status is grpc.StatusCode.DEADLINE_EXCEEDED
            return world.service.began  # 0 if the client's process was too slow to send the call before its deadline

        await until_answered(asked)
        await until(lambda: world.service.cancelled == world.service.began)


async def test_cancelled_or_cut_call_cancels_its_handler(world):
    async with world.channel() as channel:
        first, _ = channel.unary_stream("/x.Y/Wait")(b""), channel.unary_stream("/x.Y/Wait")(b"")
        await until(lambda: world.service.began == 2)
        first.cancel()
        await until(lambda: world.service.cancelled == 1)
    await until(lambda: world.service.cancelled == 2)


async def test_bug_ends_only_its_call(world, caplog):
    async with world.channel() as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await channel.unary_unary("/x.Y/One")(b"bug")
        assert raised.value.code() is grpc.StatusCode.UNKNOWN
        assert await channel.unary_unary("/x.Y/One")(b"") == b""
    assert "ZeroDivisionError" in caplog.text


async def test_new_connections_are_rejected_when_all_have_calls(crowded_world):
    world = crowded_world
    async with contextlib.AsyncExitStack() as held:
        calls = []
        for number in range(3):
            channel = await held.enter_async_context(world.channel())
            calls.append(channel.unary_stream("/x.Y/Wait")(b"a"))
            await until(lambda count=number + 1: world.service.began == count)
        async with world.channel() as channel:
            assert await status_of(channel.unary_stream("/x.Y/One")(b"")) is grpc.StatusCode.UNAVAILABLE
        world.service.go.set()
        for call in calls:
            assert [each async for each in call] == [b"a"]


async def test_stopping_server_lets_calls_end(world):
    async with world.channel() as channel:
        call = channel.unary_stream("/x.Y/Wait")(b"last words")
        await until(lambda: world.service.began == 1)
        stopping = asyncio.create_task(world.server.stop(1000))

        async def refused():
            with contextlib.suppress(grpc.aio.AioRpcError):
                return not await channel.unary_unary("/x.Y/One")(b"")
            return True

        await until_answered(refused)
        world.service.go.set()
        assert [each async for each in call] == [b"last words"]
        await stopping


async def test_stopping_server_cancels_late_calls(world):
    async with world.channel() as channel:
        stuck = channel.unary_stream("/x.Y/Never")(b"a")
        await until(lambda: world.service.began == 1)
        await world.server.stop(0.2)
        assert await status_of(stuck) is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    "listen", ["127.0.0.1", "50051", ":50051", "127.0.0.1:99999", "127.0.0.1:-1", "203.0.113.1:0", "unix:/no/such"]
)
async def test_error_names_the_invalid_listen_address(library, listen):
    server = a_server(library)
    with pytest.raises(RuntimeError, match=listen):
        server.add_insecure_port(listen)


async def test_ports_are_shared_only_on_request(library):
    one, two, third = a_server(library, shared=True), a_server(library, shared=True), a_server(library)
    port = one.add_insecure_port("127.0.0.1:0")
    await one.start()
    assert two.add_insecure_port(f"127.0.0.1:{port}") == port
    with pytest.raises(RuntimeError, match=str(port)):
        third.add_insecure_port(f"127.0.0.1:{port}")
    for server in (one, two):
        await server.stop(None)
