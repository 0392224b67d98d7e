"""Tests of the limit on open files: each stream takes two, and the usual limit is 1024."""

import http.client
import resource
import signal
import socket

import psutil
import pytest

from fleet.app.router import RESERVED_DESCRIPTORS, within_descriptors
from fleet.router.settings.router import RouterSettings
from tests.support.fleet_processes import start_service

pytestmark = pytest.mark.integration


def test_router_raises_its_file_limit_to_the_maximum(tmp_path):
    settings = {"http_listen": "127.0.0.1:0", "grpc_listen": "127.0.0.1:0"}
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    log = tmp_path / "router.log"
    with log.open("w") as output:
        router, endpoints = start_service(
            "router", settings, tmp_path / "router.json", stderr=output, within=open_files(256, most)
        )
    try:
        assert endpoints, (router.wait(60), log.read_text())
        assert psutil.Process(router.pid).rlimit(psutil.RLIMIT_NOFILE) == (most, most)
    finally:
        router.send_signal(signal.SIGTERM)
        router.wait(60)


def test_connection_tables_leave_spare_descriptors(caplog):
    settings = RouterSettings(kserve_listen="127.0.0.1:0")

    fitted = within_descriptors(settings, 2048)

    assert fitted.http.max_connections + 2 * fitted.grpc.max_connections <= 2048 - RESERVED_DESCRIPTORS
    assert fitted.http.max_connections > 256
    assert "connection limits lowered" in caplog.text
    assert within_descriptors(settings, 1 << 20) is settings
    assert within_descriptors(settings, 4).http.max_connections == 1


def test_silent_clients_leave_a_router_with_few_files_its_health(tmp_path):
    settings = {"http_listen": "127.0.0.1:0", "grpc_listen": "127.0.0.1:0", "health_listen": "127.0.0.1:0"}
    log = tmp_path / "router.log"
    with log.open("w") as output:
        router, endpoints = start_service(
            "router", settings, tmp_path / "router.json", stderr=output, within=open_files(1024, 1024)
        )
    assert endpoints, (router.wait(60), log.read_text())
    host, _, port = endpoints["http"].rpartition(":")
    silent = []
    try:
        for _ in range(1100):
            silent.append(socket.create_connection((host, int(port)), timeout=30))  # noqa: PERF401 - what is open is closed

        for door in ("http", "health"):
            connection = http.client.HTTPConnection(endpoints[door], timeout=30)
            connection.request("GET", "/metrics")
            assert connection.getresponse().status == 200
            connection.close()
    finally:
        for each in silent:
            each.close()
        router.send_signal(signal.SIGTERM)
        router.wait(60)


def open_files(soft: int, hard: int) -> tuple[str, ...]:
    """Return the command that runs another command with these limits of open files."""
    return ("prlimit", f"--nofile={soft}:{hard}")
