"""Tests of files that are renamed when they are full."""

import errno
import fcntl
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from fleet.core.errors import ConfigurationRefused
from fleet.core.system_clock import SystemClock
from fleet.recording import rotated_file
from fleet.recording.rotated_file import RotatedFile
from tests.support.waiting import eventually

MOST = 1000


def a_file(path, kept=2, most=MOST):
    return RotatedFile(path, most_bytes=most, kept=kept, field="lines", clock=SystemClock())


def lines_of(*paths):
    return [line for path in paths if path.exists() for line in path.read_text().splitlines()]


def named(path, number):
    return path.with_name(f"{path.name}.{number}")


def test_lines_are_written_in_order_and_completed_at_the_end(tmp_path):
    with a_file(tmp_path / "a") as file:
        for number in range(20):
            file.add(b"%d\n" % number)
    assert lines_of(tmp_path / "a") == [str(number) for number in range(20)]
    assert (file.lines, file.dropped) == (20, 0)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600


def test_later_process_appends_to_the_file(tmp_path):
    for text in (b"one\n", b"two\n"):
        with a_file(tmp_path / "a") as file:
            file.add(text)
    assert lines_of(tmp_path / "a") == ["one", "two"]


def test_full_file_is_renamed_and_the_oldest_removed(tmp_path):
    path = tmp_path / "a"
    with a_file(path) as file:
        for number in range(4):
            file.add(b"%d" % number + b"x" * MOST + b"\n")
            eventually(lambda seen=str(number): lines_of(named(path, 1))[-1:] == [seen + "x" * MOST])
        file.add(b"last\n")
    assert lines_of(path) == ["last"]
    assert [each[0] for each in lines_of(named(path, 2), named(path, 1))] == ["2", "3"]
    assert sorted(tmp_path.iterdir()) == [path, named(path, 1), named(path, 2)]


def test_no_earlier_file_is_kept_if_the_settings_say_so(tmp_path):
    path = tmp_path / "a"
    with a_file(path, kept=0) as file, path.open("rb") as full:
        file.add(b"x" * MOST + b"\n")
        eventually(lambda: os.fstat(full.fileno()).st_nlink == 0)
        file.add(b"last\n")
    assert lines_of(path) == ["last"]
    assert list(tmp_path.iterdir()) == [path]


def test_file_that_another_program_renames_is_begun_again(tmp_path):
    path = tmp_path / "a"
    with a_file(path) as file:
        file.add(b"one\n")
        eventually(lambda: lines_of(path) == ["one"])
        path.rename(tmp_path / "moved")
        file.add(b"two\n")
        eventually(lambda: lines_of(path) == ["two"])
    assert lines_of(tmp_path / "moved") == ["one"]


def test_processes_that_share_a_file_lose_no_line(tmp_path):
    path, count = tmp_path / "a", 300
    with a_file(path, kept=100) as one, a_file(path, kept=100) as other:
        for number in range(count):
            one.add(b"one %d\n" % number)
            other.add(b"other %d\n" % number)
            if number % 50 == 0:
                eventually(lambda seen=number: f"one {seen}" in lines_of(*tmp_path.iterdir()))
    written = lines_of(*tmp_path.iterdir())
    assert sorted(written) == sorted(f"{name} {number}" for name in ("one", "other") for number in range(count))
    assert len(list(tmp_path.iterdir())) > 3


LIMITED = """
import resource, sys
from pathlib import Path
from fleet.core.system_clock import SystemClock
from fleet.recording.rotated_file import RotatedFile
from tests.support.waiting import eventually
path = Path(sys.argv[1])
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
with RotatedFile(path, most_bytes=1 << 30, kept=1, field="lines", clock=SystemClock()) as file:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    for number in range(400):
        file.add(b"line %d\\n" % number)
    eventually(lambda: path.stat().st_size == 1000)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    eventually(lambda: path.read_bytes().endswith(b"line 399\\n"))
"""


def test_lines_are_completed_when_a_full_disk_has_room_again(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "a")],
        check=False,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert ran.returncode == 0, ran.stderr
    assert lines_of(tmp_path / "a") == [f"line {number}" for number in range(400)]


def test_lines_are_dropped_and_counted_while_the_disk_hangs(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(rotated_file, "MAX_BACKLOG_BYTES", 10_000)
    path = tmp_path / "a"
    with a_file(path) as file, path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)  # the thread waits for the lock when it wants to rename the file
        file.add(b"x" * MOST + b"\n")
        eventually(lambda: path.stat().st_size > MOST)
        for _ in range(30):
            file.add(b"y" * 999 + b"\n")
        assert file.dropped == 20
        fcntl.flock(other, fcntl.LOCK_UN)
        eventually(lambda: len(lines_of(*tmp_path.iterdir())) == 11)
    assert [record.message for record in caplog.records] == ["lines not written"]


def test_failed_rotation_is_logged_and_loses_no_line(tmp_path, caplog):
    path = tmp_path / "a"
    named(path, 1).touch()
    named(path, 2).mkdir()  # a file cannot be renamed to the name of a folder
    with a_file(path, kept=1) as file:
        file.add(b"x" * MOST + b"\n")
        eventually(lambda: caplog.records)
        file.add(b"y\n")
    assert [record.message for record in caplog.records] == ["full file not renamed, it grows"]
    assert caplog.records[0].cause == "Is a directory"
    assert lines_of(path) == ["x" * MOST, "y"]


