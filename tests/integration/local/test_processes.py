"""Tests of the supervisor, with children that misbehave on request."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from msgspec import structs

from fleet.config import child_environment
from fleet.core.clock import SECOND, Nanos
from fleet.core.errors import ConfigurationRefused
from fleet.core.system_clock import SystemClock
from fleet.local import processes as local_processes
from fleet.local import reaper_process
from fleet.local.liveness import LivenessLimits
from fleet.local.processes import ClusterFailed, LocalProcess, LocalProcesses
from fleet.local.reaper_process import ReaperProcess
from fleet.local.runs import LocalRun, runtime_folder
from fleet.local.supervision import LONGEST_BACKOFF, ChildProcess, ChildState
from kvstore.clock import nanos
from tests.support.fleet_processes import alive, command_of
from tests.support.shared_memory import abandoned_segments
from tests.support.stopwatch import at_most
from tests.support.waiting import eventually, pace_thread, stays, turns, until

pytestmark = pytest.mark.integration

CHILD = Path(__file__).with_name("misbehaving_child.py")
DEBUGGER = Path(__file__).with_name("attaching_debugger.py")


def a_process(name: str, *how: str) -> LocalProcess:
    child = ChildProcess(
        name=name, start_stage=0, stop_stage=0, ready_within=Nanos(10 * SECOND), stop_within=Nanos(5 * SECOND)
    )
    return LocalProcess(child=child, command=(sys.executable, str(CHILD), *how))


def a_beating_process(
    name: str, *, silent: float = 3600, stopped: float = 3600, how: Sequence[str] = ("beat",)
) -> LocalProcess:
    """Return a child that sends heartbeats; limits are in seconds."""
    return structs.replace(a_process(name, *how), limits=LivenessLimits(stopped=nanos(stopped), silent=nanos(silent)))


def supervise(
    folder: Path, said: list[str], *processes: LocalProcess, drain=None, longest_pause=LONGEST_BACKOFF
) -> LocalProcesses:
    return LocalProcesses(
        processes,
        folder=folder,
        logs=folder,
        environment=child_environment(),
        clock=SystemClock(),
        say=said.append,
        drain=drain,
        longest_pause=longest_pause,
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


async def test_body_runs_when_all_children_are_ready(folder):
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


async def test_killed_child_restarts_and_its_descendants_end(folder):
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


async def test_rejected_settings_end_the_start_with_the_childs_error(folder):
    processes = supervise(folder, [], a_process("good", "serve"), a_process("bad", "exit", "3", "fleet: x: is wrong"))

    with pytest.raises(ConfigurationRefused, match=r"^x: is wrong$"):
        await processes.hold(never)


async def test_child_that_fails_at_start_shows_its_last_log_lines(folder):
    said = []
    processes = supervise(folder, said, a_process("good", "serve"), a_process("bad", "exit", "1", "Traceback: boom"))

    with pytest.raises(ClusterFailed, match="bad ended before the cluster was ready: it ended with status 1"):
        await processes.hold(never)

    assert any("Traceback: boom" in line for line in said)


async def test_missing_command_ends_the_start(folder):
    missing = LocalProcess(child=a_process("a").child, command=("/nowhere/python",))

    with pytest.raises(ClusterFailed, match="a ended before the cluster was ready: it ended with status 127"):
        await supervise(folder, [], missing).hold(never)


async def test_child_that_ignores_sigterm_is_killed_by_a_second_one(folder):
    processes = supervise(folder, [], a_process("a", "stubborn"))

    async def body():
        pids.update(processes.pids)
        asyncio.get_running_loop().call_later(0.2, processes.request_stop)
        asyncio.get_running_loop().call_later(0.4, processes.request_stop)
        await asyncio.Event().wait()

    pids = {}
    with at_most(4):  # instead of the five seconds of grace
        await processes.hold(body)

    assert alive(pids.values()) == []


async def test_phases_of_the_start_are_said_by_name(folder, monkeypatch):
    for constant, seconds in (("FIRST_PROGRESS", 0.0), ("PHASE_CHECK", 0.02)):
        monkeypatch.setattr(local_processes, constant, seconds)
    said: list[str] = []
    processes = supervise(folder, said, *(a_process(name, "phases", str(folder)) for name in ("a", "b")))
    running = asyncio.ensure_future(processes.hold(at_once))

    await until(lambda: said == ["starting: a, b"])
    for phase in ("loading", "warming up"):
        (folder / phase).touch()
        await until(lambda: said[-1] == f"{phase}: a, b")  # noqa: B023 - awaited here
    (folder / "serving").touch()

    assert await running
    assert processes.endpoints.keys() == {"a", "b"}
    assert not any(" s)" in line for line in said)


async def test_stop_during_loading_leaves_nothing(folder):
    processes = supervise(folder, [], a_process("a", "loading", str(folder / "a.family")))
    asyncio.get_running_loop().call_later(0.5, processes.request_stop)

    await processes.hold(never)

    assert processes.pids == {}
    assert alive(family_of(folder)) == []


async def test_exception_of_the_body_is_raised_after_children_ended(folder):
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

    holding = asyncio.ensure_future(processes.hold(body))
    await until(lambda: pids or holding.done())
    holding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await holding

    assert pids
    assert alive(pids.values()) == []


@contextmanager
def a_supervisor(tmp_path, **output):
    """Run a supervisor with a family of processes; yield it, its runtime folder, and the family."""
    supervisor = tmp_path / "supervisor.py"
    supervisor.write_text(
        textwrap.dedent(
            f"""
            import asyncio, json, sys
            sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[3])]!r}
            import test_processes as t

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
    process = subprocess.Popen([sys.executable, str(supervisor)], stdout=subprocess.PIPE, **output)
    assert process.stdout is not None
    try:
        runtime, *pids = json.loads(process.stdout.readline())
        assert len(alive(pids)) == 3
        yield process, runtime, pids
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_nothing_survives_the_death_of_the_supervisor(tmp_path):
    with a_supervisor(tmp_path) as (process, runtime, pids):
        process.kill()

        eventually(lambda: not alive(pids))
        eventually(lambda: not Path(runtime).exists())


