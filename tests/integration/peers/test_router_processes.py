"""Tests of several router processes behind one port, with real workers in their own processes."""

import json
import os
import signal
from contextlib import ExitStack, closing
from http.client import HTTPConnection

import grpc
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fleet.client import Client, FleetError
from fleet.net.control.address import control_socket
from fleet.v1.selection_pb2 import ReleaseRequest, ReportRequest, SelectRequest
from fleet.v1.selection_pb2_grpc import SelectionStub
from tests.support.fleet_processes import routers_of, start_service, workers_seen
from tests.support.servers.processes import a_free_port
from tests.support.waiting import eventually

pytestmark = pytest.mark.integration


class RouterGroup:
    """A `fleet serve router --processes N` with simulated workers that register with any of them."""

    def __init__(self, folder, model_dir, count):
        self.folder, self.model_dir = folder, model_dir
        self.http, self.grpc = (f"127.0.0.1:{a_free_port()}" for _ in range(2))
        config = {
            "http_listen": self.http,
            "grpc_listen": self.grpc,
            "models": {"tiny": str(model_dir)},
            "policy": "least_loaded",
            "catch_up_seconds": 20.0,  # five are enough on an idle machine
            "access_records": {"path": str(folder / "access.jsonl")},
        }
        self.router = self.start("router", config, "--processes", str(count))
        self.workers = []

    def start(self, part, config, *options):
        file = self.folder / f"{config.get('worker_id', part)}.json"
        with file.with_suffix(".log").open("w") as log:
            process, endpoints = start_service(part, config, file, *options, stdout=log, stderr=log)
        assert endpoints, file.with_suffix(".log").read_text()
        return process

    def add_worker(self, name):
        config = {
            "worker_id": name,
            "role": "both",
            "engine": "simulated",
            "model": "tiny",
            "model_dir": str(self.model_dir),
            "listen": f"unix:{self.folder / name}.sock",
            "control_listen": f"unix:{self.folder / name}-c.sock",
            "registry": control_socket(self.grpc),
            "simulated": {"speedup": 0.05},  # an answer of 3,000 tokens takes minutes
        }
        self.workers.append(self.start("worker", config))

    def asked(self, what):
        """Return the answers of enough connections to reach every process, most likely."""
        answers = []
        for _ in range(16):
            with Client(self.grpc) as client:
                answers.append(what(client))
        return answers

    def stop(self):
        for process in (*self.workers, self.router):
            process.send_signal(signal.SIGTERM)
        for process in (*self.workers, self.router):
            process.wait(30)


@pytest.fixture(scope="module")
def routers(tmp_path_factory, model_dir):
    """Run two routers with two workers that both know."""
    started = RouterGroup(tmp_path_factory.mktemp("r"), model_dir, 2)
    try:
        for name in ("w0", "w1"):
            started.add_worker(name)
        eventually(lambda: all(seen == {"w0", "w1"} for seen in started.asked(workers_seen)))
        yield started
    finally:
        started.stop()


def reservations_seen_by(client):
    """Return the reserved requests by worker, as one router knows them."""
    workers = [worker for pool in client.status().pools for worker in pool.workers]
    return {worker.worker_id: worker.booked_requests + worker.booked_elsewhere for worker in workers}


def test_reservations_of_one_router_keep_the_others_away(routers):
    """Run eight long answers over connections of their own, so through both routers: four on each worker."""
    body = {"model": "tiny", "max_tokens": 3000, "ignore_eos": True, "temperature": 0, "stream": True}
    with ExitStack() as held:
        for number in range(8):
            connection = held.enter_context(closing(HTTPConnection(routers.http, timeout=60)))
            asked = json.dumps({**body, "prompt": f"{number} is a number"})
            connection.request("POST", "/v1/completions", asked, {"content-type": "application/json"})
            held.enter_context(connection.getresponse())
            eventually(lambda: {sum(booked.values()) for booked in routers.asked(reservations_seen_by)} == {number + 1})  # noqa: B023
        assert reservations_seen_by(held.enter_context(Client(routers.grpc))) == {"w0": 4, "w1": 4}


def metric_samples(routers):
    """Return all samples of one answer by name and labels."""
    with closing(HTTPConnection(routers.http, timeout=60)) as connection:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def both_routers(routers):
    """Return the names of the processes whose metrics are in one answer."""
    return {dict(labels).get("router") for _, labels in metric_samples(routers)}


def test_any_router_explains_any_placement(routers):
    placed = routers.asked(lambda client: client.complete("Hello", max_tokens=1).request_id)

    for request_id in placed[:4]:
        assert all(len(told) == 1 for told in routers.asked(lambda client: client.explain(request_id)))  # noqa: B023
    with pytest.raises(FleetError), Client(routers.grpc) as client:
        client.explain("nobodys")


