"""Tests of silent connections on all ports of a node: they do not disturb clients with the secret."""

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from urllib.request import urlopen

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from kvstore.messages import DataPath
from kvstore.net.socket_guard import MAX_CONNECTIONS
from kvstore.security.authentication import AuthenticationKey, Purpose
from kvstore.security.credentials import Credentials
from kvstore.security.metrics_access import MetricsAccess, MetricsGuard
from kvstore.service import metrics_server, server
from kvstore.service.metrics_server import MetricsServer
from kvstore.service.server import open_node
from kvstore.system_clock import MonotonicClock
from kvstore.transports.tcp import TcpTransport
from kvstore.transports.tcp_server import MAX_UNPROVEN
from tests.support.kvstore.builders import (
    BLOCK_BYTES,
    NodeProcess,
    a_namespace,
    a_node,
    a_short_folder,
    a_store_client,
    deadline_in,
    node_settings,
)
from tests.support.servers.processes import a_free_port
from tests.support.servers.silent_connections import (
    IdleHttp2Connections,
    ended_count,
    is_ended_while_sending,
    silent_connections,
)
from tests.support.waiting import SECONDS, eventually, until

pytestmark = pytest.mark.integration

SECRET = "a secret of this deployment"
SILENT = 600
CLIENTS = 60


@pytest.fixture
def secret(tmp_path) -> Credentials:
    (tmp_path / "secret").write_text(SECRET)
    return Credentials(secret_file=str(tmp_path / "secret"))


def a_metric(node: NodeProcess, name: str) -> float:
    with urlopen(f"http://{node.settings.metrics_listen}/metrics", timeout=SECONDS) as response:
        return next(float(line.split()[1]) for line in response.read().decode().splitlines() if line.startswith(name))


def test_silent_connections_block_no_client_with_the_secret(secret):
    namespace = a_namespace()
    with (
        a_node(
            shm_socket="", credentials=secret, metrics_listen=f"127.0.0.1:{a_free_port()}", listen=["127.0.0.1:0"]
        ) as node,
        a_store_client(node.endpoints.listen[0], namespace, credentials=secret) as first,
        silent_connections(node.endpoints.data_address, SILENT) as silent,
        ThreadPoolExecutor(CLIENTS) as threads,
    ):

        def connect(_: int) -> TcpTransport:
            key = AuthenticationKey(SECRET.encode(), Purpose.DATA)
            return TcpTransport(
                node.endpoints.data_address, namespace.digest, BLOCK_BYTES, MonotonicClock(), deadline_in(SECONDS), key
            )

        clients = list(threads.map(connect, range(CLIENTS)))  # raises for a rejected client

        assert eventually(lambda: ended_count(silent) >= SILENT - MAX_UNPROVEN)
        assert a_metric(node, "kvstore_data_crowded_out_total") >= SILENT - MAX_UNPROVEN
        assert first.stats() is not None
        for client in clients:
            client.close()


def test_silent_connections_do_not_block_metrics():
    with (
        a_node(metrics_listen=f"127.0.0.1:{a_free_port()}") as node,
        silent_connections(node.settings.metrics_listen, 200) as silent,
    ):
        assert a_metric(node, "kvstore_expired_total") == 0
        assert ended_count(silent) >= 100
        assert a_metric(node, "kvstore_expired_total") == 0


def test_metrics_request_that_arrives_too_slowly_is_cut(monkeypatch):
    monkeypatch.setattr(metrics_server, "STEP_SECONDS", 0.5)
    server = MetricsServer.open("127.0.0.1", 0, CollectorRegistry(), MetricsGuard.of(MetricsAccess(), "127.0.0.1:0"))
    try:
        with socket.create_connection(("127.0.0.1", server.port)) as slow:
            assert is_ended_while_sending(slow, b"GET /metrics HTTP/1.1\r\nX: " + bytes(range(97, 123)) * 10)
        with urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=SECONDS) as response:
            assert response.status == 200
    finally:
        server.close()


async def test_silent_connections_to_the_control_plane_are_cut(monkeypatch):
    monkeypatch.setattr(server, "HANDSHAKE_MS", 300)
    with a_short_folder() as folder:
        async with open_node(node_settings(folder), MonotonicClock()) as endpoints:
            address = endpoints.listen[1]
            with silent_connections(address, 50) as silent:
                async with grpc.aio.insecure_channel(address) as channel:
                    health = health_pb2_grpc.HealthStub(channel)
                    await health.Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)

                    await until(lambda: ended_count(silent) == 50)

                    await health.Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)


def test_idle_connections_to_the_control_plane_give_way(secret):
    count = MAX_CONNECTIONS + 100
    with (
        a_node(shm_socket="", credentials=secret, listen=["127.0.0.1:0"]) as node,
        a_store_client(node.endpoints.listen[0], a_namespace(), credentials=secret) as first,
        IdleHttp2Connections.open(node.endpoints.listen[0], count) as idle,
    ):
        assert eventually(lambda: idle.ended >= count - MAX_CONNECTIONS)
        assert first.stats() is not None
        with a_store_client(node.endpoints.listen[0], a_namespace(), credentials=secret) as second:
            assert second.stats() is not None


def test_silent_connections_to_the_memory_socket_give_way():
    namespace = a_namespace()
    with a_node() as node, ExitStack() as stack:
        for _ in range(SILENT):
            silent = stack.enter_context(socket.socket(socket.AF_UNIX))
            silent.settimeout(SECONDS)
            silent.connect(node.endpoints.shm_socket)
        with a_store_client(node.address, namespace) as client:
            assert client.path is DataPath.SHM
