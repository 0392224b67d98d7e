"""Tests of the gRPC server on raw sockets, with the library's client and with hostile HTTP/2 clients."""

import asyncio
import base64
import contextlib
import gc
import gzip
import socket
import tracemalloc
import weakref
from contextlib import asynccontextmanager

import grpc
import ngh2
import pytest
from ngh2.events import DataReceived, ResponseReceived, StreamClosed, TrailersReceived

from fleet.net.grpc import http2 as grpc_http2
from fleet.net.grpc import http2_call as grpc_http2_call
from fleet.net.grpc.http2 import Http2Server
from fleet.net.settings import GrpcSettings
from fleet.net.sockets import UNSENT_BYTES
from tests.support.frontend.counting_service import CountingService, status_of
from tests.support.frontend.http2_frames import END_HEADERS, HEADERS, PREFACE, RESET, SETTINGS, call, frame
from tests.support.waiting import pace, turns, until, until_still

pytestmark = pytest.mark.integration

DATA, PING, CONTINUATION = 0, 6, 9
END_STREAM = 1
INITIAL_WINDOW = 4
OPEN = PREFACE + frame(SETTINGS, 0, 0)
HEAD = call(b"/x.Y/Thrice")


class GrpcServerSetup:
    def __init__(self, server, service, port):
        self.server = server
        self.service = service
        self.port = port

    @asynccontextmanager
    async def channel(self):
        async with grpc.aio.insecure_channel(
            f"127.0.0.1:{self.port}", options=[("grpc.use_local_subchannel_pool", 1)]
        ) as it:
            yield it

    @asynccontextmanager
    async def client(self, settings=None):
        """HTTP/2 client that does only what the test says."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        client = Http2Client(reader, writer, settings)
        try:
            yield client
        finally:
            writer.close()

    async def say(self, *pieces):
        """Return the server's bytes until it closes the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            for piece in pieces:
                writer.write(piece)
            async with asyncio.timeout(60):
                return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()


class Http2Client:
    def __init__(self, reader, writer, settings):
        self.reader, self.writer = reader, writer
        self.http = ngh2.Connection(ngh2.Role.CLIENT, ngh2.Configuration(auto_window_update=False))
        self.http.initiate_connection(settings or {})
        self.heads, self.tails, self.content, self.closed = {}, {}, {}, {}

    def call(self, method, *content, end=True, **headers):
        head = [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", b"/x.Y/" + method.encode()),
            (b":authority", b"x"),
        ]
        head += [(b"te", b"trailers"), (b"content-type", b"application/grpc")]
        head += [(name.replace("_", "-").encode(), value) for name, value in headers.items()]
        stream = self.http.send_request(head)
        for index, each in enumerate(content):
            self.http.send_data(stream, each, end_stream=end and index == len(content) - 1)
        self.flush()
        return stream

    def flush(self):
        self.writer.write(self.http.data_to_send())

    async def until(self, condition):
        async with asyncio.timeout(60):
            while not condition():
                data = await self.reader.read(1 << 16)
                assert data, "the connection is there"
                self.http.receive_data(data)
                for event in self.http.events():
                    match event:
                        case ResponseReceived():
                            self.heads[event.stream_id] = dict(event.headers)
                        case TrailersReceived():
                            self.tails[event.stream_id] = dict(event.headers)
                        case DataReceived():
                            self.content[event.stream_id] = self.content.get(event.stream_id, b"") + event.data
                        case StreamClosed():
                            self.closed[event.stream_id] = event.error_code
                self.flush()

    async def end_of(self, stream):
        """Return the headers that end the call."""
        await self.until(lambda: stream in self.closed)
        return self.tails.get(stream) or self.heads.get(stream)


def message(content, *, compressed=0):
    return bytes([compressed]) + len(content).to_bytes(4, "big") + content


@pytest.fixture
async def world(monkeypatch):
    async with a_world(monkeypatch, GrpcSettings()) as world:
        yield world


@pytest.fixture
async def crowded_world(monkeypatch):
    """Open a server that takes three connections."""
    async with a_world(monkeypatch, GrpcSettings(max_connections=3)) as world:
        yield world


@asynccontextmanager
async def a_world(monkeypatch, limits):
    monkeypatch.setattr(grpc_http2, "SWEEP_SECONDS", 0.05)
    monkeypatch.setattr(grpc_http2, "SHUTDOWN_NOTICE_SECONDS", 0.1)
    server, service = Http2Server(limits=limits), CountingService()
    server.add_generic_rpc_handlers(service.handlers())
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with asyncio.timeout(100):
        yield GrpcServerSetup(server, service, port)
        await server.stop(None)
    assert (len(server.connections), server.calls, server.held_bytes) == (0, 0, 0)


