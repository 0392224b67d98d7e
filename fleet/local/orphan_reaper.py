"""Orphan reaper: ends what a killed supervisor has left running, and reports a supervisor that hangs.

    python -m fleet.local.orphan_reaper FOLDER [GROUP ...]

The arguments name the process groups that run already. The supervisor writes lines to the reaper's standard input:
``+GROUP`` when it has started a group, ``-GROUP`` when the group has ended, and ``.`` every `BEAT_SECONDS`. The end of the input means that the supervisor has ended. Then
the reaper ends the remaining groups and removes the runtime folder. After an orderly end nothing is left to do.

The kernel kills direct children with their parent (`die_with_parent`). The reaper ends what these had started.

A supervisor that hangs or is stopped replaces no process that dies. Its processes still serve, so the reaper does not
end it. It says so on standard error, and in the file `SILENT_FILE` of the runtime folder for ``fleet status``. Only time
in which the reaper itself ran counts, so a suspended machine is not taken for a hang.
"""

import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from fleet.core.file_locks import ALIVE_FILE, remove_locked_folder, share_lock_file
from fleet.local.process_group import end_group

BEAT_SECONDS = 1.0
SILENT_LOOKS = 10
"""Looks in a row, `BEAT_SECONDS` apart, without a line from the supervisor, after which it counts as hung."""

SILENT_FILE = "supervisor-silent"
"""File in the runtime folder with the reason while the supervisor counts as hung."""


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # ignored, because the reaper ends only when its input ends
    folder, *running = sys.argv[1:]
    groups = [int(group) for group in running]
    alive = Path(folder) / ALIVE_FILE
    with share_lock_file(alive):  # shared lock: the run counts as alive until the reaper ends
        for line in lines(SupervisorWatch(Path(folder), os.getppid())):
            if line[:1] == b"+":
                groups.append(int(line[1:]))
            elif line[:1] == b"-":
                groups.remove(int(line[1:]))
        for group in groups:
            end_group(group)
        remove_locked_folder(alive)


class SupervisorWatch:
    """Detects that the supervisor has stopped writing to the reaper."""

    def __init__(self, folder: Path, supervisor: int) -> None:
        self._file = folder / SILENT_FILE
        self._supervisor = supervisor
        self._looks = 0

    def heard(self) -> None:
        """Note that the supervisor has written."""
        if self._looks >= SILENT_LOOKS:
            self._file.unlink(missing_ok=True)
            tell("the supervisor responds again")
        self._looks = 0

    def nothing_heard(self) -> None:
        """Note that the supervisor has not written for one look; report the hang once."""
        if process_field(self._supervisor, "TracerPid") not in ("", "0"):
            return  # a debugger traces the supervisor and may have stopped it, so its silence is no hang
        self._looks += 1
        if self._looks == SILENT_LOOKS:
            stopped = process_field(self._supervisor, "State").startswith("T")
            why = (
                f"the supervisor (process {self._supervisor}) {'is stopped' if stopped else 'hangs'}: what runs goes on,"
                f" but a process that dies is not replaced; {'continue it (SIGCONT)' if stopped else 'start it again'}"
            )
            with suppress(OSError):  # the file cannot be written on a full disk
                self._file.write_text(why)
            tell(why)


def lines(watch: SupervisorWatch) -> Iterator[bytes]:
    """Yield the lines of standard input until its end."""
    source = sys.stdin.fileno()
    unfinished = b""
    while True:
        ready, _, _ = select.select([source], [], [], BEAT_SECONDS)
        if not ready:
            watch.nothing_heard()
            continue
        content = os.read(source, 1 << 16)
        if not content:
            return
        watch.heard()
        *whole, unfinished = (unfinished + content).split(b"\n")
        yield from whole


def process_field(pid: int, name: str) -> str:
    """Return a field of the process's status; empty if the process has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return line.partition(":")[2].strip()
    return ""


def tell(words: str) -> None:
    with suppress(OSError):  # nothing reads standard error any more
        sys.stderr.write(f"fleet: {words}\n")
        sys.stderr.flush()


if __name__ == "__main__":
    main()
