"""Tests of access over TCP: a planner proves the secret to a router, and callers prove it to the planner."""

import json
import subprocess
from contextlib import ExitStack, contextmanager

import grpc
import pytest

from fleet.net.control.access import load_control_access
from fleet.v1 import control_pb2 as pb
from fleet.v1 import control_pb2_grpc
from kvstore.security.credentials import Credentials
from tests.support.fleet_processes import FLEET, run_fleet, start_service
from tests.support.kvstore.builders import a_short_folder
from tests.support.servers.processes import a_free_port
from tests.support.waiting import eventually

pytestmark = pytest.mark.integration


@contextmanager
def a_service(folder, part, settings):
    with (folder / f"{part}.log").open("w") as log:
        process, endpoints = start_service(part, settings, folder / f"{part}.json", stdout=log, stderr=log)
    try:
        assert endpoints, (folder / f"{part}.log").read_text()
        yield endpoints
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="module")
def cluster(model_dir):
    with a_short_folder() as folder, ExitStack() as held:
        (folder / "plans").mkdir()
        (folder / "secret").write_text("the secret of this cluster\n")
        (folder / "other").write_text("the secret of another cluster\n")
        credentials = {"secret_file": f"{folder}/secret"}
        router = {
            "http_listen": f"127.0.0.1:{a_free_port()}",
            "grpc_listen": f"127.0.0.1:{a_free_port()}",
            "control_listen": "127.0.0.1:0",
            "control_credentials": credentials,
            "models": {"tiny": str(model_dir)},
        }
        control = held.enter_context(a_service(folder, "router", router))["control"]
        (folder / "plans" / "report.json").write_text(json.dumps({"pools": {"decode": {"asked": 1, "ready": 0}}}))
        planner = {
            "model": "tiny",
            "goals": {"ttft_seconds": 1.0, "tpot_seconds": 0.1},
            "pools": [{"name": "decode", "role": "decode", "least": 1, "most": 2}],
            "rule": {"kind": "load", "requests_per_replica": 4, "interval_seconds": 0.2},
            "source": {"kind": "routers", "addresses": [control], "credentials": credentials},
            "target": {"kind": "folder", "folder": f"{folder}/plans"},
            "listen": "127.0.0.1:0",
            "control_credentials": credentials,
        }
        endpoints = held.enter_context(a_service(folder, "planner", planner))
        yield folder, control, endpoints["control"]


def shown(cluster, secret):
    folder, _, planner = cluster
    return run_fleet("plan", "--json", "--planner", planner, "--planner-secret-file", f"{folder}/{secret}")


def test_planner_with_the_secret_hears_the_router(cluster):
    def reason():
        done = shown(cluster, "secret")
        return done.returncode == 0 and json.loads(done.stdout)["reason"] == "within_band"

    eventually(reason, 60.0)


def test_caller_with_another_secret_learns_nothing(cluster):
    done = shown(cluster, "other")

    assert done.returncode == 1
    assert done.stdout == ""


def test_watch_over_tcp_needs_the_secret_too(cluster):
    folder, _, planner = cluster
    command = [*FLEET, "plan", "watch", "--json", "--planner", planner, "--planner-secret-file"]
    with subprocess.Popen([*command, f"{folder}/secret"], stdout=subprocess.PIPE, text=True) as watching:
        first = json.loads(watching.stdout.readline())
        watching.kill()
    refused = subprocess.run([*command, f"{folder}/other"], capture_output=True, text=True, check=False, timeout=60)

    assert first["model"] == "tiny"
    assert (refused.returncode, refused.stdout) == (1, "")


def test_demand_watch_without_the_secret_is_refused(cluster):
    with load_control_access("test", Credentials()).channel(cluster[1]) as channel:
        messages = control_pb2_grpc.ClusterStub(channel).WatchDemand(pb.WatchDemandRequest(), timeout=30)
        with pytest.raises(grpc.RpcError) as refused:
            next(messages)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
