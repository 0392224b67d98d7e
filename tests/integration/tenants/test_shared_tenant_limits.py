"""Tests of tenant limits over the processes of one command, without Redis: together they admit what one would."""

import asyncio
import json
import os
import signal
import time

import psutil
import pytest

from tests.support.fleet_processes import routers_of, start_service
from tests.support.kvstore.builders import a_short_folder
from tests.support.servers.processes import a_free_port
from tests.support.waiting import eventually

pytestmark = pytest.mark.integration

PROCESSES = 3
TOO_MANY = PROCESSES - 1  # for requests that arrive at the same moment
LIMIT = 30  # per minute: half a request per second is refilled
TOKENS = 40  # of a prompt


class LimitedRouters:
    """A `fleet serve router --processes 3` with its own worker, and another router that uses it as an external backend."""

    def __init__(self, folder, sockets, model_dir):
        self.port, self.log = a_free_port(), folder / "routers.log"
        self._folder = folder
        self._processes = []
        far_port, far_control = a_free_port(), f"unix:{sockets}/far-c"
        self._start("router", "far", {
            "http_listen": f"127.0.0.1:{far_port}",
            "grpc_listen": "127.0.0.1:0",
            "control_listen": far_control,
            "models": {"far": str(model_dir)},
        })  # fmt: skip
        self._start("worker", "far-worker", self._worker("far", far_control, sockets))
        names = ("burst", "steady", "relayed", "restarted")
        self.routers = self._start("router", "routers", {
            "http_listen": f"127.0.0.1:{self.port}",
            "grpc_listen": f"127.0.0.1:{a_free_port()}",
            "models": {"tiny": str(model_dir)},
            "openai_workers": [{"worker_id": "f", "url": f"http://127.0.0.1:{far_port}", "model": "far"}],
            "tenants": {name: {"requests_per_minute": LIMIT} for name in names} | {"wordy": {"tokens_per_minute": 10 * TOKENS}},
            "catch_up_seconds": 20.0,
        }, "--processes", str(PROCESSES))  # fmt: skip
        self._sockets = sockets

    def _worker(self, model, registry, sockets):
        return {
            "worker_id": f"{model}-0",
            "role": "both",
            "engine": "simulated",
            "model": model,
            "listen": f"unix:{sockets}/{model}",
            "registry": registry,
            "simulated": {"speedup": 1000},
        }

    def _start(self, part, name, settings, *options):
        with (self._folder / f"{name}.log").open("w") as log:
            process, endpoints = start_service(
                part, settings, self._folder / f"{name}.json", *options, stdout=log, stderr=log
            )
        self._processes.append(process)
        assert endpoints, (self._folder / f"{name}.log").read_text()
        self.endpoints = endpoints
        return process

    def add_worker(self):
        registry = self.endpoints.get("control") or self.endpoints["grpc"]
        self._start("worker", "worker", self._worker("tiny", registry, self._sockets))

    def stop(self):
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
            process.wait(60)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, model_dir):
    with a_short_folder() as sockets:
        started = LimitedRouters(tmp_path_factory.mktemp("limits"), sockets, model_dir)
        try:
            started.add_worker()
            for model in ("tiny", "far"):
                eventually(lambda model=model: count_admitted(started, 8, tenant="", model=model) == 8)
            yield started
        finally:
            started.stop()


def count_admitted(cluster, count, tenant, model="tiny", prompt="x", at_once=True):
    """Return how many requests are admitted, each on its own connection."""
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "fleet": {"tenant": tenant}}
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"

    async def status():
        nonlocal connections
        reader, writer = await asyncio.open_connection("127.0.0.1", cluster.port)
        connections += 1
        if connections == count:
            connected.set()
        await connected.wait()
        writer.write(head.encode() + content)
        answer = await reader.read()
        writer.close()
        return int(answer.split()[1])

    async def all_of_them():
        async with asyncio.timeout(120):
            if at_once:
                return await asyncio.gather(*(status() for _ in range(count)))
            connected.set()
            return [await status() for _ in range(count)]

    connections, connected = 0, asyncio.Event()
    return asyncio.run(all_of_them()).count(200)


def listens_at(process, port):
    connections = psutil.Process(process).net_connections("tcp")
    return any(each.laddr.port == port and each.status == psutil.CONN_LISTEN for each in connections)


def refilled(began):
    return 1 + (time.monotonic() - began) * LIMIT / 60


@pytest.mark.parametrize(("tenant", "model"), [("burst", "tiny"), ("relayed", "far")])
def test_requests_at_one_moment_share_a_limit(cluster, tenant, model):
    began = time.monotonic()

    let_in = count_admitted(cluster, PROCESSES * LIMIT, tenant, model)

    assert LIMIT <= let_in <= LIMIT + TOO_MANY + refilled(began)


def test_requests_one_by_one_share_a_limit(cluster):
    began = time.monotonic()

    let_in = count_admitted(cluster, PROCESSES * LIMIT, "steady", at_once=False)

    assert LIMIT <= let_in <= LIMIT + refilled(began)


def test_tokens_of_prompts_share_a_limit(cluster):
    """Allow one request per process to overdraw the bucket of tokens."""
    let_in = count_admitted(cluster, PROCESSES * 10, "wordy", prompt="x" * TOKENS)

    assert 9 <= let_in <= 10 + PROCESSES


def test_restarted_process_knows_what_was_taken(cluster):
    began = time.monotonic()
    assert count_admitted(cluster, LIMIT, "restarted") == LIMIT
    before = routers_of(cluster.routers.pid)
    os.kill(before[0], signal.SIGKILL)
    eventually(lambda: len(there := routers_of(cluster.routers.pid)) == PROCESSES and before[0] not in there)

    (restarted,) = set(routers_of(cluster.routers.pid)) - set(before)
    eventually(lambda: listens_at(restarted, cluster.port))
    let_in = count_admitted(cluster, PROCESSES * LIMIT, "restarted")

    assert let_in <= TOO_MANY + refilled(began)


def test_command_says_where_limits_hold(cluster):
    assert (
        "tenants' limits hold for these 3 processes together; each router elsewhere counts for itself"
        in cluster.log.read_text()
    )