async def test_client_that_speaks_tls_is_logged(world, caplog):
    async with grpc.aio.secure_channel(f"127.0.0.1:{world.port}", grpc.ssl_channel_credentials()) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await channel.unary_unary("/x.Y/Thrice")(b"a", timeout=60)

    await until(lambda: "clients speak TLS, and this port does not" in caplog.messages)


async def test_writes_of_one_turn_share_a_connection_and_a_write(world, monkeypatch):
    async with world.channel() as channel:
        calls = [channel.unary_stream("/x.Y/Wait")(b"%d" % number) for number in range(8)]
        await until(lambda: world.service.began == 8)
        (connection,) = world.server.connections
        sent = []
        real = connection.http

        class Counted:
            def __getattr__(self, name):
                return getattr(real, name)

            def data_to_send(self):
                content = real.data_to_send()
                sent.append(content)
                return content

        connection.http = Counted()
        world.service.go.set()
        assert [[each async for each in call] for call in calls] == [[b"%d" % number] for number in range(8)]
    (answers,) = [each for each in sent if message(b"0") in each]
    assert all(message(b"%d" % number) in answers for number in range(8))


async def test_message_that_expands_too_much_ends_only_its_call(world):
    bomb = gzip.compress(bytes(16 << 20))
    async with world.channel() as channel, world.client() as client:
        waiting = channel.unary_stream("/x.Y/Wait")(b"a")
        await until(lambda: world.service.began == 1)
        tracemalloc.start()
        try:
            calls = [client.call("One", message(bomb, compressed=1), grpc_encoding=b"gzip") for _ in range(10)]
            ends = [await client.end_of(each) for each in calls]
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        world.service.go.set()
        assert [each async for each in waiting] == [b"a"]
    assert {end[b"grpc-status"] for end in ends} == {b"8"}
    assert b"send it uncompressed" in ends[0][b"grpc-message"]
    assert most < 8 << 20, "far less than 160 MiB"
    assert world.service.began == 1


async def test_undecodable_message_ends_only_its_call(world):
    packed = gzip.compress(b"a" * 999)
    wrong = [
        (message(packed[:-3], compressed=1), b"gzip", b"13"),
        (message(packed + b"more", compressed=1), b"gzip", b"13"),
        (message(b"nothing of the kind", compressed=1), b"gzip", b"13"),
        (message(packed, compressed=1), b"deflate", b"13"),
        (message(packed, compressed=1), b"identity", b"13"),
        (message(packed, compressed=2), b"gzip", b"13"),
        (message(packed, compressed=1), b"snappy", b"12"),
    ]
    async with world.client() as client:
        good = client.call("One", message(b"", compressed=0), grpc_encoding=b"gzip")
        calls = [client.call("One", content, grpc_encoding=encoding) for content, encoding, _ in wrong]
        unnamed = client.call("One", message(packed, compressed=1))
        assert [(await client.end_of(each))[b"grpc-status"] for each in calls] == [status for *_, status in wrong]
        assert (await client.end_of(unnamed))[b"grpc-status"] == b"13"
        assert (await client.end_of(good))[b"grpc-status"] == b"0", "a message need not be compressed"
        assert client.heads[calls[-1]][b"grpc-accept-encoding"] == b"identity,gzip,deflate", "the error says what to do"
    assert world.service.began == 1


async def test_message_may_arrive_in_any_pieces(world):
    sent = [b"a" * 300, b"", b"bc" * 200]
    content = b"".join(
        message(gzip.compress(each), compressed=1) if number % 2 else message(each) for number, each in enumerate(sent)
    )
    for size in (1, 4, 7, len(content)):
        async with world.client() as client:
            pieces = [content[at : at + size] for at in range(0, len(content), size)]
            call = client.call("LateEcho", end=False, grpc_encoding=b"gzip")
            for piece in pieces:
                client.http.send_data(call, piece, end_stream=False)
                client.flush()
                await turns()
            client.http.send_data(call, b"", end_stream=True)
            client.flush()
            assert (await client.end_of(call))[b"grpc-status"] == b"0"
            assert client.content[call] == b"".join(map(message, sent))


