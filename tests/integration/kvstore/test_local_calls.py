"""Tests of calls by clients on the node's own host: frames over the socket that also hands out the memory."""

import asyncio
import contextlib
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError

from kvstore.clock import Nanos
from kvstore.net import unix_sockets as sockets
from kvstore.protocol import framed_call_server as call_server
from kvstore.protocol import wire
from kvstore.protocol.calls import ACCEPTED, FRAME_BYTES, HANDSHAKE, CallRefused, Method, NodeCalls
from kvstore.protocol.framed_call_server import STALLED, TURN_REQUESTS, FramedCallServer
from kvstore.service.server import open_node
from kvstore.service.settings import StoreSettings
from kvstore.system_clock import MonotonicClock
from kvstore.transports.shared_memory import HANDOUT_SECONDS, HANDOUTS
from kvstore.v1 import blocks_pb2 as pb
from tests.support.kvstore.builders import (
    BLOCK_BYTES,
    NodeProcess,
    a_block,
    a_chain,
    a_namespace,
    a_node,
    a_short_folder,
    a_store_client,
)
from tests.support.stopwatch import at_most
from tests.support.waiting import eventually, turns, until

pytestmark = pytest.mark.integration

NAMESPACE = a_namespace()
FRAME = struct.Struct("<IB")


class NoGrpc:
    """Stub that must not be used."""

    def __getattr__(self, name: str) -> Any:
        def refuse(*_: Any, **__: Any) -> Any:
            raise AssertionError(f"{name} went by gRPC")

        return refuse


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    with a_node(capacity_bytes=64 * BLOCK_BYTES) as node, a_store_client(node.address, NAMESPACE) as client:
        assert client.write(a_chain(2), a_block) == 2
        yield node


@pytest.fixture
def calls(node: NodeProcess) -> Iterator[NodeCalls]:
    calls = NodeCalls(NoGrpc(), node.endpoints.shm_socket, MonotonicClock())
    yield calls
    calls.close()


@contextlib.contextmanager
def a_line(node: NodeProcess) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(60)
        line.connect(node.endpoints.shm_socket)
        line.sendall(HANDSHAKE)
        assert line.recv(4, socket.MSG_WAITALL) == ACCEPTED
        yield line


def a_request(node: NodeProcess, blocks: int = 2, **fields: Any) -> pb.MatchRequest:
    defaults = {
        "digest": NAMESPACE.digest,
        "hashes": b"".join(a_chain(blocks)),
        "incarnation": node.endpoints.incarnation,
    }
    return pb.MatchRequest(**{**defaults, **fields})


def framed(method: int, message: bytes) -> bytes:
    return FRAME.pack(1 + len(message), method) + message


def is_over(line: socket.socket) -> bool:
    """Return whether the node has ended the connection."""
    try:
        return line.recv(1) == b""
    except ConnectionResetError:
        return True


def test_frequent_calls_do_not_use_grpc(node, calls):
    name = b"".join(a_chain(1, "new"))
    owner = {"digest": NAMESPACE.digest, "incarnation": node.endpoints.incarnation, "owner": "me"}

    reserved = calls.reserve(pb.ReserveRequest(hashes=name, lease_ms=1000, **owner), 5)
    publish = pb.PublishRequest(reservation_id=reserved.reservation_id, indices=[0], crc32c=[7], owner="me")
    published = calls.publish(publish, 5)
    matched = calls.match(a_request(node, hashes=name, lease_ms=1000), 5)
    calls.release(pb.ReleaseRequest(lease_ids=[matched.lease_id]), 5)

    assert published.published == 1
    assert matched.lease_id
    assert len(matched.slots) == 20


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("hashes", {"hashes": b"x" * 15}),
        ("digest", {"digest": b"x"}),
        ("lease_ms", {"lease_ms": 10**9}),
        ("tenant", {"tenant": b"x"}),
    ],
)
def test_invalid_request_is_rejected_on_a_live_connection(node, calls, field, wrong):
    for _ in range(2):
        with pytest.raises(grpc.RpcError) as refused:
            calls.match(a_request(node, **wrong), 5)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert refused.value.details().startswith(f"{field}: ")
        assert (wire.FIELD_KEY, field) in refused.value.trailing_metadata()

    assert len(calls.match(a_request(node), 5).slots) == 2 * 20
    assert len(calls.connections) == 1