async def at_once():
    """Return at once, as the body of a cluster that only has to start."""


async def never():
    raise AssertionError("the cluster was never ready")


async def test_children_come_and_go_despite_one_failing_start(folder):
    said: list[str] = []
    processes = supervise(folder, said, a_process("a", "serve"))

    async def body():
        processes.add(a_process("b", "serve"))
        processes.add(a_process("c", "exit", "1", "broken"))
        await until(lambda: processes.child_states().get("b") is ChildState.READY)
        await until(lambda: "c" in processes.failing() and processes.child_states()["c"] is ChildState.PAUSED)
        for name in ("b", "c"):
            processes.remove(name, Nanos(10 * SECOND))
        await until(lambda: processes.names == {"a"})
        processes.add(a_process("b", "serve"))
        await until(lambda: processes.child_states().get("b") is ChildState.READY)
        assert set(processes.pids) == set(processes.endpoints) == {"a", "b"}

    assert await processes.hold(body)
    assert any(line.startswith("c ended with status") for line in said)


@pytest.mark.parametrize("told", [True, False])
async def test_removed_child_drains_and_is_killed_if_it_ignores_it(folder, told):
    asked = []

    async def drain(endpoints, within):
        asked.append((endpoints, within))
        if told:
            os.kill(processes.pids["b"], signal.SIGKILL)  # it ends by itself
        return told

    processes = supervise(folder, [], a_process("a", "serve"), a_process("b", "serve"), drain=drain)

    async def body():
        endpoints = processes.endpoints["b"]
        processes.remove("b", Nanos(300 * SECOND))
        await until(lambda: processes.names == {"a"})
        assert asked == [(endpoints, 300 * SECOND)]

    assert await processes.hold(body)


async def test_child_that_ends_while_removed_affects_no_other(folder, monkeypatch):
    asked = []

    async def drain(endpoints, within):
        asked.append(endpoints)
        return True

    processes = supervise(folder, [], a_process("a", "serve"), a_process("b", "serve"), drain=drain)
    tell = ReaperProcess.tell

    def remove_when_it_ends(reaper, change, group):
        tell(reaper, change, group)
        if change == "-" and "b" in processes.names:
            processes.remove("b", Nanos(300 * SECOND))  # before its end is noticed

    async def body():
        monkeypatch.setattr(ReaperProcess, "tell", remove_when_it_ends)
        os.kill(processes.pids["b"], signal.SIGKILL)
        await until(lambda: processes.names == {"a"})
        await turns()
        assert asked == []

    assert await processes.hold(body)


