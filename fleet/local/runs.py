"""The clusters that `fleet up` has started on this machine: which of them run, and what those that were killed have left.

Rules:

1. A run holds the file `alive` in its runtime folder (`fleet.core.file_locks`), and so does its guardian: what is still being cleared
   away is nobody else's to clear.
2. In `groups` beside it stand the process groups that it has started, as its guardian is told of them: for when the guardian is killed too.
   A process counts as the run's when it is in such a group and its environment says so. Where that says nothing (engines rename
   themselves, which overwrites it) it writes to a log of the run: the number may be another group's by now.
3. Only folders of the same user are looked at. One without `alive` is just being made, or somebody else's: it is left alone.
"""

import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from fleet.core.file_locks import ALIVE_FILE, hold_lock_file, is_abandoned, remove_locked_folder, take_abandoned
from fleet.local.process_group import end_group, members
from fleet.planner.connectors.folder import REPORT
from kvstore.security.credentials import Credentials

PREFIX = "fleet-"
PLANS = "plans"
"""Where a run reads plans, in its runtime folder."""

LONGEST_PARENT = 40  # characters of the runtime folder's parent, so that sockets stay below the 107 that Unix allows
GROUPS, TEMPORARY, ROUTER = "groups", "tmp", "router.json"
PARTS = "parts.json"
LOGS = "logs"
"""A link to where a run keeps its logs, if that is not its runtime folder."""


class RouterAddresses(Struct, frozen=True):
    """The part of a router's settings that commands need."""

    grpc_listen: str = ""
    control_listen: str = ""
    control_credentials: Credentials = Credentials()


class ProcessReport(Struct, frozen=True, kw_only=True):
    """The report of a supervisor about one process of its run."""

    condition: str  # a value of `fleet.local.supervision.ChildState`
    pid: int | None  # None: it does not run now
    deaths: int  # in a row
    last_end: str  # how it ended the last time, in words; empty: it has not
    pause_seconds: (
        float | None
    )  # from the last change of this report until it is started again; None: it is not waiting

    @property
    def failing(self) -> bool:
        """True if it has died since it was last ready for long."""
        return self.deaths > 0


class LocalRun(Struct, frozen=True):
    """One run, by its runtime folder."""

    folder: Path

    @property
    def plans(self) -> Path:
        return self.folder / PLANS

    def parts(self) -> Mapping[str, ProcessReport]:
        """Return what its supervisor last said of its processes, by name; nothing where it said nothing that can be read."""
        try:
            return msgspec.json.decode((self.folder / PARTS).read_bytes(), type=dict[str, ProcessReport])
        except (OSError, msgspec.DecodeError):
            return {}

    @property
    def killed(self) -> bool:
        """It has ended without clearing up. Of a run that does not say that it is alive nobody knows."""
        return is_abandoned(self.folder / ALIVE_FILE)

    def answers_at(self, address: str) -> bool:
        """Whether its router was told to listen there."""
        told = self.addresses()
        return told is not None and any(_same(listen, address) for listen in (told.grpc_listen, told.control_listen))

    def addresses(self) -> RouterAddresses | None:
        """Return the addresses at which its router was told to listen; None: they cannot be read."""
        try:
            return msgspec.json.decode((self.folder / ROUTER).read_bytes(), type=RouterAddresses)
        except (OSError, msgspec.DecodeError):
            return None

    def clear(self) -> int | None:
        """End the processes that a killed run has left, and remove its folder; blocks, for some seconds at most.

        Returns:
            How many processes there were. None, and nothing is done, where somebody else is at it, or the run is alive.
        """
        with take_abandoned(self.folder / ALIVE_FILE) as dead:
            if not dead:
                return None
            ended = 0
            for group in _groups(self.folder):
                if its := _of_run(members(group), self.folder):
                    ended += len(its)
                    end_group(group)
            remove_locked_folder(self.folder / ALIVE_FILE)
            return ended