def test_a_request_to_another_incarnation_is_rejected_as_by_grpc(node, calls):
    with pytest.raises(grpc.RpcError) as refused:
        calls.match(a_request(node, incarnation="another"), 5)

    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize(
    "garbage",
    [
        framed(99, b""),
        framed(Method.MATCH, b"\xff" * 40),
        struct.pack("<I", 0),
        struct.pack("<I", FRAME_BYTES + 1),
        os.urandom(3) + b"\xff" + os.urandom(4096),
    ],
    ids=["no method", "no message", "empty", "too long", "noise"],
)
def test_garbage_ends_its_own_connection_and_no_other(node, calls, garbage):
    calls.match(a_request(node), 5)

    with a_line(node) as line, a_line(node) as bystander:
        line.sendall(garbage)
        assert is_over(line)
        bystander.sendall(framed(Method.MATCH, a_request(node).SerializeToString()))
        assert bystander.recv(1)

    assert len(calls.match(a_request(node), 5).slots) == 2 * 20
    assert len(calls.connections) == 1, "the connection stays open"


def test_split_or_joined_requests_are_answered_in_order(node):
    with a_line(node) as line:
        two = framed(Method.MATCH, a_request(node).SerializeToString())
        one = framed(Method.MATCH, a_request(node, 1).SerializeToString())
        for byte in two:
            line.sendall(bytes((byte,)))
        line.sendall(one + two)

        slots = []
        while len(slots) < 3:
            size, status = FRAME.unpack(line.recv(FRAME.size, socket.MSG_WAITALL))
            assert status == 0
            body = line.recv(size - 1, socket.MSG_WAITALL) if size > 1 else b""
            slots.append(len(pb.MatchResponse.FromString(body).slots) // 20)

    assert slots == [2, 1, 2]


def test_a_chain_of_the_greatest_length_goes_through(node, calls):
    names = os.urandom(16 * wire.MAX_HASHES)
    assert calls.match(a_request(node, hashes=names), 5).slots == b""

    with pytest.raises(grpc.RpcError) as refused:
        calls.match(a_request(node, hashes=names + os.urandom(16)), 5)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_late_answer_reaches_no_other_call():
    with a_node() as node, a_store_client(node.address, NAMESPACE) as client:
        client.write(a_chain(3), a_block)
        calls = NodeCalls(NoGrpc(), node.endpoints.shm_socket, MonotonicClock())
        calls.match(a_request(node), 5)
        node.freeze()
        with pytest.raises(CallRefused) as late:
            calls.match(a_request(node, 3), 0.1)
        node.thaw()

        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert len(calls.match(a_request(node, 1), 5).slots) == 20
        calls.close()


def test_ended_connection_is_replaced_before_sending():
    with a_node() as node, a_store_client(node.address, NAMESPACE):
        calls = NodeCalls(NoGrpc(), node.endpoints.shm_socket, MonotonicClock())
        calls.match(a_request(node), 5)
        node.kill()
        node.start()
        with a_store_client(node.address, NAMESPACE):
            assert calls.match(a_request(node), 5).slots == b""
        assert len(calls.connections) == 1
        calls.close()


def test_release_returns_at_once_and_takes_effect():
    with a_node() as node, a_store_client(node.address, NAMESPACE, call_timeout_seconds=60) as client:
        client.write(a_chain(2), a_block)
        first, second = (client.match(a_chain(2), lease_seconds=10) for _ in range(2))
        node.freeze()
        with at_most(20):
            client.release(first.lease_id)
        node.thaw()

        assert len(client.match(a_chain(1), lease_seconds=0)) == 1, "not the answer to the release"
        client.release(second.lease_id)
        assert client.stats().pinned == 0
        assert len(client.connection.session.calls.connections) == 1


def test_unanswered_release_costs_only_the_next_calls_deadline():
    with a_node() as node, a_store_client(node.address, NAMESPACE, call_timeout_seconds=0.3) as client:
        eventually(lambda: client.write(a_chain(1), a_block))
        match = eventually(lambda: client.match(a_chain(1), lease_seconds=10))
        node.freeze()
        client.release(match.lease_id)
        started = time.monotonic()

        with at_most(20):
            assert len(client.match(a_chain(1), lease_seconds=0)) == 0
        assert time.monotonic() - started > 0.25
        client.release(match.lease_id)
        assert not client.answers, "a release does not notice that the node is back"
        node.thaw()
        assert eventually(lambda: len(client.match(a_chain(1), lease_seconds=0))) == 1


def test_release_before_closing_frees_the_lease(node):
    with a_store_client(node.address, NAMESPACE) as client:
        client.release(client.match(a_chain(2), lease_seconds=10).lease_id)

    with a_store_client(node.address, NAMESPACE) as other:
        assert other.stats().pinned == 0


def test_calls_use_grpc_without_a_socket(node):
    with a_store_client(node.address, NAMESPACE) as client:
        client.connection.session.calls.path = f"{node.folder}/gone"

        assert len(client.match(a_chain(2), lease_seconds=0)) == 2


def test_closing_ends_the_calls_in_progress():
    with a_node() as node, a_store_client(node.address, NAMESPACE):
        calls = NodeCalls(NoGrpc(), node.endpoints.shm_socket, MonotonicClock())
        calls.match(a_request(node), 5)
        node.freeze()
        ended: list[grpc.StatusCode] = []

        def ask() -> None:
            try:
                calls.match(a_request(node), 60)
            except grpc.RpcError as error:
                ended.append(error.code())

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        eventually(lambda: not calls.idle)
        with at_most(10):
            calls.close()
            thread.join(60)

        assert ended[0] in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        with pytest.raises(CallRefused):
            calls.match(a_request(node), 1)


# On an event loop of the test


def an_echo(message: bytes) -> pb.MatchResponse:
    return pb.MatchResponse.FromString(message)


@contextlib.asynccontextmanager
async def a_server() -> AsyncIterator[tuple[FramedCallServer, socket.socket]]:
    """Yield a server that echoes requests, and a connection to it."""
    server = FramedCallServer({Method.MATCH: an_echo})
    ours, theirs = socket.socketpair()
    with ours:
        ours.setblocking(False)
        await server.take(theirs)
        assert await read(ours, 4) == ACCEPTED
        yield server, ours
        server.close()


async def read(line: socket.socket, size: int = 1 << 16) -> bytes:
    async with asyncio.timeout(60):
        return await asyncio.get_running_loop().sock_recv(line, size)


@pytest.mark.parametrize("half", [b"\x05", b"\x05\x00\x00\x00", framed(Method.MATCH, b"12345")[:-1]])
async def test_client_that_stops_mid_request_is_cut(half):
    async with a_server() as (server, line):
        line.send(framed(Method.MATCH, b"") + half)
        assert await read(line) == framed(0, b"")

        server.cut_stalled(Nanos(1))
        server.cut_stalled(STALLED)
        line.send(b"")
        server.cut_stalled(Nanos(STALLED + 1))

        assert await read(line) == b""


async def test_client_idle_between_requests_is_not_cut():
    async with a_server() as (server, line):
        line.send(framed(Method.MATCH, b""))
        assert await read(line) == framed(0, b"")

        server.cut_stalled(Nanos(1))
        server.cut_stalled(Nanos(10 * STALLED))

        line.send(framed(Method.MATCH, b""))
        assert await read(line) == framed(0, b"")


async def test_client_that_takes_no_answers_is_paused_then_cut():
    request = framed(Method.MATCH, pb.MatchResponse(slots=bytes(100_000)).SerializeToString())
    async with a_server() as (server, line):
        sent = 0
        for _ in range(2_000):
            try:
                sent += line.send(request[sent % len(request) :])
            except BlockingIOError:
                await turns()
        await turns()

        assert sent < call_server.SEND_BYTES, "the node goes on reading"
        server.cut_stalled(Nanos(1))
        server.cut_stalled(Nanos(STALLED + 1))

        await until(lambda: not server.callers)


async def test_heavy_client_shares_turns_with_others():
    heard: list[int] = []

    def note(message: bytes) -> pb.MatchResponse:
        heard.append(pb.MatchResponse.FromString(message).loading)
        return pb.MatchResponse(loading=heard[-1])

    def asking(number: int) -> bytes:
        return framed(Method.MATCH, pb.MatchResponse(loading=number).SerializeToString())

    server = FramedCallServer({Method.MATCH: note})
    (greedy, theirs), (modest, others) = socket.socketpair(), socket.socketpair()
    with greedy, modest:
        for each, end in ((greedy, theirs), (modest, others)):
            each.setblocking(False)
            await server.take(end)
            assert await read(each, 4) == ACCEPTED
        greedy.send(b"".join(map(asking, range(1, 2001))))
        modest.send(asking(9999))

        answer = await read(modest)
        before = len(heard)
        answers = b""
        while len(answers) < sum(map(len, map(asking, range(1, 2001)))):
            answers += await read(greedy)

        assert answer[5:] == asking(9999)[5:]
        assert before <= 4 * TURN_REQUESTS, "the heavy client was served first"
        assert [number for number in heard if number != 9999] == list(range(1, 2001)), "answers are out of order"
    server.close()


async def test_heavy_client_that_leaves_costs_nothing_more():
    async with a_server() as (server, line):
        line.send(framed(Method.MATCH, b"") * 2000)
        await turns()
        line.close()

        await until(lambda: not server.callers)


async def test_bug_in_a_later_turn_ends_the_connection(caplog):
    heard: list[bytes] = []

    def fail(message: bytes) -> pb.MatchResponse:
        heard.append(message)
        if len(heard) > 2 * TURN_REQUESTS:
            raise RuntimeError("a bug")
        return pb.MatchResponse()

    loop = asyncio.get_running_loop()
    told: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: told.append(context))
    server = FramedCallServer({Method.MATCH: fail})
    ours, theirs = socket.socketpair()
    with ours:
        ours.setblocking(False)
        await server.take(theirs)
        ours.send(framed(Method.MATCH, b"") * 100)
        async with asyncio.timeout(60):
            while await read(ours):
                pass

    assert len(heard) == 2 * TURN_REQUESTS + 1
    assert [str(each["exception"]) for each in told] == ["a bug"]
    assert not server.callers