async def test_stopped_orphan_reaper_does_not_keep_cluster_alive(folder, monkeypatch):
    monkeypatch.setattr(reaper_process, "END_SECONDS", 0.5)
    processes = supervise(folder, [], a_process("a", "serve"))

    async def body():
        (reaper,) = (each for each in psutil.Process().children() if str(folder) in each.cmdline())
        reaper.suspend()

    async with asyncio.timeout(60):
        assert await processes.hold(body)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_lost_orphan_reaper_is_replaced(folder, number):
    """Lose the reaper twice; its last successor knows the groups that began before it."""
    said: list[str] = []
    processes = supervise(folder, said, a_process("a", "serve"))

    def reapers():
        return [each.pid for each in psutil.Process().children() if "fleet.local.orphan_reaper" in command_of(each)]

    def losses() -> int:
        return len([line for line in said if "orphan reaper was ended" in line])

    async def body():
        for count in (1, 2):
            await until(lambda: len(reapers()) == 1)  # the reaper of an earlier test may still end
            (lost,) = reapers()
            os.kill(lost, number)
            await until(
                lambda lost=lost, count=count: losses() == count and len(reapers()) == 1 and lost not in reapers()
            )
        assert LocalRun(folder).parts()["a"].deaths == 0

    assert await processes.hold(body)


def test_hung_supervisor_is_reported_and_survived(tmp_path):
    said = tmp_path / "said"
    with said.open("w") as output, a_supervisor(tmp_path, stderr=output) as (process, runtime, pids):
        run = LocalRun(Path(runtime))
        process.send_signal(signal.SIGSTOP)

        assert f"the supervisor (process {process.pid}) is stopped" in eventually(lambda: run.silence)
        assert len(alive(pids)) == 3
        assert "a process that dies is not replaced" in said.read_text()

        process.send_signal(signal.SIGCONT)
        eventually(lambda: not run.silence)
        eventually(lambda: "the supervisor responds again" in said.read_text())


def test_replaced_reaper_ends_groups_that_began_before_it(tmp_path):
    with a_supervisor(tmp_path) as (process, runtime, pids):

        def reaper():
            children = psutil.Process(process.pid).children()
            return next((each.pid for each in children if "fleet.local.orphan_reaper" in command_of(each)), None)

        first = reaper()
        os.kill(first, signal.SIGKILL)
        eventually(lambda: reaper() not in (None, first))

        process.kill()

        eventually(lambda: not alive(pids))
        eventually(lambda: not Path(runtime).exists())


async def test_child_that_dies_ten_times_ends_no_other(folder):
    said: list[str] = []
    processes = supervise(
        folder, said, a_process("a", "serve"), a_process("b", "serve"), longest_pause=Nanos(SECOND // 4)
    )

    async def body():
        other = processes.pids["b"]
        for deaths in range(1, 11):
            await until(lambda: processes.child_states()["a"] is ChildState.READY)
            os.kill(processes.pids["a"], signal.SIGKILL)
            await until(lambda: LocalRun(folder).parts()["a"].deaths >= deaths)  # noqa: B023 - awaited here
        assert LocalRun(folder).parts()["a"].failing
        assert LocalRun(folder).parts()["a"].last_end == "was ended by SIGKILL"
        assert not LocalRun(folder).parts()["b"].failing
        assert processes.pids["b"] == other

    assert await processes.hold(body)
    assert any("for the 10th time in a row" in line for line in said)


async def test_child_that_rejects_settings_later_ends_no_other(folder):
    said: list[str] = []
    refuses = folder / "refuses"
    command = f"test -e {refuses} && exit 3; exec {sys.executable} {CHILD} serve $*"
    fickle = structs.replace(a_process("a"), command=("/bin/sh", "-c", command, "sh"))
    processes = supervise(folder, said, fickle, a_process("b", "serve"), longest_pause=Nanos(SECOND))

    async def body():
        refuses.touch()
        os.kill(processes.pids["a"], signal.SIGKILL)
        await until(lambda: any("a refused its settings; starting it again" in line for line in said))
        assert "a" in processes.failing()
        refuses.unlink()
        await until(lambda: processes.child_states()["a"] is ChildState.READY)

    assert await processes.hold(body)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGUSR1], ids=["stopped", "stuck"])
