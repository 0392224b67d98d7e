"""What becomes of processes that hang: children of the supervisor's, and routers behind one port."""

import os
import signal
import urllib.error
import urllib.request

import pytest
from msgspec import structs

from fleet.adapters.local_processes import LocalProcess
from fleet.adapters.local_runs import runtime_folder
from fleet.control.supervision import Condition
from tests.fleet_processes import fleet_up, routers_of, serve
from tests.integration.test_local_processes import a_process, supervise
from tests.waiting import eventually, until

pytestmark = pytest.mark.integration

SECONDS = 240  # for what takes some ten seconds on an idle machine, and forty where a router has to be missed


def a_beating_process(name: str, silence_seconds: int) -> LocalProcess:
    return structs.replace(a_process(name, "beat"), silence_seconds=silence_seconds)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGUSR1], ids=["stopped", "stuck"])
async def test_a_child_that_says_nothing_any_more_is_killed_and_started_again(number):
    said: list[str] = []
    with runtime_folder() as folder:
        processes = supervise(folder, said, a_beating_process("a", 5), a_beating_process("b", 3600))

        async def body():
            pids = dict(processes.pids)
            os.kill(pids["a"], number)
            await until(lambda: processes.pids.get("a", pids["a"]) != pids["a"], SECONDS)
            await until(lambda: processes.conditions()["a"] is Condition.READY, SECONDS)
            assert processes.pids["b"] == pids["b"]

        assert await processes.hold(body)

    assert "a has said nothing for 5 s, and is killed" in said
    assert "a was ended by SIGKILL; starting it again in 0.25 s" in said


def test_a_router_that_hangs_is_started_again_and_every_connection_is_answered(tmp_path, model_dir):
    settings = {"http_listen": "127.0.0.1:0", "grpc_listen": "127.0.0.1:0", "models": {"tiny": str(model_dir)}}
    log = tmp_path / "router.log"
    with log.open("w") as output:
        parent, endpoints = serve(
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
        assert log.read_text().count("has said nothing for 30 s, and is killed") == 1
    finally:
        parent.send_signal(signal.SIGTERM)
        parent.wait(60)


def test_the_router_of_a_cluster_on_one_machine_that_hangs_is_started_again_and_serves(tmp_path):
    with fleet_up(tmp_path) as up:
        hung, worker = up.pid_of("router"), up.pid_of("decode-0")
        address = up.endpoints["http"].removeprefix("http://").removesuffix("/v1")
        os.kill(hung, signal.SIGSTOP)

        eventually(lambda: up.pid_of("router") not in (0, hung) and health(address) == 200, SECONDS)

        assert up.pid_of("decode-0") == worker
        assert (tmp_path / "up.log").read_text().count("router has said nothing for 30 s, and is killed") == 1


def health(address: str) -> int:
    """The status, over a connection of its own; 0: nobody answers."""
    try:
        with urllib.request.urlopen(f"http://{address}/health", timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as refused:
        return refused.code
    except OSError:
        return 0