@pytest.mark.parametrize("garbage", [framed(99, b""), framed(Method.MATCH, b"\xff"), b"\xff\xff\xff\xff"])
async def test_malformed_requests_are_counted(garbage):
    async with a_server() as (server, line):
        line.send(garbage)
        assert await read(line) == b""

        assert server.undecodable == 1


async def test_a_bug_in_an_answer_ends_the_connection():
    def fail(message: bytes) -> pb.MatchResponse:
        raise DecodeError("that is none")

    server = FramedCallServer({Method.MATCH: fail})
    ours, theirs = socket.socketpair()
    with ours:
        ours.setblocking(False)
        await server.take(theirs)
        ours.send(framed(Method.MATCH, b""))

        assert await read(ours) == ACCEPTED
        assert await read(ours) == b""
    server.close()


def test_silent_connections_do_not_block_shared_memory(node):
    with contextlib.ExitStack() as crowd:
        silent = []
        for _ in range(3 * HANDOUTS):
            silent.append(crowd.enter_context(socket.socket(socket.AF_UNIX)))
            silent[-1].connect(node.endpoints.shm_socket)

        with at_most(0.75 * HANDOUT_SECONDS), a_store_client(node.address, NAMESPACE, prefer=["shm"]) as client:
            assert len(client.match(a_chain(2), lease_seconds=0)) == 2
            assert client.connection.session.calls.connections, "the call used gRPC"

        assert is_over(silent[0]), "the longest silent connection was cut"
        silent[-1].sendall(HANDSHAKE)
        silent[-1].settimeout(60)
        assert silent[-1].recv(4, socket.MSG_WAITALL) == ACCEPTED, "the latest connection is still served"