@contextmanager
def runtime_folder() -> Iterator[Path]:
    """A private folder with a short path, for a run of this process; removed at the end."""
    parent = tempfile.gettempdir()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent if len(parent) <= LONGEST_PARENT else "/tmp"))  # noqa: S108 - mkdtemp makes it private
    try:
        with hold_lock_file(folder / ALIVE_FILE):
            try:
                (folder / TEMPORARY).mkdir()
                yield folder
            finally:
                remove_locked_folder(folder / ALIVE_FILE)
    finally:  # where it could not even be held
        remove_locked_folder(folder / ALIVE_FILE)


def local_runs() -> Sequence[LocalRun]:
    """Those on this machine that are ours, killed ones included."""
    parents = {Path(tempfile.gettempdir()), Path("/tmp")}  # noqa: S108 - as `runtime_folder` does
    found = set()
    for folder in (each for parent in parents for each in parent.glob(f"{PREFIX}*")):
        with suppress(OSError):  # it has just ended, or may not be looked into
            if folder.lstat().st_uid != os.getuid() or not folder.is_dir() or folder.is_symlink():
                continue
            if (folder / ALIVE_FILE).exists() or (folder / PLANS).is_dir():
                found.add(folder)
    return [LocalRun(folder) for folder in sorted(found)]


def local_plans() -> list[Path]:
    """Where the clusters that run on this machine read plans."""
    return [run.plans for run in local_runs() if not run.killed and (run.plans / REPORT).exists()]


def run_at(address: str) -> LocalRun | None:
    """The run whose router has this address; one that was killed where nobody else has it."""
    found = [run for run in local_runs() if run.answers_at(address)]
    return min(found, key=lambda run: run.killed, default=None)


def note_logs(folder: Path, logs: Path) -> None:
    """Write down where the logs of a run are kept."""
    if logs != folder:
        with suppress(OSError):
            (folder / LOGS).symlink_to(logs.resolve())


def note_parts(folder: Path, parts: Mapping[str, ProcessReport]) -> None:
    """Write down what the processes of a run do; whoever reads it sees all of it.

    Raises:
        OSError: It cannot be written.
    """
    unfinished = folder / f".{PARTS}"
    unfinished.write_bytes(msgspec.json.encode(parts))
    unfinished.replace(folder / PARTS)


def note_group(folder: Path, change: str, group: int) -> None:
    """Write down what the guardian is told. Where the disk is full the guardian alone knows."""
    with suppress(OSError), (folder / GROUPS).open("a") as file:
        file.write(f"{change}{group}\n")


def _groups(folder: Path) -> list[int]:
    """Those that had not ended when the run was killed."""
    groups: dict[int, None] = {}
    with suppress(OSError):
        # Only whole lines: where the disk was full in the middle of one, what there is of it is another number.
        for change, group in re.findall(rb"([+-])([0-9]+)\n", (folder / GROUPS).read_bytes()):
            if change == b"+":
                groups[int(group)] = None
            else:
                groups.pop(int(group), None)
    return list(groups)


def _of_run(pids: Sequence[int], folder: Path) -> list[int]:
    """Those that are the run's, of processes that are in a group of its number."""
    mark = f"TMPDIR={folder / TEMPORARY}".encode()
    logs = {folder.resolve(), (folder / LOGS).resolve()}
    found = []
    for pid in pids:
        with suppress(OSError):  # ended, or another user's
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            if mark in environment.split(b"\0") or (b"PATH=" not in environment and _output(pid).parent in logs):
                found.append(pid)
    return found


def _output(pid: int) -> Path:
    """Where a process writes what nobody has asked for."""
    return Path(f"/proc/{pid}/fd/2").readlink()


def _same(listen: str, address: str) -> bool:
    """Whether a client that is told `address` reaches who listens at `listen`, on this machine."""
    if listen == address:
        return bool(listen)
    host, _, port = address.rpartition(":")
    return host in ("127.0.0.1", "localhost", "[::1]", "0.0.0.0") and listen.rpartition(":")[2] == port  # noqa: S104 - compared, not bound
