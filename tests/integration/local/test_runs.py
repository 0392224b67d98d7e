"""Tests of clusters of `fleet up` that were killed together with their orphan reaper: what is reported, and what the next cluster removes."""

import errno
import multiprocessing
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

from fleet.cli.main import run
from fleet.core.file_locks import hold_lock_file, is_abandoned, share_lock_file, take_abandoned
from fleet.local import runs as local_runs
from fleet.local.runs import LocalRun, note_group, note_logs, runtime_folder
from tests.support.fleet_processes import alive, command_of, fleet_up, is_listening, run_fleet
from tests.support.shared_memory import remaining_of
from tests.support.waiting import eventually

pytestmark = pytest.mark.integration

NOBODY = 65534

HOLDER = """
import signal
from fleet.local.runs import runtime_folder
with runtime_folder() as folder:
    print(folder, flush=True)
    signal.pause()
"""


@pytest.fixture
def parent(tmp_path, monkeypatch):
    """Use a separate parent for runtime folders."""
    monkeypatch.setattr(local_runs, "Path", lambda path: tmp_path if path == "/tmp" else Path(path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def a_killed_run(parent):
    environment = {**os.environ, "TMPDIR": str(parent)}
    short = f"from fleet.local import runs as local_runs; local_runs.LONGEST_PARENT = 1000\n{HOLDER}"
    holder = subprocess.Popen([sys.executable, "-c", short], stdout=subprocess.PIPE, text=True, env=environment)
    folder = Path(holder.stdout.readline().strip())
    assert not LocalRun(folder).killed
    holder.kill()
    holder.communicate()
    return folder


def a_process(log=None, **environment):
    """Start a process that leads its own group."""
    command = [sys.executable, "-c", "import signal; print(flush=True); signal.pause()"]
    with Path(log or os.devnull).open("ab") as errors:
        started = subprocess.Popen(
            command, env=environment, start_new_session=True, stdout=subprocess.PIPE, stderr=errors
        )
    started.stdout.readline()
    return started


def test_file_is_held_until_its_holder_ends_in_order(tmp_path):
    path = tmp_path / "alive"
    assert not is_abandoned(path)
    with hold_lock_file(path):
        assert path.exists()
        assert not is_abandoned(path)
    assert not path.exists()


def test_a_file_that_two_hold_is_left_when_both_have_ended(tmp_path):
    path = tmp_path / "alive"
    path.touch()
    with share_lock_file(path):
        assert not is_abandoned(path)
        with share_lock_file(path):
            assert not is_abandoned(path)
        assert not is_abandoned(path)
    assert is_abandoned(path)
    with take_abandoned(path) as mine:
        assert mine
        assert not is_abandoned(path), "two cleanups must not run at once"


def test_killed_run_is_cleared_without_touching_others(parent):
    folder = a_killed_run(parent)
    (parent / "kept").mkdir()
    note_logs(folder, parent / "kept")
    its = a_process(TMPDIR=str(folder / "tmp"), PATH="/bin")
    renamed, elsewhere = a_process(folder / "decode-0.log"), a_process(parent / "kept" / "decode-0.log")
    others = a_process(TMPDIR="/tmp", PATH="/bin")
    renamed_too = a_process()  # a foreign process whose group reuses a number of the run
    ended = a_process(TMPDIR=str(folder / "tmp"), PATH="/bin")
    started = [its, renamed, elsewhere, others, renamed_too, ended]
    try:
        for process in started:
            note_group(folder, "+", process.pid)
        note_group(folder, "-", ended.pid)
        (found,) = local_runs.local_runs()
        assert found == LocalRun(folder)
        assert found.killed

        assert found.clear() == 3

        assert not folder.exists()
        assert (parent / "kept" / "decode-0.log").exists()
        assert alive([each.pid for each in started]) == [others.pid, renamed_too.pid, ended.pid]
    finally:
        for each in started:
            each.kill()
            each.communicate()


def test_truncated_group_number_matches_no_group(parent):
    folder = a_killed_run(parent)
    process = a_process(TMPDIR=str(folder / "tmp"), PATH="/bin")
    try:
        (folder / "groups").write_text(f"+{process.pid}")  # and the disk was full
        assert LocalRun(folder).clear() == 0
        assert alive([process.pid]) == [process.pid]
    finally:
        process.kill()
        process.communicate()


def killed_during_cleanup(left):
    """Kill a run after it has removed a given number of files and folders."""

    def count(event, _):
        nonlocal left
        if event in ("os.remove", "os.rmdir"):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    with runtime_folder() as folder:
        (folder / "plans").mkdir()
        for name in ("plans/report.json", "decode-0.log", "groups", "tmp/cache"):
            (folder / name).write_text("")
        sys.addaudithook(count)


def test_run_killed_during_its_cleanup_counts_as_killed(parent, monkeypatch):
    monkeypatch.setattr(local_runs, "LONGEST_PARENT", 1000)
    for done in range(20):
        process = multiprocessing.get_context("fork").Process(target=killed_during_cleanup, args=(done,))
        process.start()
        process.join()
        runs = local_runs.local_runs()
        assert all(each.killed for each in runs), (done, list(parent.glob("fleet-*/*")))
        for each in runs:
            assert each.clear() == 0
        if process.exitcode == 0:
            break
    assert 7 <= done < 19
    assert [list(each.iterdir()) for each in parent.glob("fleet-*")] == [[]], "no run was killed at its very end"


def test_run_without_disk_space_leaves_no_folder(parent, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(local_runs, "LONGEST_PARENT", 1000)
    for what in ("lock", "mkdir"):
        with monkeypatch.context() as patch:
            patch.setattr(*((local_runs, "hold_lock_file", full) if what == "lock" else (Path, "mkdir", full)))
            with pytest.raises(OSError, match="No space"), runtime_folder():
                pass
        assert list(parent.iterdir()) == [], what


def test_unreadable_folder_is_skipped(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as parent:
        monkeypatch.setattr(tempfile, "tempdir", parent)
        folder = Path(parent) / "fleet-shut"
        folder.mkdir(0)
        is_root = os.geteuid() == 0  # root may read every folder
        Path(parent).chmod(0o755)
        if is_root:
            os.seteuid(NOBODY)
        try:
            assert folder not in [each.folder for each in local_runs.local_runs()]
        finally:
            if is_root:
                os.seteuid(0)
            folder.chmod(0o700)


def test_live_run_is_never_cleared(parent, monkeypatch):
    monkeypatch.setattr(local_runs, "LONGEST_PARENT", 1000)
    with runtime_folder() as folder:
        (found,) = local_runs.local_runs()
        assert not found.killed
        assert found.clear() is None
        assert (folder / "alive").exists()
    assert local_runs.local_runs() == []


def test_folder_of_unknown_state_is_left_alone(parent):
    for name in ("fleet-begins", "fleet-of-others"):
        (parent / name / "tmp").mkdir(parents=True)
    assert local_runs.local_runs() == []


def test_cluster_killed_with_its_reaper_is_cleared_by_the_next(tmp_path, capsys, monkeypatch):
    folder_of_runs = tempfile.mkdtemp(dir="/tmp")  # a short path, without clusters of other tests
    monkeypatch.setenv("TMPDIR", folder_of_runs)
    monkeypatch.setattr(tempfile, "tempdir", folder_of_runs)
    with fleet_up(tmp_path) as up:
        folder, pids, segments = up.runtime_folder(), up.pids(), up.segments()
        reaper = next(pid for pid in pids if "fleet.local.orphan_reaper" in command_of(psutil.Process(pid)))
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
        os.kill(reaper, signal.SIGKILL)
        up.end(signal.SIGKILL)
    eventually(lambda: alive(pids) == [])
    assert folder.exists()
    plans = str(folder / "plans")

    assert "decode: not finished: 99 wanted" in shown
    assert f"fleet scale decode=1 --plans {plans} goes back" in shown
    assert run(["status", "--address", up.grpc]) == 1
    assert capsys.readouterr() == (
        "",
        f"fleet: {up.grpc}: the cluster in {folder} was killed; fleet up cleans up after it and starts another\n",
    )
    assert run(["scale", "--plans", plans]) == 1
    assert capsys.readouterr().err == (
        f"fleet: {plans}: whoever obeyed plans there was killed; start it again (fleet up)\n"
    )
    with closing(socket()) as taken:  # the next one ends after the cleanup
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        next_one = run_fleet("up", "--engine", "simulated", "--http-port", port, "--grpc-port", "0")
    assert f"fleet: cleaned up after a killed cluster: {folder}" in next_one.stderr
    assert not folder.exists()
    assert not any(is_listening(int(up.endpoints[name].rpartition(":")[2])) for name in ("http", "grpc"))
    eventually(lambda: not remaining_of(segments))
    Path(folder_of_runs).rmdir()


def test_scale_reports_a_killed_cluster_as_gone(parent, capsys):
    folder = a_killed_run(parent)
    (folder / "plans").mkdir()
    (folder / "plans" / "report.json").write_text('{"pools": {"decode": {"asked": 1, "ready": 1}}}')

    assert run(["scale"]) == 3

    out, err = capsys.readouterr()
    assert out == ""
    assert f"that of {folder} was killed" in err