def test_call_waits_its_turn_when_the_queue_is_full(tmp_path):
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as crowd:
        listener.bind(path)
        listener.listen(0)
        waiting = crowd.enter_context(socket.socket(socket.AF_UNIX))
        waiting.connect(path)  # and fills the queue
        with pytest.raises(BlockingIOError):
            sockets.connect(path, 0.05)
        accept = threading.Timer(0.1, lambda: crowd.push(listener.accept()[0]))
        accept.start()

        sockets.connect(path, 10).close()

        accept.join()


def test_node_without_descriptors_survives():
    with a_node() as node, contextlib.ExitStack() as crowd:
        descriptors = Path(f"/proc/{node.process.pid}/fd")
        _, most = resource.prlimit(node.process.pid, resource.RLIMIT_NOFILE)
        limit = len(list(descriptors.iterdir())) + 2
        resource.prlimit(node.process.pid, resource.RLIMIT_NOFILE, (limit, most))
        for _ in range(32):  # more than the node can take, even after it freed the descriptors of its start
            line = crowd.enter_context(socket.socket(socket.AF_UNIX))
            line.connect(node.endpoints.shm_socket)
        eventually(lambda: len(list(descriptors.iterdir())) >= limit - 1)
        crowd.close()

        with a_store_client(node.address, NAMESPACE, prefer=["shm"]) as client:
            assert client.write(a_chain(2), a_block) == 2


async def test_calls_beyond_the_connection_limit_use_grpc(monkeypatch):
    monkeypatch.setattr(call_server, "CONNECTIONS", 0)
    with a_short_folder() as folder:
        settings = StoreSettings(store_id="s", listen=(f"unix:{folder}/c",), shm_socket=str(Path(folder) / "m"))
        async with open_node(settings, MonotonicClock()) as endpoints:

            def use() -> int:
                with a_store_client(endpoints.listen[0], NAMESPACE) as client:
                    return client.write(a_chain(2), a_block)

            assert await asyncio.to_thread(use) == 2