def test_lease_report_reaches_the_router_that_gave_the_lease(routers):
    with grpc.insecure_channel(control_socket(routers.grpc)) as channel:
        lease = SelectionStub(channel).Select(
            SelectRequest(model="tiny", tokens=bytes(40), lease_ms=20_000), timeout=10
        )
    for _ in range(16):
        options = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own, and so any of the routers
        with grpc.insecure_channel(control_socket(routers.grpc), options) as channel:
            stub = SelectionStub(channel)
            told = stub.Report(ReportRequest(lease_id=lease.lease_id, answer_tokens=1), timeout=60)
            assert told.lease_ms == 20_000
    with grpc.insecure_channel(control_socket(routers.grpc)) as channel:
        SelectionStub(channel).Release(ReleaseRequest(lease_id=lease.lease_id), timeout=60)
    eventually(lambda: {sum(booked.values()) for booked in routers.asked(reservations_seen_by)} == {0})


def test_thresholds_set_on_one_router_hold_for_all(routers):
    with Client(routers.grpc) as client:
        client.tune(max_queued=77)

    eventually(lambda: {told["max_queued"] for told in routers.asked(lambda client: client.tune())} == {77})


def test_one_scrape_has_the_metrics_of_all_routers(routers):
    before = metric_samples(routers)
    routers.asked(lambda client: client.complete("Hello", max_tokens=1))
    after = metric_samples(routers)

    served = {key: after[key] - before.get(key, 0) for key in after if key[0] == "fleet_requests_total"}
    assert sum(served.values()) == 16
    assert both_routers(routers) == {"router-0", "router-1"}


def test_all_processes_write_their_records_to_one_file(routers):
    def records():
        return [json.loads(line) for line in (routers.folder / "access.jsonl").read_text().splitlines()]

    before = len(records())
    routers.asked(lambda client: client.complete("Hello", max_tokens=1))
    eventually(lambda: len(records()) >= before + 16)

    assert len({each["request_id"] for each in records()}) == len(records())
    assert {each["outcome"] for each in records()[before:]} == {"length"}


def serving(routers):
    """Return the process to which this test process is connected."""
    port = int(routers.grpc.rpartition(":")[2])
    for pid in routers_of(routers.router.pid):
        for connection in psutil.Process(pid).net_connections("tcp"):
            if connection.laddr.port == port and connection.status == psutil.CONN_ESTABLISHED:
                return pid
    raise AssertionError("no process has a connection")


def test_stream_goes_on_in_another_process_behind_the_port(routers):
    ask = {"max_tokens": 60, "ignore_eos": True, "temperature": 0}
    with Client(routers.grpc, resume_seconds=60) as client:
        expected = client.complete("Hello", **ask)
        with client.generate("Hello", **ask) as stream:
            for number, _ in enumerate(stream):
                if number == 10:
                    os.kill(serving(routers), signal.SIGKILL)
            again = stream.result
    assert (again.token_ids, again.text) == (expected.token_ids, expected.text)
    assert len(again.token_ids) == 60
    eventually(lambda: len(both_routers(routers)) == 2)
    assert sum(value for key, value in metric_samples(routers).items() if key[0] == "fleet_resumed_requests_total") == 1
    eventually(lambda: all(seen == {"w0", "w1"} for seen in routers.asked(workers_seen)))


def test_one_registration_and_one_port_serve_all_routers(routers):
    with Client(routers.grpc) as client:
        client.tune(max_queued=78)
    eventually(lambda: {told["max_queued"] for told in routers.asked(lambda client: client.tune())} == {78})
    first, second = routers_of(routers.router.pid)

    os.kill(first, signal.SIGKILL)

    def answered(client):
        try:
            return client.complete("Hello", max_tokens=4).usage.completion_tokens
        except FleetError as error:
            if error.reason is not None:  # not a dead router's connection: a router that accepts knows the workers
                raise
            return 0

    eventually(lambda: 0 not in routers.asked(answered))
    assert second in routers_of(routers.router.pid)
    # The router is restarted, and accepts connections when it knows the workers.
    eventually(lambda: routers.asked(answered) and len(both_routers(routers)) == 2)
    eventually(lambda: all(seen == {"w0", "w1"} for seen in routers.asked(workers_seen)))
    # Thresholds set before its death hold for its successor too.
    eventually(lambda: {told["max_queued"] for told in routers.asked(lambda client: client.tune())} == {78})
