"""Fuzz tests of the gRPC port: frames in any order and invalid bytes end at most their own connection."""

import asyncio
import gzip
import logging
import socket
import threading
from contextlib import contextmanager, suppress

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleet.net.grpc.http2 import Http2Server
from tests.support.frontend.http2_frames import END_HEADERS, HEADERS, PREFACE, SETTINGS, call, frame
from tests.support.waiting import eventually

pytestmark = pytest.mark.integration

DATA, CONTINUATION, END_STREAM = 0, 9, 1


async def echo(messages, context):
    async for message in messages:
        await context.write(message)


async def repeat(content, context):
    for _ in range(3):
        await context.write(content)


@contextmanager
def serving():
    """Run a server on an event loop in its own thread; yield it and its port."""
    started, loops = [], []
    ready, stop = threading.Event(), asyncio.Event()

    async def serve():
        server = Http2Server()
        methods = {
            "Echo": grpc.stream_stream_rpc_method_handler(echo),
            "Repeat": grpc.unary_stream_rpc_method_handler(repeat),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("x.Y", methods),))
        started.extend((server, server.add_insecure_port("127.0.0.1:0")))
        loops.append(asyncio.get_running_loop())
        await server.start()
        ready.set()
        await stop.wait()
        await server.stop(None)

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    assert ready.wait(120)
    try:
        yield started
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join(60)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def served():
    with serving() as (server, port), grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield server, port, channel.unary_stream("/x.Y/Repeat")


def message(content, compressed=0):
    return bytes([compressed]) + len(content).to_bytes(4, "big") + content


@contextmanager
def closing_side(connection):
    """Close the sending side and wait for the server's end."""
    yield
    with suppress(OSError):  # it was already cut
        connection.shutdown(socket.SHUT_WR)
    while connection.recv(65536):
        pass


HEADS = [call(b"/x.Y/Echo"), call(b"/x.Y/Repeat"), call(b"/no"), b"\x00\x01a\x01b", b"\x82\x86\x84"]
NAMED = b"\x00\x0dgrpc-encoding\x04gzip"
PACKED = message(gzip.compress(b"abc"), 1)
MESSAGES = st.sampled_from([message(b"abc"), PACKED, message(b"no gzip", 1), message(b"x")[:4], message(b"x", 2)])
PAYLOADS = st.one_of(
    MESSAGES,
    st.sampled_from([*HEADS, *(head + NAMED for head in HEADS)]),
    st.sampled_from([b"\xff" * 5, bytes(4), (2**31 - 1).to_bytes(4, "big"), b"\x00\x04\x7f\xff\xff\xff"]),
    st.binary(max_size=40),
)
FRAMES = st.builds(frame, st.integers(0, 11), st.sampled_from([0, 1, 4, 5, 8, 32, 0xFF]), st.integers(0, 6), PAYLOADS)
CALLS = st.builds(
    lambda stream, head, *contents: (
        frame(HEADERS, END_HEADERS, stream, head)
        + b"".join(frame(DATA, 0, stream, each) for each in contents)
        + frame(DATA, END_STREAM, stream)
    ),
    st.sampled_from([1, 3, 5, 2]),
    st.sampled_from([*HEADS, HEADS[0] + NAMED, HEADS[1] + NAMED]),
    MESSAGES | PAYLOADS,
    MESSAGES | PAYLOADS,
)
GREETING = PREFACE + frame(SETTINGS, 0, 0)
OPENINGS = st.sampled_from([GREETING, GREETING, GREETING, PREFACE, b""])
PIECES = st.lists(CALLS | CALLS | FRAMES | st.binary(max_size=30), max_size=8)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(OPENINGS, PIECES, st.integers(1, 200))
def test_random_frames_at_most_end_their_connection(served, caplog, opening, pieces, cut):
    server, port, repeated = served
    sent = opening + b"".join(pieces)
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(ConnectionError), closing_side(connection):
            for part in (sent[:cut], sent[cut:]):
                connection.sendall(part)
            assert list(repeated(b"x", timeout=60)) == [b"x"] * 3, "the other calls work meanwhile"

    eventually(lambda: (server.calls, server.held_bytes) == (0, 0))  # another thread reports the last end
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
