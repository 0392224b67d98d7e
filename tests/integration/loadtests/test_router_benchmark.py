"""Tests of the router benchmark: its workers, its baseline relay and its command."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time

import msgspec
import psutil
import pytest

from fleet.core.errors import ConfigurationRefused
from loadtests.environments import SystemUnavailable
from loadtests.kvstore.nodes import ROOT
from loadtests.router.load import client
from loadtests.router.load.client import round_of
from loadtests.router.load.prompts import MODEL, PATH, request
from loadtests.router.mock_workers import workers
from loadtests.router.systems import relay
from loadtests.router.systems.processes import (
    ask,
    cores_of_this_process,
    started,
    started_module,
    wait_until_it_answers,
)
from loadtests.router.systems.targets import BenchmarkSetting, targets
from tests.support.fleet_processes import run_load_test
from tests.support.waiting import eventually

pytestmark = pytest.mark.integration

ANYWHERE = frozenset(os.sched_getaffinity(0))
BODY = json.dumps({"model": MODEL, "stream": True, "max_tokens": 1, "prompt": "word " * 200}).encode()


@pytest.fixture
def serve(tmp_path):
    """Start workers and yield their ports."""
    left = []

    def start(**settings):
        argument = msgspec.json.encode(workers.MockWorkerSettings(**settings)).decode()
        context = started_module(workers.__name__, [argument], tmp_path, ANYWHERE)
        left.append(context)
        _, ready = context.__enter__()
        return ready["ports"]

    yield start
    for context in left:
        context.__exit__(None, None, None)


class NoMeter:
    def start(self):
        pass

    def stop(self):
        pass


HOLDER = """
import signal
import sys
from pathlib import Path
from loadtests.router.systems.processes import cores_of_this_process, started

with started("server", ["sleep", "600"], Path(sys.argv[1]), cores_of_this_process().others, {}):
    print("ready", flush=True)
    signal.pause()
