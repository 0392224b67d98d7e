"""Promises of the supervisor, with children that misbehave on request."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from fleet.adapters.clock import SystemClock
from fleet.adapters.local_processes import ClusterFailed, LocalProcess, LocalProcesses
from fleet.adapters.local_runs import runtime_folder
from fleet.clock import SECOND, Nanos
from fleet.config import child_environment
from fleet.control.supervision import Child, Condition
from fleet.errors import ConfigurationRefused
from tests.fleet_processes import alive, command_of
from tests.shared_memory import abandoned_segments
from tests.stopwatch import at_most
from tests.waiting import eventually, until

pytestmark = pytest.mark.integration

CHILD = Path(__file__).with_name("misbehaving_child.py")


def a_process(name: str, *how: str) -> LocalProcess:
    child = Child(
        name=name, start_stage=0, stop_stage=0, ready_within=Nanos(10 * SECOND), stop_within=Nanos(5 * SECOND)
    )
    return LocalProcess(child=child, command=(sys.executable, str(CHILD), *how))


def supervise(folder: Path, said: list[str], *processes: LocalProcess, drain=None) -> LocalProcesses:
    return LocalProcesses(
        processes,
        folder=folder,
        logs=folder,
        environment=child_environment(),
        clock=SystemClock(),
        say=said.append,
        drain=drain,
    )


@pytest.fixture
def folder():
    with runtime_folder() as folder:
        yield folder
    assert not folder.exists()


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    before = abandoned_segments()
    yield
    eventually(lambda: abandoned_segments() <= before)
    assert [process for process in psutil.Process().children() if str(CHILD) in " ".join(command_of(process))] == []


def family_of(folder: Path) -> list[int]:
    return [int(line) for path in folder.glob("*.family") for line in path.read_text().split()]


async def test_the_body_runs_when_all_are_ready_and_their_endpoints_are_known(folder):
    processes = supervise(folder, [], a_process("a", "serve"), a_process("b", "serve"))
    seen = {}

    async def body():
        seen.update(processes.endpoints)
        assert alive(processes.pids.values()) == list(processes.pids.values())
        seen["pids"] = processes.pids

    await processes.hold(body)

    assert seen["a"]["grpc"] == f"pid-{seen['pids']['a']}"
    assert seen["b"]["grpc"] == f"pid-{seen['pids']['b']}"
    assert alive(seen["pids"].values()) == []


async def test_a_killed_child_comes_back_and_its_whole_family_goes(folder):
    processes = supervise(folder, [], a_process("a", "family", str(folder / "a.family")))

    async def body():
        first = processes.pids["a"]
        family = family_of(folder)
        assert len(alive(family)) == 2
        os.kill(first, signal.SIGKILL)
        await until(lambda: processes.pids.get("a", first) != first)
        assert alive(family) == []
        await until(lambda: len(alive(family_of(folder))) == 2)

    await processes.hold(body)

    assert alive(family_of(folder)) == []


async def test_a_resource_tracker_may_finish_removing_shared_memory(folder):
    processes = supervise(folder, [], a_process("a", "shared", str(folder / "segment")))
    segments = []

    async def body():
        segment = Path("/dev/shm") / (folder / "segment").read_text()
        segments.append(segment)
        assert segment.exists()
        first = processes.pids["a"]
        os.kill(first, signal.SIGKILL)
        await until(lambda: processes.pids.get("a", first) != first)
        assert not segment.exists()

    await processes.hold(body)

    assert not segments[0].exists()


async def test_refused_settings_end_the_attempt_with_the_childs_own_words(folder):
    processes = supervise(folder, [], a_process("good", "serve"), a_process("bad", "exit", "3", "fleet: x: is wrong"))

    with pytest.raises(ConfigurationRefused, match=r"^x: is wrong$"):
        await processes.hold(never)


async def test_a_child_that_fails_at_the_start_shows_the_tail_of_its_log(folder):
    said = []
    processes = supervise(folder, said, a_process("good", "serve"), a_process("bad", "exit", "1", "Traceback: boom"))

    with pytest.raises(ClusterFailed, match="bad ended before the cluster was ready: it ended with status 1"):
        await processes.hold(never)

    assert any("Traceback: boom" in line for line in said)


async def test_a_command_that_does_not_exist_ends_the_attempt(folder):
    missing = LocalProcess(child=a_process("a").child, command=("/nowhere/python",))

    with pytest.raises(ClusterFailed, match="a ended before the cluster was ready: it ended with status 127"):
        await supervise(folder, [], missing).hold(never)


async def test_a_child_that_ignores_being_asked_is_killed_by_a_second_request(folder):
    processes = supervise(folder, [], a_process("a", "stubborn"))

    async def body():
        pids.update(processes.pids)
        asyncio.get_running_loop().call_later(0.2, processes.request_stop)
        asyncio.get_running_loop().call_later(0.4, processes.request_stop)
        await asyncio.Event().wait()

    pids = {}
    with at_most(4):  # and not the five seconds of grace
        await processes.hold(body)

    assert alive(pids.values()) == []


async def test_stopping_while_children_load_leaves_nothing(folder):
    processes = supervise(folder, [], a_process("a", "loading", str(folder / "a.family")))
    asyncio.get_running_loop().call_later(0.5, processes.request_stop)

    await processes.hold(never)

    assert processes.pids == {}
    assert alive(family_of(folder)) == []


async def test_what_the_body_raises_comes_out_after_the_children_have_ended(folder):
    processes = supervise(folder, [], a_process("a", "serve"))
    pids = {}

    async def body():
        pids.update(processes.pids)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await processes.hold(body)

    assert alive(pids.values()) == []


async def test_cancelling_kills_everything_at_once(folder):
    processes = supervise(folder, [], a_process("a", "stubborn"))
    pids = {}

    async def body():
        pids.update(processes.pids)
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2):
            await processes.hold(body)

    assert pids
    assert alive(pids.values()) == []


def test_nothing_survives_the_death_of_the_supervisor(tmp_path):
    supervisor = tmp_path / "supervisor.py"
    supervisor.write_text(
        textwrap.dedent(
            f"""
            import asyncio, json, sys
            sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[2])]!r}
            import test_local_processes as t

            async def main():
                with t.runtime_folder() as folder:
                    processes = t.supervise(folder, [], t.a_process("a", "family", str(folder / "a.family")))
                    async def body():
                        print(json.dumps([str(folder), processes.pids["a"], *t.family_of(folder)]), flush=True)
                        await asyncio.Event().wait()
                    await processes.hold(body)

            asyncio.run(main())
            """
        )
    )
    process = subprocess.Popen([sys.executable, str(supervisor)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    runtime, *pids = json.loads(process.stdout.readline())
    assert len(alive(pids)) == 3

    process.kill()
    process.wait()
    process.stdout.close()

    eventually(lambda: not alive(pids))
    eventually(lambda: not Path(runtime).exists())


async def never():
    raise AssertionError("the cluster was never ready")


async def test_children_come_and_go_and_one_that_does_not_start_troubles_nobody(folder):
    said: list[str] = []
    processes = supervise(folder, said, a_process("a", "serve"))

    async def body():
        processes.add(a_process("b", "serve"))
        processes.add(a_process("c", "exit", "1", "broken"))
        await until(lambda: processes.conditions().get("b") is Condition.READY)
        await until(lambda: "c" in processes.failing() and processes.conditions()["c"] is Condition.PAUSED)
        for name in ("b", "c"):
            processes.remove(name, Nanos(10 * SECOND))
        await until(lambda: processes.names == {"a"})
        processes.add(a_process("b", "serve"))
        await until(lambda: processes.conditions().get("b") is Condition.READY)
        assert set(processes.pids) == set(processes.endpoints) == {"a", "b"}

    assert await processes.hold(body)
    assert any(line.startswith("c ended with status") for line in said)


@pytest.mark.parametrize("told", [True, False])
async def test_a_child_that_is_removed_is_asked_to_drain_and_stopped_where_it_does_not_listen(folder, told):
    asked = []

    async def drain(endpoints, within):
        asked.append((endpoints, within))
        if told:
            os.kill(processes.pids["b"], signal.SIGKILL)  # its own end
        return told

    processes = supervise(folder, [], a_process("a", "serve"), a_process("b", "serve"), drain=drain)

    async def body():
        endpoints = processes.endpoints["b"]
        processes.remove("b", Nanos(300 * SECOND))
        await until(lambda: processes.names == {"a"})
        assert asked == [(endpoints, 300 * SECOND)]

    assert await processes.hold(body)


async def test_a_child_that_ends_in_the_moment_in_which_it_is_removed_is_gone_and_nothing_else_ends(folder):
    asked = []

    async def drain(endpoints, within):
        asked.append(endpoints)
        return True

    processes = supervise(folder, [], a_process("a", "serve"), a_process("b", "serve"), drain=drain)
    tell = processes._tell_guardian

    def remove_when_it_ends(change, group):
        tell(change, group)
        if change == "-" and "b" in processes.names:
            processes.remove("b", Nanos(300 * SECOND))  # before it is known that it has ended

    async def body():
        processes._tell_guardian = remove_when_it_ends
        os.kill(processes.pids["b"], signal.SIGKILL)
        await until(lambda: processes.names == {"a"})
        await asyncio.sleep(0)
        assert asked == []

    assert await processes.hold(body)