def test_rotation_that_keeps_failing_removes_no_earlier_file(tmp_path, monkeypatch):
    path, replace, refused = tmp_path / "a", Path.replace, []

    def replace_others(source, target):
        if source == path:
            refused.append(target)
            raise PermissionError(errno.EPERM, "refused")
        return replace(source, target)

    monkeypatch.setattr(Path, "replace", replace_others)
    for number in (1, 2, 3):
        named(path, number).write_text(f"earlier {number}\n")
    with a_file(path, kept=3) as file:
        for count in range(5):
            file.add(b"%d" % count + b"x" * MOST + b"\n")
            eventually(lambda seen=count: len(refused) == seen + 1)
        files = list(tmp_path.iterdir())
        assert sorted(line[:9] for line in lines_of(*files) if "x" not in line) == [f"earlier {n}" for n in (1, 2, 3)]
        assert [line[0] for line in lines_of(path)] == ["0", "1", "2", "3", "4"]

        monkeypatch.undo()
        file.add(b"last\n")
        eventually(lambda: lines_of(named(path, 1))[-1:] == ["last"])
        eventually(lambda: not named(path, 4).exists())
    assert len(lines_of(named(path, 1))) == 6
    assert lines_of(named(path, 2), named(path, 3)) == ["earlier 1", "earlier 2"]


def test_oldest_file_that_cannot_be_removed_is_logged(tmp_path, caplog):
    path = tmp_path / "a"
    named(path, 1).mkdir()
    with a_file(path, kept=1) as file:
        file.add(b"x" * MOST + b"\n")
        eventually(lambda: caplog.records)
    assert [record.message for record in caplog.records] == ["oldest file not removed"]
    assert lines_of(named(path, 1)) == ["x" * MOST]


def test_backlog_is_not_copied_at_each_partial_write(tmp_path, monkeypatch):
    write, line = os.write, b"x" * (1 << 20) + b"\n"
    monkeypatch.setattr(rotated_file, "WRITE_INTERVAL_SECONDS", 60)  # so that all lines are written at the end
    monkeypatch.setattr(os, "write", lambda file, text: write(file, text[: 1 << 16]))
    tracemalloc.start()
    try:
        with a_file(tmp_path / "a", most=1 << 30) as file:
            for _ in range(16):
                file.add(line)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (tmp_path / "a").stat().st_size == 16 * len(line)
    assert peak < 24 * len(line)  # with a copy of the rest, it would be 32


UNWRITABLE = """
import os, sys
from pathlib import Path
from fleet.core.errors import ConfigurationRefused
from fleet.core.system_clock import SystemClock
from fleet.recording.rotated_file import RotatedFile
os.chdir(sys.argv[1])  # the folders above it are closed to other users
if os.getuid() == 0:
    os.setuid(65534)
try:
    RotatedFile(Path("closed") / "a", most_bytes=1, kept=1, field="lines", clock=SystemClock())
except ConfigurationRefused as error:
    print(error)
"""


def test_writable_file_in_a_folder_that_is_not_is_refused(tmp_path):
    (tmp_path / "closed").mkdir()
    (tmp_path / "closed" / "a").touch()
    (tmp_path / "closed" / "a").chmod(0o666)
    (tmp_path / "closed").chmod(0o555)
    tmp_path.chmod(0o755)
    ran = subprocess.run(
        [sys.executable, "-c", UNWRITABLE, str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert ran.stdout.startswith("lines: closed/a: its folder must be writable"), ran.stderr


def test_lines_are_written_while_another_process_holds_the_lock(tmp_path):
    path = tmp_path / "a"
    with path.open("a") as other, a_file(path) as file:
        fcntl.flock(other, fcntl.LOCK_EX)
        file.add(b"x" * MOST + b"\n")
        eventually(lambda: path.stat().st_size > MOST)
        file.add(b"meanwhile\n")
        eventually(lambda: lines_of(path)[-1] == "meanwhile")

        fcntl.flock(other, fcntl.LOCK_UN)
        file.add(b"later\n")
        eventually(named(path, 1).exists)


def test_lock_is_free_after_another_process_has_renamed_the_file(tmp_path):
    path = tmp_path / "a"
    with a_file(path) as file, path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        file.add(b"x" * MOST + b"\n")
        eventually(lambda: path.stat().st_size > MOST)
        path.rename(named(path, 1))
        fcntl.flock(other, fcntl.LOCK_UN)
        file.add(b"y\n")
        eventually(lambda: lines_of(path) == ["y"])
        assert is_free(other)
    assert lines_of(named(path, 1)) == ["x" * MOST]


def is_free(file):
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(file, fcntl.LOCK_UN)
    return True


@pytest.mark.parametrize("kind", ["folder", "device", "nowhere", "nul"])
def test_path_that_is_no_file_is_refused(tmp_path, kind):
    path = {"folder": tmp_path, "device": Path("/dev/null"), "nowhere": tmp_path / "no" / "a", "nul": Path("a\0b")}[
        kind
    ]
    with pytest.raises(ConfigurationRefused, match=r"^lines: "):
        a_file(path)
