"""Orphan reaper: ends the processes that a killed supervisor has left running, and reports a supervisor that hangs.

    python -m fleet.local.orphan_reaper FOLDER [GROUP ...]

The arguments are the runtime folder and the process groups that run already. The supervisor writes lines to the
reaper's standard input: ``+GROUP`` when it has started a group, ``-GROUP`` when the group has ended, and ``.`` every
`BEAT_SECONDS`. The end of the input means that the supervisor has ended. Then the reaper ends the remaining groups and
removes the runtime folder. If the supervisor ended in an orderly way, there are no groups left.

The kernel kills the supervisor's direct children together with it (`fleet.local.process_group.die_with_parent`). The
reaper ends the processes that these children had started.

A supervisor that hangs or is stopped does not replace processes that die. But its processes still serve, so the reaper
does not end the supervisor. It reports the hang on standard error, and in the file `SILENT_FILE` of the runtime folder,
which ``fleet status`` reads. Only time in which the reaper itself ran counts, so a suspended machine is not taken for a
hang.
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
MAX_SILENT_CHECKS = 10
"""The supervisor counts as hung if it has written nothing at this number of checks in a row. The checks are
`BEAT_SECONDS` apart."""

SILENT_FILE = "supervisor-silent"
"""Name of the file in the runtime folder that exists while the supervisor counts as hung, and contains the reason."""


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # signals are ignored, because the reaper has to run until its input ends
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
        self._silent_checks = 0

    def note_line(self) -> None:
        """Note that the supervisor has written a line. If it counted as hung, report that it responds again."""
        if self._silent_checks >= MAX_SILENT_CHECKS:
            self._file.unlink(missing_ok=True)
            tell("the supervisor responds again")
        self._silent_checks = 0

    def note_silence(self) -> None:
        """Note that the supervisor has written nothing since the last check. After `MAX_SILENT_CHECKS` such checks in a row, report a hang."""
        if process_field(self._supervisor, "TracerPid") not in ("", "0"):
            return  # a debugger may have stopped the supervisor, so this is no hang
        self._silent_checks += 1
        if self._silent_checks == MAX_SILENT_CHECKS:
            stopped = process_field(self._supervisor, "State").startswith("T")
            why = (
                f"the supervisor (process {self._supervisor}) {'is stopped' if stopped else 'hangs'}: what runs goes on,"
                f" but a process that dies is not replaced; {'continue it (SIGCONT)' if stopped else 'start it again'}"
            )
            # On a full disk, the file cannot be written, and only standard error gets the report.
            with suppress(OSError):
                self._file.write_text(why)
            tell(why)


def lines(watch: SupervisorWatch) -> Iterator[bytes]:
    """Yield the lines of standard input until its end, and tell `watch` when lines arrive and when none do."""
    source = sys.stdin.fileno()
    unfinished = b""
    while True:
        ready, _, _ = select.select([source], [], [], BEAT_SECONDS)
        if not ready:
            watch.note_silence()
            continue
        content = os.read(source, 1 << 16)
        if not content:
            return
        watch.note_line()
        *whole, unfinished = (unfinished + content).split(b"\n")
        yield from whole


def process_field(pid: int, name: str) -> str:
    """Return a field of a process's status in /proc. Return an empty text if the process has ended or has no such field."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return line.partition(":")[2].strip()
    return ""


def tell(words: str) -> None:
    with suppress(OSError):  # the message is lost if nobody reads standard error any more
        sys.stderr.write(f"fleet: {words}\n")
        sys.stderr.flush()


if __name__ == "__main__":
    main()
