"""Tests of the start of a router process: when it serves, and that it disturbs no worker before."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
from contextlib import closing
from http.client import HTTPConnection

import grpc
import pytest

from fleet.app.native_modules import ROUTER_MODULES, missing_modules
from fleet.client import Client
from fleet.v1 import kserve_pb2, kserve_pb2_grpc
from tests.support.backends.openai_servers import STREAMING_REQUEST, OpenAiServer, fetch, routers_in_front_of
from tests.support.fleet_processes import FLEET, start_service
from tests.support.servers.processes import a_free_port
from tests.support.waiting import eventually

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("processes", [1, 2])
async def test_router_waits_for_its_servers_before_it_serves(tmp_path, processes):
    server = OpenAiServer()
    server.health_seconds = 0.5
    await server.start()
    async with routers_in_front_of(tmp_path, [server], processes, catch_up_seconds=20.0) as address:
        for _ in range(4):
            await asyncio.to_thread(fetch, address, "POST", "/v1/completions", json.dumps(STREAMING_REQUEST))


async def test_silent_server_delays_the_start_only_briefly(tmp_path):
    server, silent = OpenAiServer(), OpenAiServer()
    await server.start()
    with socket.create_server(("127.0.0.1", silent.port)):  # accepts connections without an answer
        patient = {"connect_timeout_seconds": 1000.0, "catch_up_seconds": 0.2}
        async with routers_in_front_of(tmp_path, [server, silent], 1, **patient) as address:
            await asyncio.to_thread(fetch, address, "GET", "/openapi.json")


def test_router_with_taken_ports_ends_before_workers_notice(tmp_path, model_dir):
    """Guard running requests: a worker takes a router of the same name for a redial, and ends the first one's requests."""
    directory = {"kind": "file", "folder": str(tmp_path / "workers")}
    (tmp_path / "workers").mkdir()
    worker = {
        "worker_id": "w0",
        "role": "both",
        "engine": "simulated",
        "model": "tiny",
        "listen": f"unix:{tmp_path}/w.sock",
        "control_listen": f"unix:{tmp_path}/c.sock",
        "discovery": directory,
        "simulated": {"speedup": 0.05},
    }
    router = {
        "http_listen": f"127.0.0.1:{a_free_port()}",
        "grpc_listen": f"127.0.0.1:{a_free_port()}",
        "models": {"tiny": str(model_dir)},
        "discovery": directory,
    }
    started = []
    try:
        for part, settings in (("worker", worker), ("router", router)):
            process, endpoints = start_service(part, settings, tmp_path / f"{part}.json")
            started.append(process)
            assert endpoints
        body = {"model": "tiny", "prompt": "Hello", "max_tokens": 100, "ignore_eos": True, "stream": True}
        with closing(HTTPConnection(router["http_listen"], timeout=60)) as connection:

            def answer():
                connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
                exchange = connection.getresponse()
                return exchange if exchange.status == 200 else exchange.read() and None

            exchange = eventually(answer)
            exchange.readline()

            second = subprocess.run(
                [*FLEET, "serve", "router", "--config", str(tmp_path / "router.json")],
                capture_output=True, text=True, timeout=60, check=False,
            )  # fmt: skip

            assert second.returncode == 3
            assert "in use" in second.stderr
            assert exchange.read().endswith(b"data: [DONE]\n\n")
    finally:
        for process in reversed(started):
            process.send_signal(signal.SIGTERM)
            process.wait(60)


built = pytest.mark.skipif(bool(missing_modules(ROUTER_MODULES)), reason="the C modules are not built")


def start_router_without(modules, tmp_path, **settings):
    """Start a router in which these modules cannot be imported."""
    settings = {"http_listen": "127.0.0.1:0", "grpc_listen": "127.0.0.1:0"} | settings
    (tmp_path / "router.json").write_text(json.dumps(settings))
    start = f"import sys; sys.modules.update(dict.fromkeys({modules})); from fleet.cli.main import main; main()"
    command = [sys.executable, "-c", start, "serve", "router", "--config", str(tmp_path / "router.json")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("absent", "warnings"), [(ROUTER_MODULES, 1), pytest.param((), 0, marks=built)])