"""


def test_ended_benchmark_ends_the_processes_that_it_started(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as benchmark:
        assert benchmark.stdout.readline() == "ready\n"
        (server,) = psutil.Process(benchmark.pid).children()
        benchmark.terminate()

        assert benchmark.wait(60) == 128 + signal.SIGTERM
        assert not server.is_running()


def counters(port):
    return json.loads(ask(port, "/counters")[1])


def test_a_worker_answers_streams_and_counts_hits_by_itself(serve):
    first, second = serve(workers=2, cache_blocks=100)

    status, answer = ask(first, PATH, BODY)
    ask(first, PATH, BODY)

    assert status == 200
    assert answer.count(b"data: {") == 1
    assert answer.endswith(b"data: [DONE]\n\n")
    assert counters(first) | {"process_cpu_seconds": 0} == {
        "requests": 2,
        "tokens": 2,
        "blocks": 6,
        "hits": 3,
        "probes": 0,
        "process_cpu_seconds": 0,
    }
    assert counters(second)["requests"] == 0
    ask(first, "/reset", b"")
    assert counters(first)["blocks"] == 0


def test_a_worker_sends_the_tokens_of_a_stream_at_its_beat(serve):
    (port,) = serve(workers=1, tokens=5, gap_seconds=0.02)

    started_at = time.monotonic()
    _, answer = ask(port, "/v1/chat/completions", BODY)

    assert time.monotonic() - started_at >= 4 * 0.02 - 0.002  # uvloop's clock counts milliseconds
    assert answer.count(b"data: {") == 5
    assert json.loads(answer.split(b"\n\n")[4].removeprefix(b"data: "))["choices"][0]["finish_reason"] == "length"
    assert counters(port)["tokens"] == 5


def test_a_worker_understands_chunks_and_bodies_in_pieces(serve):
    (port,) = serve(workers=1, cache_blocks=100)
    ask(port, PATH, BODY)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    for _ in range(2):  # on one connection
        connection.request("POST", PATH, (BODY[at : at + 7] for at in range(0, len(BODY), 7)), encode_chunked=True)
        assert b"[DONE]" in connection.getresponse().read()

    connection.close()
    assert counters(port)["hits"] == 6


def test_worker_answers_unstreamed_requests_whole(serve):
    (port,) = serve(workers=1)
    body = json.dumps({"model": MODEL, "prompt": "x", "stream": False}).encode()

    _, answer = ask(port, PATH, body)

    assert json.loads(answer)["choices"][0]["text"] == " a"


def test_prefill_makes_requests_of_a_worker_wait_for_each_other(serve):
    (port,) = serve(workers=1, cache_blocks=1, prefill_seconds_a_block=0.02)

    window = round_of([port], [one(request(f"{number}" * 300, 1)) for number in range(4)], 10, NoMeter())

    assert window.requests == 4
    assert window.seconds > 3 * 0.02  # timers may fire a clock tick early; concurrent requests would take 0.02


def one(*requests):
    left = iter(requests)
    return lambda: next(left, None)


def test_the_relay_takes_workers_in_turn_and_changes_no_byte(serve, tmp_path):
    ports = serve(workers=2, cache_blocks=100)
    with started_module(relay.__name__, [str(port) for port in ports], tmp_path, ANYWHERE) as (_, ready):
        direct = ask(ports[0], PATH, BODY)
        for port in ports:
            ask(port, "/reset", b"")
        requests = [request("word " * 20_000, 1) for _ in range(8)]

        window = round_of([ready["port"]], [one(*requests[:6]), one(*requests[6:])], 10, NoMeter())

        assert (window.requests, window.failures) == (8, 0)
        assert [counters(port)["requests"] for port in ports] == [4, 4]
        assert ask(ready["port"], PATH, BODY) == direct


@pytest.mark.parametrize("name", ["relay+tls", "fleet+tls"])
def test_target_with_tls_serves_over_tls_alone(serve, tmp_path, model_dir, name):
    setting = BenchmarkSetting(
        workers=tuple(serve(workers=2)),
        model_dir=model_dir,
        folder=tmp_path,
        cache=tmp_path,
        cores=cores_of_this_process(),
    )
    (_, target) = targets([name])
    with target.running(setting) as router:
        window = round_of(router.ports, [one(request("word", 1))], 10, NoMeter(), tls=router.tls)
        with pytest.raises(SystemUnavailable):
            round_of(router.ports, [one(request("word", 1))], 10, NoMeter())

    assert (window.requests, window.failures) == (1, 0)


def test_workers_without_tls_are_refused_as_a_target_with_it():
    with pytest.raises(ConfigurationRefused, match=r"direct\+tls serve without TLS"):
        targets(["direct+tls"])


def test_benchmark_client_gives_up_on_a_rejecting_router(serve):
    (port,) = serve(workers=1)
    refused = request("x", 1).replace(PATH.encode(), b"/v1/nothing....")

    with pytest.raises(SystemUnavailable, match=r"answers nothing: HTTP/1\.1 404 Not Found"):
        round_of([port], [lambda: refused], 10, NoMeter())


def test_router_that_never_answers_times_out(monkeypatch):
    monkeypatch.setattr(client, "WAIT_SECONDS", 0.2)
    large = request("word " * 2_000_000, 1)  # more than can be sent while nobody reads
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(SystemUnavailable, match="does not answer within"),
    ):
        round_of([silent.getsockname()[1]], [lambda: large] * 2, 0.1, NoMeter())


def test_router_that_does_not_start_is_absent_with_its_output(tmp_path):
    command = [sys.executable, "-c", "raise SystemExit('no such option')"]
    with (
        pytest.raises(SystemUnavailable, match="router ended at its start: no such option"),
        started("router", command, tmp_path, ANYWHERE, {}) as server,
    ):
        wait_until_it_answers(server, 9, (PATH, BODY), 20)


def test_processor_time_and_memory_are_those_of_all_children(tmp_path):
    burn = "import signal, time\nwhile time.process_time() < 0.3: pass\nopen('done', 'w').close()\nsignal.pause()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"
    with started("parent", [sys.executable, "-c", parent], tmp_path, ANYWHERE, {}) as server:
        eventually((tmp_path / "done").exists, 30)

        assert server.cpu_seconds() >= 0.3
        assert server.resident_bytes() > 8 << 20


def test_the_command_writes_a_row_for_each_scenario_and_target(tmp_path):
    report = tmp_path / "rows.json"
    told = ("--json", str(report), "--keep-logs", str(tmp_path / "logs"))
    chosen = ("--targets", "relay,fleet", "--scenarios", "prompt-128,ttft-1,streams-64,prefix-sharing")

    done = run_load_test("router", "--quick", *chosen, *told, folder=tmp_path, timeout=110)

    assert done.returncode == 0, done.stderr
    rows = {(row["scenario"], row["target"]): row for row in json.loads(report.read_text())}
    assert set(rows) == {
        (scenario, target)
        for scenario in ("prompt-128", "ttft-1", "streams-64", "prefix-sharing")
        for target in ("direct", "relay", "fleet")
    }
    for (scenario, target), row in rows.items():
        assert not row["absent"], row["absent"]
        assert (row["rounds"], row["failures"]) == (1, 0)
        assert (row["cpu_us_per_request"] is None) == (target == "direct")
        assert (row["ttft_added_us_p50"] is None) == (target == "direct" or scenario != "ttft-1")
        assert (row["itl_added_us_p99"] is None) == (target == "direct" or scenario != "streams-64")
        assert (row["cpu_s_per_1k_tokens"] is None) == (target == "direct")
        assert (row["hit_rate"] is None) == (scenario != "prefix-sharing")
        assert row["imbalance"] >= 1
        assert row["machine"]["versions"]["uvloop"]
    assert rows["prompt-128", "fleet"]["rss_mb"] > rows["prompt-128", "relay"]["rss_mb"]
    for target in ("direct", "relay", "fleet"):
        assert rows["prefix-sharing", target]["hit_rate"] > 0
    assert str(ROOT) not in done.stdout
    assert "prefix-sharing fleet" in done.stdout


def test_unknown_scenario_is_named(tmp_path):
    done = run_load_test("router", "--scenarios", "nonsense", folder=tmp_path, timeout=60)

    assert done.returncode == 2
    assert "nonsense is not one of prompt-128" in done.stderr


class Sink:
    """Records the bytes that a connection sends."""

    def __init__(self):
        self.sent = []

    def write(self, data):
        self.sent.append(data)

    def abort(self):
        pass


@pytest.mark.parametrize("piece", [1, 3, 7, 1000])
async def test_an_answer_ends_with_its_last_chunk_however_it_is_cut(piece):
    misleading = b"10\r\n\r\ndata: {12345678\r\n"  # sixteen bytes that begin like an end
    answer = b"HTTP/1.1 200 OK\r\n\r\n" + misleading + b"0\r\n\r\n"
    sink, until = Sink(), client.Until()
    until.at = time.perf_counter() + 60
    connection = client.LoadConnection(one(b"first", b"second"), until, None)
    connection.connection_made(sink)
    connection.send()

    connection.data_received(answer[: 20 + 13])
    assert (connection.completed, sink.sent) == (0, [b"first"])
    for at in range(33, len(answer), piece):
        connection.data_received(answer[at : at + piece])

    assert (connection.completed, sink.sent, connection.ended.done()) == (1, [b"first", b"second"], False)
    connection.data_received(answer)
    assert (connection.completed, connection.ended.done(), connection.complaint) == (2, True, "")
    assert len(connection.latencies) == 2


def test_the_command_measures_the_grpc_front_as_well(tmp_path):
    report = tmp_path / "rows.json"
    chosen = ("--targets", "fleet", "--scenarios", "grpc-stream")

    done = run_load_test("router", "--quick", *chosen, "--json", str(report), folder=tmp_path, timeout=110)

    assert done.returncode == 0, done.stderr
    (row,) = json.loads(report.read_text())
    assert (row["scenario"], row["target"], row["absent"]) == ("grpc-stream", "fleet", "")
    assert 0 < row["cpu_us_per_token"] < row["cpu_us_per_request"]