async def test_too_long_message_is_rejected_by_its_announced_length(world):
    announced = bytes(1) + (1 << 31).to_bytes(4, "big")
    reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
    writer.write(OPEN + frame(HEADERS, END_HEADERS, 1, call(b"/x.Y/Thrice")) + frame(DATA, 0, 1, announced))
    async with asyncio.timeout(60):
        while frame(RESET, 0, 1, bytes(4)) not in await reader.read(1 << 16):
            pass
    await until(lambda: not any(each.calls for each in world.server.connections))
    writer.close()


async def test_sender_faster_than_the_reader_is_throttled(world):
    async with world.channel() as channel:
        call = channel.stream_stream("/x.Y/Echo")()

        async def write():
            for _ in range(100):
                await call.write(b"x" * 100_000)
            await call.done_writing()

        writing = asyncio.create_task(write())
        await until(lambda: world.server.held_bytes)
        await until_still(lambda: world.server.held_bytes)
        assert world.server.held_bytes < 2 << 20
        assert not writing.done()
        world.service.go.set()
        assert sum([len(message) async for message in call]) == 10_000_000
        await writing


async def test_silent_connection_is_cut(world, monkeypatch):
    monkeypatch.setattr(grpc_http2, "SILENCE_SECONDS", 0.2)
    for opening in (b"", PREFACE[:5], OPEN, OPEN + frame(HEADERS, 0, 1, call(b"/x.Y/Thrice"))):
        await world.say(opening)
    await until(lambda: not world.server.connections)


async def test_paused_server_does_not_blame_its_clients(world):
    async with world.channel() as channel:
        call = channel.unary_stream("/x.Y/Wait")(b"a")
        await until(lambda: world.service.began == 1)
        (connection,) = world.server.connections

        connection.check_limits(asyncio.get_running_loop().time() + 1000)

        assert connection.pinged_at is not None
        await until(lambda: connection.pinged_at is None)  # the client has answered
        world.service.go.set()
        assert [each async for each in call] == [b"a"]


@pytest.mark.parametrize(
    "flood",
    [
        b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 30,
        OPEN + frame(PING, 0, 0, b"12345678") * 20_000,
        OPEN + frame(SETTINGS, 0, 0) * 20_000,
        OPEN + frame(HEADERS, 0, 1, call(b"/x.Y/Thrice")) + frame(CONTINUATION, 0, 1, b"\x00\x01a\x01b") * 100,
        OPEN + frame(DATA, 0, 1, b"a"),
        OPEN + frame(HEADERS, END_HEADERS, 2, call(b"/x.Y/Thrice")),
        OPEN + frame(RESET, 0, 1, bytes(4)) * 5,
        OPEN
        + b"".join(frame(HEADERS, END_HEADERS, n, HEAD) + frame(RESET, 0, n, bytes(4)) for n in range(1, 30_001, 2)),
    ],
    ids=["http1", "tls", "pings", "settings", "continuations", "data", "even", "resets", "calls that are reset"],
)
async def test_floods_and_invalid_http2_end_only_their_connection(world, flood, caplog, monkeypatch):
    monkeypatch.setattr(grpc_http2, "SILENCE_SECONDS", 60.0)  # the silence limit is not under test
    async with world.channel() as channel:
        first = [each async for each in channel.unary_stream("/x.Y/Thrice")(b"a")]
        await world.say(flood)
        assert [each async for each in channel.unary_stream("/x.Y/Thrice")(b"a")] == first == [b"a"] * 3
    assert caplog.records == []


async def test_binary_metadata_may_come_joined_and_without_padding(world):
    async with world.client() as client:
        joined = base64.b64encode(b"one") + b"," + base64.b64encode(b"three").rstrip(b"=")
        call = client.call("One", message(b""), x_bin=joined)
        assert (await client.end_of(call))[b"grpc-status"] == b"0"
        assert client.content[call] == message(b"one,three")


async def test_unreadable_metadata_ends_only_its_call(world, caplog):
    async with world.client() as client:
        bad = client.call("One", message(b""), x_bin=b"!!!!!")
        good = client.call("One", message(b""))
        assert (await client.end_of(bad))[b"grpc-status"] == b"13"
        assert (await client.end_of(good))[b"grpc-status"] == b"0"
    assert caplog.records == []


async def test_too_long_metadata_ends_only_its_call(world):
    async with world.channel() as channel:
        waiting = channel.unary_stream("/x.Y/Wait")(b"a")
        await until(lambda: world.service.began == 1)
        call = channel.unary_stream("/x.Y/One")(b"", metadata=(("x", "y" * 30_000),))
        assert await status_of(call) is grpc.StatusCode.RESOURCE_EXHAUSTED
        world.service.go.set()
        assert [each async for each in waiting] == [b"a"]