def test_router_without_c_modules_warns_once(tmp_path, absent, warnings):
    process = start_router_without(absent, tmp_path)

    assert process.stdout.readline()  # it serves
    process.send_signal(signal.SIGTERM)

    lines = [line for line in process.communicate(timeout=50)[1].splitlines() if "C modules missing" in line]
    assert len(lines) == warnings
    assert all("57 % more CPU time per request" in line and "C compiler" in line for line in lines)
    assert process.returncode == 0


def test_warning_of_limits_names_peers_behind_a_name(tmp_path):
    """Check the warning that names the routers which count the limits of tenants together."""
    listen = f"127.0.0.1:{a_free_port()}"
    peers = {"replicas_listen": listen, "replicas_name": listen, "replicas_credentials": {"insecure": True}}
    process = start_router_without((), tmp_path, **peers, tenants={"acme": {"requests_per_minute": 1}})

    assert process.stdout.readline()  # it serves
    process.send_signal(signal.SIGTERM)

    log = process.communicate(timeout=50)[1]
    assert [f"replicas_name={listen}" in line for line in log.splitlines() if "tenant limits hold" in line] == [True]


def test_fallback_of_grpc_serves_without_ngh2(tmp_path, model_dir):
    settings = {"grpc": {"library": "grpcio"}, "kserve_listen": "127.0.0.1:0", "models": {"tiny": str(model_dir)}}
    process = start_router_without(("ngh2",), tmp_path, **settings)
    try:
        endpoints = json.loads(process.stdout.readline())
        with Client(endpoints["grpc"]) as client:
            assert client.models() == ()  # no worker is there
        with grpc.insecure_channel(endpoints["kserve"]) as channel:
            kserve = kserve_pb2_grpc.GRPCInferenceServiceStub(channel)
            assert kserve.ServerLive(kserve_pb2.ServerLiveRequest(), timeout=50).live
    finally:
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=50)
    assert process.returncode == 0, log


def test_missing_ngh2_is_refused_with_its_setting(tmp_path):
    process = start_router_without(("ngh2",), tmp_path)

    assert "grpc.library: ngh2 does not load" in process.communicate(timeout=50)[1]
    assert process.returncode == 3


def test_router_stopped_while_it_waits_never_serves(tmp_path):
    settings = {
        "http_listen": f"127.0.0.1:{a_free_port()}",
        "grpc_listen": f"127.0.0.1:{a_free_port()}",
        "share_ports": True,
        "replicas_listen": f"unix:{tmp_path}/0.sock",
        "replicas": [f"unix:{tmp_path}/1.sock"],
        "catch_up_seconds": 20.0,
    }
    (tmp_path / "router.json").write_text(json.dumps(settings))
    command = [*FLEET, "serve", "router", "--config", str(tmp_path / "router.json")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    eventually((tmp_path / "0.sock").exists)

    process.send_signal(signal.SIGTERM)

    assert process.communicate(timeout=50) == (b"", None)
    assert process.returncode == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_processes_warn_of_exactly_their_open_ports(tmp_path, model_dir, host):
    router = {"http_listen": f"{host}:0", "grpc_listen": "127.0.0.1:0", "endpoint_picker": {"host": host, "port": 0}}
    worker = {
        "worker_id": "w",
        "engine": "simulated",
        "model": "tiny",
        "model_dir": str(model_dir),
        "kv_paths": ["direct"],
        "simulated": {"direct_listen": f"{host}:0"},
    }
    logged = ""
    for part, settings in (("router", router), ("worker", worker)):
        log = tmp_path / f"{part}.log"
        with log.open("w") as output:
            process, endpoints = start_service(part, settings, tmp_path / f"{part}.json", stdout=output, stderr=output)
        process.terminate()
        process.wait(60)
        assert endpoints, log.read_text()
        logged += log.read_text()

    warnings = [line for line in logged.splitlines() if "port open to other hosts" in line]
    expected = ["http_listen", "endpoint_picker.host", "simulated.direct_listen"] if host == "0.0.0.0" else []
    assert len(warnings) == len(expected)
    assert all(setting in line for setting, line in zip(expected, warnings, strict=True))
