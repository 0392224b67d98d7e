"""Tests of floods of a router process: silent connections, and requests that take much memory."""

import json
import resource
import socket
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager

import psutil
import pytest

from fleet.client import Client
from tests.support.fleet_processes import fleet_up
from tests.support.waiting import eventually

pytestmark = pytest.mark.integration

MOST = 500  # connection limit of each port
FLOOD = 1500
FILES = FLOOD + 500
SECONDS = 20.0  # for an answer, less than the silence limit
CONFIG = f"""
[router.http]
max_connections = {MOST}
first_byte_timeout_seconds = 600
idle_timeout_seconds = 600

[router.grpc]
max_connections = {MOST}
first_byte_timeout_seconds = 600
"""

LONG_BYTES = 2_000_000
MOST_GROWTH = 60 << 20
"""Memory that may remain after requests of 90 MB and more: the tokenizer's cache (16 MiB of text with its ids) and gaps between
used pieces.
"""


@pytest.fixture(scope="module")
def up(tmp_path_factory):
    folder = tmp_path_factory.mktemp("floods")
    (folder / "fleet.toml").write_text(CONFIG)
    with fleet_up(folder, "--config", str(folder / "fleet.toml"), "--prefill", "0", "--decode", "1") as up:
        yield up


@pytest.fixture
def files():
    """Raise this process's limit on open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < FILES:
        pytest.skip(f"a process may open {hard} files only, and {FILES} are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, FILES), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def silent_connections(address, sources=("127.0.0.1",)):
    """Open a flood of silent connections from each of these addresses in turn."""
    host, port = address.removeprefix("http://").split(":")
    with ExitStack() as held:
        for number in range(FLOOD):
            source = sources[number % len(sources)]
            held.enter_context(closing(socket.create_connection((host, int(port)), SECONDS, (source, 0))))
        yield


def status_of_answer(url, body=None):
    """Return the status of an answer on its own connection."""
    content = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, content, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=SECONDS) as answer:
            answer.read()
            return answer.status
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def is_served(up):
    """Return True if HTTP and gRPC clients are served."""
    url = up.endpoints["http"]
    assert status_of_answer(f"{url}/health") == 200
    assert status_of_answer(f"{url}/v1/completions", {"prompt": "once", "max_tokens": 2}) == 200
    assert status_of_answer(f"{up.endpoints['health']}/health") == 200
    assert status_of_answer(f"{up.endpoints['health']}/metrics") == 200
    with Client(up.grpc) as client:
        assert client.complete("once", max_tokens=2, timeout_seconds=SECONDS).token_ids


@pytest.mark.parametrize("sources", [("127.0.0.1",), tuple(f"127.0.0.{number}" for number in range(2, 50))])
@pytest.mark.parametrize("port", ["http", "grpc", "health"])
def test_silent_connections_lock_nobody_out(up, files, port, sources):
    with silent_connections(up.endpoints[port], sources):
        is_served(up)
    is_served(up)


def test_memory_of_long_prompts_is_given_back(up):
    router = psutil.Process(up.endpoints["pids"]["router"])
    url = f"{up.endpoints['http']}/v1/completions"
    assert status_of_answer(url, {"prompt": "once", "max_tokens": 1}) == 200
    before = router.memory_info().rss

    with ThreadPoolExecutor(3) as clients:
        long = [{"prompt": " " * (LONG_BYTES - number)} for number in range(4)]
        assert set(clients.map(lambda body: status_of_answer(url, body), long)) == {400}

    eventually(lambda: router.memory_info().rss - before < MOST_GROWTH, 60)