@pytest.mark.parametrize(
    "metadata",
    [tuple((f"x-{number}", "v") for number in range(1500)), (("x", "y" * 100_000),)],
    ids=["many", "much"],
)
async def test_oversized_head_ends_only_its_connection(world, metadata):
    async with world.channel() as channel, world.channel() as other:
        waiting = other.unary_stream("/x.Y/Wait")(b"a")
        await until(lambda: world.service.began == 1)
        call = channel.unary_stream("/x.Y/One")(b"", metadata=metadata, timeout=60)
        assert await status_of(call) is not grpc.StatusCode.OK
        world.service.go.set()
        assert [each async for each in waiting] == [b"a"]
    assert world.service.began == 1


async def test_total_metadata_of_all_calls_is_bounded(world, monkeypatch):
    monkeypatch.setattr(grpc_http2, "HELD_BYTES", 300_000)
    world.server.max_held_bytes = 0
    async with world.channel() as channel:
        calls = [channel.unary_stream("/x.Y/Never")(b"", metadata=(("x", "y" * 15_000),)) for _ in range(60)]
        await until(lambda: sum(call.done() for call in calls) >= 35)
        refused = {await call.code() for call in calls if call.done()}
        assert refused == {grpc.StatusCode.UNAVAILABLE}
        assert world.server.held_bytes < 400_000
        assert world.service.began < 25
        for call in calls:
            call.cancel()
        await until(lambda: not world.server.held_bytes)
        assert await channel.unary_unary("/x.Y/One")(b"") == b""


async def test_client_hears_nothing_of_a_bug(world, caplog):
    async with world.channel() as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await channel.unary_unary("/x.Y/One")(b"bug")
        assert raised.value.details() == ""
    assert "ZeroDivisionError" in caplog.text


async def test_call_that_ends_early_is_read_to_its_end(world):
    async with world.client({INITIAL_WINDOW: 100}) as client:
        call = client.call("Thrice", message(b"x" * 995), end=False)
        await client.until(lambda: len(client.content.get(call, b"")) == 100)
        await until(lambda: all(each.task.done() for each in _calls(world)))
        client.http.set_local_window_size(10_000, stream_id=call)
        client.flush()
        assert (await client.end_of(call))[b"grpc-status"] == b"0"
        assert client.content[call] == message(b"x" * 995) * 3
        assert client.closed[call] == 0, "the rest of the answer is useless"


async def test_call_whose_answer_stays_unread_is_reset(world, monkeypatch):
    monkeypatch.setattr(grpc_http2_call, "UNREAD_STATUS_SECONDS", 0.1)
    async with world.client({INITIAL_WINDOW: 100}) as client:
        call = client.call("Thrice", message(b"x" * 995))
        await client.end_of(call)
        assert client.closed[call] == 8


async def test_unread_answers_take_no_window_from_other_calls(world):
    async with asyncio.timeout(60), world.channel() as channel:
        for _ in range(30):
            call = channel.stream_stream("/x.Y/Echo")()
            for size in (1, 1, 1, 1, 200_000):
                await call.write(b"x" * size)
            await until(lambda: len(_calls(world)) == 1 and len(_calls(world)[0].messages) == 5)
            call.cancel()
            await until(lambda: not _calls(world))
            assert world.server.held_bytes == 0
        world.service.go.set()
        call = channel.stream_stream("/x.Y/Echo")()
        await call.write(b"x" * 3_000_000)
        assert len(await call.read()) == 3_000_000
        call.cancel()


@pytest.mark.parametrize("method", ["One", "LateEcho"])
async def test_message_incomplete_at_the_deadline_is_rejected(world, method, monkeypatch):
    monkeypatch.setattr(grpc_http2_call, "REQUEST_SECONDS", 0.2)
    async with world.client() as client:
        call = client.call(method, message(b"x" * 50_000)[:-1], end=False)
        assert (await client.end_of(call))[b"grpc-status"] == b"4"
        await until(lambda: world.server.held_bytes == 0)


async def test_stream_may_be_idle_between_messages(world, monkeypatch):
    monkeypatch.setattr(grpc_http2_call, "REQUEST_SECONDS", 0.1)
    async with world.channel() as channel:
        call = channel.stream_stream("/x.Y/LateEcho")()
        for _ in range(2):
            await pace(0.3, "the stream is idle for three times the limit of an incomplete message")
            await call.write(b"a")
            assert await call.read() == b"a"
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF


