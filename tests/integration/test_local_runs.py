"""Clusters of `fleet up` that were killed together with their guardian: what is said of them, and what the next one clears away."""

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from socket import socket

import psutil
import pytest

from fleet.adapters import local_runs
from fleet.adapters.held_files import held, held_too, left, taken
from fleet.adapters.local_runs import LocalRun, note_group, runtime_folder
from fleet.cli.main import run
from tests.integration.test_up_simulated import alive, fleet_up, listens, run_fleet, wait_until
from tests.shared_memory import abandoned_segments

pytestmark = pytest.mark.integration

HOLDER = """
import sys, time
from fleet.adapters.local_runs import runtime_folder
with runtime_folder() as folder:
    print(folder, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def parent(tmp_path, monkeypatch):
    """Where runtime folders are made, and nobody else's are."""
    monkeypatch.setattr(local_runs, "Path", lambda path: tmp_path if path == "/tmp" else Path(path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def a_killed_run(parent):
    environment = {**os.environ, "TMPDIR": str(parent)}
    short = f"from fleet.adapters import local_runs; local_runs.LONGEST_PARENT = 1000\n{HOLDER}"
    holder = subprocess.Popen([sys.executable, "-c", short], stdout=subprocess.PIPE, text=True, env=environment)
    folder = Path(holder.stdout.readline().strip())
    assert not LocalRun(folder).killed
    holder.kill()
    holder.communicate()
    return folder


def a_process(**environment):
    """That leads a group of its own."""
    command = [sys.executable, "-c", "print(flush=True); import time; time.sleep(60)"]
    started = subprocess.Popen(command, env=environment, start_new_session=True, stdout=subprocess.PIPE)
    started.stdout.readline()
    return started


def test_a_file_is_held_until_its_holder_ends_in_order(tmp_path):
    path = tmp_path / "alive"
    assert not left(path)
    with held(path):
        assert path.exists()
        assert not left(path)
    assert not path.exists()


def test_a_file_that_two_hold_is_left_when_both_have_ended(tmp_path):
    path = tmp_path / "alive"
    path.touch()
    with held_too(path):
        assert not left(path)
        with held_too(path):
            assert not left(path)
        assert not left(path)
    assert left(path)
    with taken(path) as mine:
        assert mine
        assert not left(path), "two do not clear up at a time"


def test_a_killed_run_is_cleared_with_its_processes_and_nobody_elses(parent):
    folder = a_killed_run(parent)
    its = a_process(TMPDIR=str(folder / "tmp"), PATH="/bin")
    renamed = a_process()
    others = a_process(TMPDIR="/tmp", PATH="/bin")
    ended = a_process(TMPDIR=str(folder / "tmp"), PATH="/bin")
    started = [its, renamed, others, ended]
    try:
        for change, process in [("+", its), ("+", renamed), ("+", others), ("+", ended), ("-", ended)]:
            note_group(folder, change, process.pid)
        (found,) = local_runs.local_runs()
        assert found == LocalRun(folder)
        assert found.killed

        assert found.clear() == 2

        assert not folder.exists()
        assert alive([each.pid for each in started]) == [others.pid, ended.pid]
    finally:
        for each in started:
            each.kill()
            each.communicate()


def test_a_run_that_is_alive_is_never_cleared(parent, monkeypatch):
    monkeypatch.setattr(local_runs, "LONGEST_PARENT", 1000)
    with runtime_folder() as folder:
        (found,) = local_runs.local_runs()
        assert not found.killed
        assert found.clear() is None
        assert (folder / "alive").exists()
    assert local_runs.local_runs() == []


def test_a_folder_that_does_not_say_whether_it_is_alive_is_left_alone(parent):
    for name in ("fleet-begins", "fleet-of-others"):
        (parent / name / "tmp").mkdir(parents=True)
    assert local_runs.local_runs() == []


def test_a_cluster_killed_with_its_guardian_is_said_to_be_gone_and_the_next_one_clears_it_away(
    tmp_path, capsys, monkeypatch
):
    folder_of_runs = tempfile.mkdtemp(dir="/tmp")  # not those of clusters that other tests start meanwhile, and short
    monkeypatch.setenv("TMPDIR", folder_of_runs)
    monkeypatch.setattr(tempfile, "tempdir", folder_of_runs)
    segments = abandoned_segments()
    with fleet_up(tmp_path) as up:
        folder, pids = up.runtime_folder(), up.pids()
        guardian = next(pid for pid in pids if "fleet.adapters.guardian" in psutil.Process(pid).cmdline())
        scaling = subprocess.Popen(
            [sys.executable, "-m", "fleet.cli.main", "scale", "decode=99", "--plans", str(folder / "plans")],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert "wanted 99" in scaling.stderr.readline()
        scaling.kill()
        scaling.communicate()
        assert run(["status", "--address", up.grpc]) == 0
        shown = capsys.readouterr().err
        os.kill(guardian, signal.SIGKILL)
        up.end(signal.SIGKILL)
    wait_until(lambda: alive(pids) == [])
    assert folder.exists()
    plans = str(folder / "plans")

    assert "decode: not finished: 99 wanted" in shown
    assert f"fleet scale decode=1 --plans {plans} goes back" in shown
    assert run(["status", "--address", up.grpc]) == 1
    assert capsys.readouterr() == (
        "",
        f"fleet: {up.grpc}: the cluster in {folder} was killed; fleet up clears up after it and starts another\n",
    )
    assert run(["scale", "--plans", plans]) == 1
    assert capsys.readouterr().err == (
        f"fleet: {plans}: whoever obeyed plans there was killed; start it again (fleet up)\n"
    )
    with closing(socket()) as taken:  # so that the next one ends when it has cleared up
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        next_one = run_fleet("up", "--engine", "simulated", "--http-port", port, "--grpc-port", "0")
    assert f"fleet: cleared up after a cluster that was killed: {folder}" in next_one.stderr
    assert not folder.exists()
    assert not any(listens(int(up.endpoints[name].rpartition(":")[2])) for name in ("http", "grpc"))
    wait_until(lambda: abandoned_segments() <= segments)
    Path(folder_of_runs).rmdir()


def test_of_a_killed_cluster_scale_does_not_speak_as_if_it_ran(parent, capsys):
    folder = a_killed_run(parent)
    (folder / "plans").mkdir()
    (folder / "plans" / "report.json").write_text('{"pools": {"decode": {"asked": 1, "ready": 1}}}')

    assert run(["scale"]) == 3

    out, err = capsys.readouterr()
    assert out == ""
    assert f"that of {folder} was killed" in err
