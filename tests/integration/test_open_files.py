"""How many files a router may have open: each stream takes two, and 1024, which systems begin with, are not many."""

import resource
import signal
import subprocess

import psutil
import pytest

from tests.fleet_processes import serve

pytestmark = pytest.mark.integration


def test_a_router_may_open_as_many_files_as_the_system_lets_it(tmp_path):
    settings = {"http_listen": "127.0.0.1:0", "grpc_listen": "127.0.0.1:0"}
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    router, endpoints = serve(
        "router",
        settings,
        tmp_path / "router.json",
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, most)),
    )
    try:
        assert endpoints
        assert psutil.Process(router.pid).rlimit(psutil.RLIMIT_NOFILE) == (most, most)
    finally:
        router.send_signal(signal.SIGTERM)
        router.wait(60)
