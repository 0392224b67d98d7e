"""Test of floods of the gRPC port below gRPC: streams are opened and reset as fast as possible."""

import signal
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress

import psutil
import pytest

from fleet.client import Client, FleetError
from tests.support.fleet_processes import start_service
from tests.support.frontend.http2_frames import CANCEL, END_HEADERS, HEADERS, PREFACE, RESET, SETTINGS, call, frame

pytestmark = pytest.mark.integration

CONNECTIONS, STREAMS = 6, 20_000
MOST_GROWTH = 60 << 20


@pytest.fixture
def router(tmp_path):
    """Run a router in its own process; yield the process and its gRPC address."""
    settings = {"http_listen": "127.0.0.1:0", "grpc_listen": "127.0.0.1:0"}
    process, endpoints = start_service("router", settings, tmp_path / "router.json", stderr=subprocess.DEVNULL)
    try:
        yield psutil.Process(process.pid), endpoints["grpc"]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def test_reset_streams_take_bounded_memory_and_delay_nobody(router):
    process, address = router
    before = process.memory_info().rss
    head = call(b"/fleet.v1.Inference/Generate")
    host, port = address.split(":")
    flood = (
        PREFACE
        + frame(SETTINGS, 0, 0)
        + b"".join(
            frame(HEADERS, END_HEADERS, number, head) + frame(RESET, 0, number, CANCEL)
            for number in range(1, 2 * STREAMS, 2)
        )
    )

    def send(connection: socket.socket) -> None:
        with suppress(OSError):
            connection.sendall(flood)

    with ExitStack() as held:
        connections = [
            held.enter_context(closing(socket.create_connection((host, int(port)), timeout=60)))
            for _ in range(CONNECTIONS)
        ]
        with ThreadPoolExecutor(CONNECTIONS) as threads:
            list(threads.map(send, connections))
        with Client(address) as client, pytest.raises(FleetError, match="no worker serves"):
            client.complete("x", timeout_seconds=30)

    assert process.memory_info().rss - before < MOST_GROWTH
