"""Local runs: finds the clusters that `fleet up` has started on this machine, and cleans up after killed ones.

Rules:

1. A run locks the file `alive` in its runtime folder (`fleet.core.file_locks`), and so does its orphan reaper. The
   locks show other runs that they must not clean up the folder yet.
2. The file `groups` in the runtime folder lists the process groups of the run, with the lines that the orphan reaper
   gets. The next run reads the file if both the supervisor and the reaper were killed. By then, the system may have
   given the number of a group to another program. So a process in one of these groups belongs to the run only if its
   environment names the run. An engine that renames itself overwrites its environment. Such an engine belongs to the
   run if it writes to a log of the run.
3. Only folders of the same user are read. A folder without the file `alive` is just being made, or belongs to another
   program, so it is not cleaned up.
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
from fleet.core.system_clock import process_start
from fleet.local.orphan_reaper import SILENT_FILE
from fleet.local.process_group import end_group, members
from fleet.net.control.address import EVERY_HOST, THIS_HOST, is_of_this_machine
from fleet.planner.connectors.folder import REPORT
from kvstore.security.credentials import Credentials

PREFIX = "fleet-"
PLANS = "plans"
"""Name of the folder in the runtime folder from which `fleet up` reads plans for its pools."""

# Maximum number of characters in the path of the runtime folder's parent, because the path of a socket may have at most
# 107. If the folder for temporary files has a longer path, /tmp is the parent.
LONGEST_PARENT = 40
GROUPS, TEMPORARY, ROUTER = "groups", "tmp", "router.json"
PARTS = "parts.json"
SUPERVISOR = "supervisor.json"
AUTHORITY = "ca.pem"
LOGS = "logs"
"""Name of a link in the runtime folder to the logs of the run, if they are somewhere else."""


class RouterTls(Struct, frozen=True):
    """The setting `tls.certificate` of a router. If it is empty, the ports for clients have no TLS."""

    certificate: str = ""


class RouterAddresses(Struct, frozen=True):
    """The addresses in a router's settings file that commands such as `fleet status` need."""

    http_listen: str = ""
    grpc_listen: str = ""
    kserve_listen: str = ""
    health_listen: str = ""
    tls: RouterTls = RouterTls()
    control_listen: str = ""
    control_credentials: Credentials = Credentials()


class SupervisorRecord(Struct, frozen=True, kw_only=True):
    """Identifies the process that runs `fleet up`, by its id and its start time."""

    pid: int
    # Start of the process in seconds after the boot of the machine. The start in seconds since 1970 would not identify the process,
    # because it changes with each correction of the wall clock.
    started_after_boot: float

    @property
    def alive(self) -> bool:
        """True if this process still runs. A later process with the same id does not count."""
        return process_start(self.pid) == self.started_after_boot


class ProcessReport(Struct, frozen=True, kw_only=True):
    """A supervisor's report about one process of its run."""

    condition: str  # a value of `fleet.local.supervision.ChildState`
    pid: int | None  # process id; None: the process does not run
    deaths: int  # number of deaths since the process last stayed ready for `fleet.local.supervision.HEALTHY_AFTER`
    last_end: str  # how the process ended last, in words; empty: it has not ended
    pause_seconds: float | None  # time from the writing of this report to the restart; None: no restart is due

    @property
    def failing(self) -> bool:
        """True if the process has died, and the supervisor has not reset its deaths yet (`fleet.local.supervision.HEALTHY_AFTER`)."""
        return self.deaths > 0


