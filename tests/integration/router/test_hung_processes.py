"""Tests of hung processes of a cluster: routers behind one port, the store node, workers."""

import json
import os
import signal
import urllib.error
import urllib.request
from itertools import count
from pathlib import Path

import pytest

from fleet.client import Client, FleetError, Placement, Source
from fleet.core.roles import Phase
from tests.support.fleet_processes import fleet_up, routers_of, run_fleet, start_service
from tests.support.waiting import eventually

pytestmark = pytest.mark.integration

PROMPT = list(range(100, 300))
SECONDS = 240  # some ten seconds on an idle machine


def test_hung_router_restarts_and_every_connection_is_answered(tmp_path, model_dir):
    settings = {"http_listen": "127.0.0.1:0", "grpc_listen": "127.0.0.1:0", "models": {"tiny": str(model_dir)}}
    log = tmp_path / "router.log"
    with log.open("w") as output:
        parent, endpoints = start_service(
            "router", settings, tmp_path / "router.json", "--processes", "2", stdout=output, stderr=output
        )
    try:
        assert endpoints, log.read_text()
        hung, other = routers_of(parent.pid)
        os.kill(hung, signal.SIGSTOP)

        eventually(lambda: hung not in (there := routers_of(parent.pid)) and len(there) == 2, SECONDS)
        for _ in range(16):
            assert health(endpoints["http"]) == 503, "there are no workers"

        assert other in routers_of(parent.pid)
        assert log.read_text().count("has been stopped for 3 s, and is killed") == 1
    finally:
        parent.send_signal(signal.SIGTERM)
        parent.wait(60)


def test_hung_router_of_a_local_cluster_restarts_and_serves(tmp_path):
    with fleet_up(tmp_path) as up:
        hung, worker = up.pid_of("router"), up.pid_of("decode-0")
        address = up.endpoints["http"].removeprefix("http://").removesuffix("/v1")
        os.kill(hung, signal.SIGSTOP)

        eventually(lambda: up.pid_of("router") not in (0, hung) and health(address) == 200, SECONDS)

        assert up.pid_of("decode-0") == worker
        assert (tmp_path / "up.log").read_text().count("router has been stopped for 3 s, and is killed") == 1


@pytest.mark.parametrize("name", ["kvstore", "decode-0"])
def test_hung_store_or_worker_is_restarted(tmp_path, name):
    with fleet_up(tmp_path, "--decode", "2") as up, Client(up.grpc) as client:
        hung, others = up.pid_of(name), [up.pid_of(each) for each in ("router", "prefill-0", "decode-1")]
        os.kill(hung, signal.SIGSTOP)

        while up.pid_of(name) in (0, hung):
            assert len(client.complete(PROMPT, max_tokens=4, ignore_eos=True).token_ids) == 4, "the others serve"
        eventually(lambda: workers_of(client) == {"prefill-0", "decode-0", "decode-1"})

        assert [up.pid_of(each) for each in ("router", "prefill-0", "decode-1")] == others
        assert f"{name} has been stopped for 3 s, and is killed" in (tmp_path / "up.log").read_text()


def test_worker_that_dies_six_times_is_shown_as_failing(tmp_path):
    topology = tmp_path / "topology.toml"
    topology.write_text("[supervision]\nlongest_pause_seconds = 1.0\n")
    with fleet_up(tmp_path, "--config", str(topology), "--decode", "2") as up, Client(up.grpc) as client:
        other = up.pid_of("decode-1")
        for _ in range(6):
            pid = eventually(lambda: up.pid_of("decode-0"))
            os.kill(pid, signal.SIGKILL)
            eventually(lambda: up.pid_of("decode-0") != pid)  # noqa: B023 - called at once
            assert len(client.complete(PROMPT, max_tokens=4, ignore_eos=True).token_ids) == 4

        shown = run_fleet("status", "--address", up.grpc)

        assert up.pid_of("decode-1") == other
        assert (
            "decode-0 is failing: it died 6 times in a row, and the last time it was ended by SIGKILL" in shown.stderr
        )
        assert json.loads(Path(up.endpoints["parts"]).read_text())["decode-0"]["deaths"] == 6
        eventually(lambda: workers_of(client) == {"prefill-0", "decode-0", "decode-1"})


def test_workers_replaced_beside_a_hung_store_join_it_later(tmp_path):
    topology = tmp_path / "topology.toml"
    topology.write_text("[supervision]\nstopped_seconds = 20.0\n")  # longer than a worker waits for its store
    with fleet_up(tmp_path, "--config", str(topology)) as up, Client(up.grpc) as client:
        store, killed = up.pid_of("kvstore"), [up.pid_of("prefill-0"), up.pid_of("decode-0")]
        os.kill(store, signal.SIGSTOP)
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: workers_of(client) == set())
        eventually(lambda: workers_of(client) == {"prefill-0", "decode-0"})

        alone = client.complete(PROMPT, max_tokens=4, ignore_eos=True)
        assert [phase.phase for phase in alone.kv] == [Phase.AGGREGATED]
        os.kill(store, signal.SIGCONT)
        prompts = (list(range(first, first + 200)) for first in count(1000))
        eventually(lambda: goes_through_the_store(client, next(prompts)))

        assert up.pid_of("kvstore") == store
        assert up.process.poll() is None


def goes_through_the_store(client: Client, prompt: list[int]) -> bool:
    """Return True if the blocks of a new prompt go through the store from one worker to the other."""
    try:
        asked = client.complete(prompt, max_tokens=4, ignore_eos=True, placement=Placement.DISAGGREGATED)
    except FleetError:  # while there is no path between the workers
        return False
    return any(origin.source is Source.STORE for phase in asked.kv for origin in phase.report.origins)


def workers_of(client: Client) -> set[str]:
    """Return the names of the serving workers."""
    return {each.worker_id for pool in client.status().pools for each in pool.workers if each.state == "serving"}


def health(address: str) -> int:
    """Return the health status on a new connection, or 0 without an answer."""
    try:
        with urllib.request.urlopen(f"http://{address}/health", timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as refused:
        return refused.code
    except OSError:
        return 0