async def test_total_size_of_incomplete_messages_is_bounded(world, monkeypatch):
    monkeypatch.setattr(grpc_http2, "HELD_BYTES", 500_000)
    world.server.max_held_bytes = 0
    async with world.client() as client:
        calls = [client.call("One", message(b"x" * 90_000)[:-1], end=False) for _ in range(10)]
        await client.until(lambda: len(client.closed) >= 3)
        assert world.server.held_bytes < 600_000
        refused = {client.heads[each][b"grpc-status"] for each in calls if each in client.closed}
        assert refused <= {b"8", b"14"}
    await until(lambda: world.server.held_bytes == 0)


async def test_long_incomplete_messages_leave_room_for_normal_calls(world, monkeypatch):
    monkeypatch.setattr(grpc_http2, "HELD_BYTES", 1_000_000)
    world.server.max_held_bytes = 200_000
    async with world.client() as client, world.client() as other, world.channel() as channel:
        for each in (client, other):
            calls = [each.call("One", message(b"x" * 90_000)[:-1], end=False) for _ in range(10)]
            await each.until(lambda client=each: client.closed or world.server.held_bytes > 850_000)
        await other.until(lambda: other.closed)
        assert {other.heads[each][b"grpc-status"] for each in other.closed} == {b"8"}
        assert {other.heads[each][b"grpc-status-details-bin"] != b"" for each in other.closed} == {True}
        assert len(other.closed) < len(calls)
        assert await channel.unary_unary("/x.Y/One")(b"x" * 60_000) == b""
    await until(lambda: world.server.held_bytes == 0)


async def test_calls_beyond_the_limit_are_rejected_until_others_end(world, monkeypatch):
    monkeypatch.setattr(grpc_http2, "MAX_CALLS", 3)
    async with world.channel() as channel:
        calls = [channel.unary_stream("/x.Y/Wait")(b"") for _ in range(3)]
        await until(lambda: world.service.began == 3)
        assert await status_of(channel.unary_stream("/x.Y/Wait")(b"")) is grpc.StatusCode.UNAVAILABLE
        calls[0].cancel()
        await until(lambda: world.server.calls == 2)
        assert await channel.unary_unary("/x.Y/One")(b"") == b""


async def test_client_that_reads_nothing_is_cut_and_holds_little(world):
    world.server.limits = GrpcSettings(write_timeout_seconds=1.0)
    _reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
    writer.transport.pause_reading()
    windows = frame(8, 0, 0, (2**31 - 1 - 65_535).to_bytes(4, "big"))
    settings = (INITIAL_WINDOW).to_bytes(2, "big") + (2**31 - 1).to_bytes(4, "big")
    asked = frame(HEADERS, END_HEADERS, 1, call(b"/x.Y/Endless")) + frame(DATA, END_STREAM, 1, message(b"x" * 5000))
    writer.write(PREFACE + frame(SETTINGS, 0, 0, settings) + windows + asked)
    await until(lambda: world.service.began == 1)
    (connection,) = world.server.connections
    await until(lambda: connection.paused)
    assert connection.transport.get_write_buffer_size() < 1 << 20
    await until(lambda: world.service.cancelled == 1)
    assert not world.server.connections
    writer.close()


async def test_kernel_keeps_few_unsent_bytes_of_a_connection(world):
    """Otherwise a slow client would seem to read nothing for half a minute."""
    async with world.client():
        await until(lambda: world.server.connections)
        (connection,) = world.server.connections
        sock = connection.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == UNSENT_BYTES


async def test_connection_that_reads_slowly_and_enough_is_not_cut(world):
    """Refill all buffers, those of the kernel included, whenever the client has read something."""
    world.server.limits = GrpcSettings(write_timeout_seconds=1.0)
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 10)
        sock.setblocking(False)
        await loop.sock_connect(sock, ("127.0.0.1", world.port))
        windows = frame(8, 0, 0, (2**31 - 1 - 65_535).to_bytes(4, "big"))
        settings = INITIAL_WINDOW.to_bytes(2, "big") + (2**31 - 1).to_bytes(4, "big")
        asked = frame(HEADERS, END_HEADERS, 1, call(b"/x.Y/Endless"))
        asked += frame(DATA, END_STREAM, 1, message(b"x" * 5000))
        await loop.sock_sendall(sock, PREFACE + frame(SETTINGS, 0, 0, settings) + windows + asked)
        until_then = loop.time() + 4  # periods
        while loop.time() < until_then:
            assert await loop.sock_recv(sock, 10_000)
            await pace(0.02, "the client reads slowly")

        assert (world.service.began, world.service.cancelled) == (1, 0)