class LocalRun(Struct, frozen=True):
    """One run, identified by its runtime folder."""

    folder: Path

    @property
    def plans(self) -> Path:
        return self.folder / PLANS

    def parts(self) -> Mapping[str, ProcessReport]:
        """Return the supervisor's last reports about the processes of the run, by name; empty if none can be read."""
        try:
            return msgspec.json.decode((self.folder / PARTS).read_bytes(), type=dict[str, ProcessReport])
        except (OSError, msgspec.DecodeError):
            return {}

    @property
    def authority(self) -> Path:
        """Path of the file with the certificate authority that `fleet up --tls` has made.

        Without TLS, the file does not exist.
        """
        return self.folder / AUTHORITY

    @property
    def silence(self) -> str:
        """Return the reason why the supervisor counts as hung (`fleet.local.orphan_reaper`), or an empty text if it does not."""
        try:
            return (self.folder / SILENT_FILE).read_text()
        except OSError:
            return ""

    @property
    def killed(self) -> bool:
        """True if the run has ended without cleaning up. A run without the lock file does not count as killed."""
        return is_abandoned(self.folder / ALIVE_FILE)

    def answers_at(self, address: str) -> bool:
        """Return True if the router of the run has its gRPC port or its control port at this address."""
        addresses = self.addresses()
        return addresses is not None and any(
            _same(listen, address) for listen in (addresses.grpc_listen, addresses.control_listen)
        )

    def addresses(self) -> RouterAddresses | None:
        """Return the addresses of the run's router; None if they cannot be read."""
        try:
            return msgspec.json.decode((self.folder / ROUTER).read_bytes(), type=RouterAddresses)
        except (OSError, msgspec.DecodeError):
            return None

    def supervisor(self) -> SupervisorRecord | None:
        """Return the process of `fleet up` that runs the cluster.

        Return None if that process has ended, or if its record cannot be read. Runs of `fleet serve router` have none.
        """
        try:
            found = msgspec.json.decode((self.folder / SUPERVISOR).read_bytes(), type=SupervisorRecord)
        except (OSError, msgspec.DecodeError):
            return None
        return found if found.alive else None

    @property
    def logs(self) -> Path:
        """Folder with the logs of the run's processes."""
        return self.folder / LOGS if (self.folder / LOGS).exists() else self.folder

    def clear(self) -> int | None:
        """End the remaining processes of a killed run, and remove its folder. This may block for some seconds.

        Returns:
            Number of processes that were ended. None if nothing was done, because the run is alive or another process
            cleans up.
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
    """Make a private folder with a short path for a run of this process, and remove it at the end of the `with` block."""
    parent = tempfile.gettempdir()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent if len(parent) <= LONGEST_PARENT else "/tmp"))  # noqa: S108 - mkdtemp makes it private
    try:
        with hold_lock_file(folder / ALIVE_FILE):
            try:
                (folder / TEMPORARY).mkdir()
                yield folder
            finally:
                remove_locked_folder(folder / ALIVE_FILE)
    finally:  # the folder is removed even if the lock could not be taken
        remove_locked_folder(folder / ALIVE_FILE)


def local_runs() -> Sequence[LocalRun]:
    """Return the runs of this user on this machine, including killed ones."""
    parents = {Path(tempfile.gettempdir()), Path("/tmp")}  # noqa: S108 - the same parents as in `runtime_folder`
    found = set()
    for folder in (each for parent in parents for each in parent.glob(f"{PREFIX}*")):
        with suppress(OSError):  # the run has just ended, or cannot be read
            if folder.lstat().st_uid != os.getuid() or not folder.is_dir() or folder.is_symlink():
                continue
            if (folder / ALIVE_FILE).exists() or (folder / PLANS).is_dir():
                found.add(folder)
    return [LocalRun(folder) for folder in sorted(found)]


def local_plans() -> list[Path]:
    """Return the plan folders of the clusters that run on this machine and have written a report there."""
    return [run.plans for run in local_runs() if not run.killed and (run.plans / REPORT).exists()]


def run_at(address: str) -> LocalRun | None:
    """Return the run whose router has its gRPC or control port at this address; None if there is none.

    A killed run is returned only if no other run has the address.
    """
    found = [run for run in local_runs() if run.answers_at(address)]
    return min(found, key=lambda run: run.killed, default=None)


def note_logs(folder: Path, logs: Path) -> None:
    """Record where the logs of a run are, if they are not in its runtime folder. Do nothing if that cannot be written."""
    if logs != folder:
        with suppress(OSError):
            (folder / LOGS).symlink_to(logs.resolve())


def note_supervisor(folder: Path) -> None:
    """Record that this process runs the cluster with the runtime folder `folder`.

    Raises:
        OSError: The record cannot be written.
    """
    record = SupervisorRecord(pid=os.getpid(), started_after_boot=process_start(os.getpid()) or 0.0)
    unfinished = folder / f".{SUPERVISOR}"
    unfinished.write_bytes(msgspec.json.encode(record))
    unfinished.replace(folder / SUPERVISOR)


def note_parts(folder: Path, parts: Mapping[str, ProcessReport]) -> None:
    """Record the states of a run's processes. A reader sees either the old or the new record, and never a part.

    Raises:
        OSError: The record cannot be written.
    """
    unfinished = folder / f".{PARTS}"
    unfinished.write_bytes(msgspec.json.encode(parts))
    unfinished.replace(folder / PARTS)


def note_group(folder: Path, change: str, group: int) -> None:
    """Append a line for the orphan reaper to the file `groups` (rule 2). Do nothing if the file cannot be written."""
    with suppress(OSError), (folder / GROUPS).open("a") as file:
        file.write(f"{change}{group}\n")


def _groups(folder: Path) -> list[int]:
    """Return the process groups that had not ended when the run was killed."""
    groups: dict[int, None] = {}
    with suppress(OSError):
        # Only complete lines are read: if the disk was full, the last line may contain a truncated number.
        for change, group in re.findall(rb"([+-])([0-9]+)\n", (folder / GROUPS).read_bytes()):
            if change == b"+":
                groups[int(group)] = None
            else:
                groups.pop(int(group), None)
    return list(groups)


def _of_run(pids: Sequence[int], folder: Path) -> list[int]:
    """Return those of the processes `pids` that belong to the run in `folder` (rule 2)."""
    mark = f"TMPDIR={folder / TEMPORARY}".encode()
    logs = {folder.resolve(), (folder / LOGS).resolve()}
    found = []
    for pid in pids:
        with suppress(OSError):  # the process has ended, or belongs to another user
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            if mark in environment.split(b"\0") or (b"PATH=" not in environment and _output(pid).parent in logs):
                found.append(pid)
    return found


def _output(pid: int) -> Path:
    """Return the file to which a process writes its standard error."""
    return Path(f"/proc/{pid}/fd/2").readlink()


def _same(listen: str, address: str) -> bool:
    """Return True if a caller with this address reaches the listener, as in `fleet.net.control.address.find_control_socket`.

    The addresses are equal, or they have the same port and both hosts are this machine (loopback or all interfaces). A
    listener at all interfaces is also reached at the machine's other addresses.
    """
    if listen == address:
        return bool(listen)
    (host, _, port), (own_host, _, own_port) = address.rpartition(":"), listen.rpartition(":")
    if own_port != port:
        return False
    if host in THIS_HOST:
        return own_host in THIS_HOST
    return own_host in EVERY_HOST and is_of_this_machine(host)