async def test_unresponsive_child_is_killed_and_restarted(folder, number):
    said: list[str] = []
    processes = supervise(folder, said, a_beating_process("a", silent=5, stopped=3), a_beating_process("b"))

    async def body():
        pids = dict(processes.pids)
        os.kill(pids["a"], number)
        await until(lambda: processes.pids.get("a", pids["a"]) != pids["a"])
        await until(lambda: processes.child_states()["a"] is ChildState.READY)
        assert processes.pids["b"] == pids["b"]

    assert await processes.hold(body)
    found = {signal.SIGSTOP: "been stopped for 3", signal.SIGUSR1: "said nothing for 5"}[number]
    assert f"a has {found} s, and is killed" in said
    assert any(line.startswith("a was ended by SIGKILL; starting it again in 0.") for line in said)


async def test_child_that_loads_longer_than_all_limits_is_kept(folder):
    said: list[str] = []
    processes = supervise(folder, said, a_beating_process("a", silent=1, stopped=1, how=("slow", "4")))

    async def body():
        assert processes.child_states()["a"] is ChildState.READY

    assert await processes.hold(body)
    assert not [line for line in said if "killed" in line]


async def test_child_on_a_busy_core_is_left_alone(folder):
    """Let four loops of the child's session take its core: it runs only when nobody else wants to."""
    said: list[str] = []
    loops = f"for loop in 1 2 3 4; do {sys.executable} -c 'while True: pass' & done"
    command = f"{loops}; exec {sys.executable} {CHILD} compute $*"
    child = a_beating_process("a", silent=1, stopped=1)
    processes = supervise(folder, said, structs.replace(child, command=("/bin/sh", "-c", command, "sh")))

    async def body():
        pid = processes.pids["a"]
        core = {min(os.sched_getaffinity(0))}
        family = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        assert len(family) == 4
        for each in (pid, *map(int, family)):
            os.sched_setaffinity(each, core)
        os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
        await stays(lambda: processes.pids["a"] == pid, 8, "eight limits pass")

    assert await processes.hold(body)
    assert not [line for line in said if "killed" in line]


async def test_child_held_by_a_debugger_is_left_alone(folder):
    """Attach a process with ptrace, which stops the child."""
    said: list[str] = []
    processes = supervise(folder, said, a_beating_process("a", silent=1, stopped=1))

    async def body():
        pid = processes.pids["a"]
        with subprocess.Popen([sys.executable, str(DEBUGGER), str(pid)], stdout=subprocess.PIPE) as debugger:
            assert debugger.stdout is not None
            assert await asyncio.to_thread(debugger.stdout.readline) == b"attached\n"
            await stays(lambda: processes.pids["a"] == pid, 4, "four limits pass")
            debugger.terminate()
        os.kill(pid, signal.SIGCONT)
        await stays(lambda: processes.pids["a"] == pid, 2, "two limits pass")

    assert await processes.hold(body)
    assert not [line for line in said if "killed" in line]


def test_suspended_machine_costs_no_child(tmp_path):
    """Stop supervisor and child together for several limits, like a suspended machine."""
    supervisor = tmp_path / "supervisor.py"
    supervisor.write_text(
        textwrap.dedent(
            f"""
            import asyncio, json, sys
            sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[3])]!r}
            import test_processes as t

            async def main():
                said = []
                with t.runtime_folder() as folder:
                    processes = t.supervise(folder, said, t.a_beating_process("a", silent=1, stopped=1))
                    async def body():
                        print(processes.pids["a"], flush=True)
                        await asyncio.to_thread(sys.stdin.readline)
                        print(json.dumps([processes.pids["a"], said]), flush=True)
                    await processes.hold(body)

            asyncio.run(main())
            """
        )
    )
    with subprocess.Popen(
        [sys.executable, str(supervisor)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        child = int(process.stdout.readline())
        for _ in range(2):
            pace_thread(1, "awake; a hang would be noticed by now")
            for pid in (process.pid, child):
                os.kill(pid, signal.SIGSTOP)
            pace_thread(3, "asleep for three limits")
            for pid in (process.pid, child):  # continue the supervisor first, to which the child then seems to hang
                os.kill(pid, signal.SIGCONT)
        pace_thread(2, "awake; a hang would be noticed by now")
        process.stdin.write("\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline()) == [child, []]
