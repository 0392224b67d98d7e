"""How many files a router may have open: each stream takes two, and 1024, which systems begin with, are not many."""

import json
import os
import resource
import signal
import subprocess
import sys

import psutil
import pytest

pytestmark = pytest.mark.integration


def test_a_router_may_open_as_many_files_as_the_system_lets_it(tmp_path):
    config = tmp_path / "router.json"
    config.write_text(json.dumps({"http_listen": "127.0.0.1:0", "grpc_listen": "127.0.0.1:0"}))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "fleet.cli.main", "serve", "router", "--config", str(config)]
    router = subprocess.Popen(
        [*command, "--ready-fd", str(writing)],
        pass_fds=[writing],
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, most)),  # noqa: PLW1509 - no threads here
    )
    os.close(writing)
    try:
        with os.fdopen(reading) as ready:
            assert ready.readline()
        assert psutil.Process(router.pid).rlimit(psutil.RLIMIT_NOFILE) == (most, most)
    finally:
        router.send_signal(signal.SIGTERM)
        router.wait(20)