async def test_caller_that_drips_is_reset_and_its_connection_lives(world):
    world.server.limits = GrpcSettings(write_timeout_seconds=1.0)
    async with world.client({INITIAL_WINDOW: 10_000}) as client:
        stream = client.call("Endless", message(b"x" * 3000))
        await until(lambda: world.service.began == 1)

        async def drip():
            while not world.service.cancelled:
                with contextlib.suppress(ngh2.NGH2Error):  # the stream was just reset
                    client.http.acknowledge_received_data(20, stream)
                client.flush()
                await pace(0.02, "the client takes few bytes at a time")

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(drip())
            await client.until(lambda: stream in client.closed)
        assert world.service.cancelled == 1
        assert client.closed[stream] == 8
        other = client.call("One", message(b""))
        await client.until(lambda: other in client.closed)
        assert client.tails.get(other, client.heads[other])[b"grpc-status"] == b"0"


async def test_idle_connections_give_way_to_new_ones(crowded_world):
    world = crowded_world
    async with world.channel() as busy, world.client() as idle, world.client() as silent:
        waiting = busy.unary_stream("/x.Y/Wait")(b"a")
        await until(lambda: world.service.began == 1)
        asked = idle.call("One", message(b""))
        await idle.until(lambda: asked in idle.closed)
        await until(lambda: len(world.server.table) == 3)
        async with world.channel() as first:
            assert await first.unary_unary("/x.Y/One")(b"") == b""
            async with asyncio.timeout(60):
                await silent.reader.read()  # until it is closed
            silent.writer.close()
            async with world.channel() as second:
                assert await second.unary_unary("/x.Y/One")(b"") == b""
                async with asyncio.timeout(60):
                    assert await idle.reader.read(), "the client was told to reconnect"
                    assert await idle.reader.read() == b""
        world.service.go.set()
        assert [each async for each in waiting] == [b"a"]


async def test_closed_connection_is_freed_without_the_collector(world):
    gc.disable()
    try:
        async with world.client() as client:
            asked = client.call("One", message(b""))
            await client.until(lambda: asked in client.closed)
            (known,) = (weakref.ref(each) for each in world.server.connections)
        await until(lambda: known() is None)
    finally:
        gc.enable()


async def test_never_used_connection_is_cut_before_a_ping(world):
    world.server.limits = GrpcSettings(first_byte_timeout_seconds=0.2)
    assert b"are you?" not in await world.say()


@pytest.mark.parametrize(
    "increment",
    [(1, 0), (0, 0), (1, 2**31 - 1), (0, 2**31 - 1)],
    ids=["none", "none of all", "too much", "too much of all"],
)
async def test_invalid_windows_end_their_stream_or_connection(world, increment):
    stream, size = increment
    asked = frame(HEADERS, END_HEADERS, 1, call(b"/x.Y/Wait")) + frame(DATA, END_STREAM, 1, message(b"a"))
    _reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
    writer.write(OPEN + asked)
    await until(lambda: world.service.began == 1)
    writer.write(frame(8, 0, stream, size.to_bytes(4, "big")))
    await until(lambda: world.service.cancelled == 1)
    writer.close()


async def test_socket_path_is_taken_over_only_from_a_killed_server(tmp_path):
    path = tmp_path / "it"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    server = Http2Server()
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    with pytest.raises(RuntimeError, match="somebody listens"):
        Http2Server().add_insecure_port(f"unix:{path}")
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        assert await status_of(channel.unary_stream("/x.Y/Z")(b"")) is grpc.StatusCode.UNIMPLEMENTED
    await server.stop(None)
    assert not path.exists()


async def test_host_name_means_all_its_addresses(monkeypatch):
    found = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.2", 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("203.0.113.1", 0)),  # not an address of this machine
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    server = Http2Server()
    port = server.add_insecure_port("a.name:0")
    monkeypatch.undo()
    await server.start()
    for host in ("127.0.0.1", "127.0.0.2"):
        async with grpc.aio.insecure_channel(f"{host}:{port}") as channel:
            assert await status_of(channel.unary_stream("/x.Y/Z")(b"")) is grpc.StatusCode.UNIMPLEMENTED
    await server.stop(None)


def _calls(world):
    return [each for connection in world.server.connections for each in connection.calls.values()]
