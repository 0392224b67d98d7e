"""Folder records: stores the plan and the report in two files of a folder, `plan.json` and `report.json`.

Rules:

1. A file is written under another name and then renamed, so that readers never see an incomplete file.
2. While a program writes the plan, it holds a lock on the file `.lock` (flock, which network file systems support since
   NFS 4). The kernel releases the lock when the process of this program ends.
3. A file with invalid content counts as unreadable (`ConnectorUnreachable`). The connector never replaces an invalid
   plan file.
4. An orchestrator may hold a lock on the file `.orchestrator` while it runs. If that file exists and is not locked, the
   orchestrator was killed, and its report is out of date.
"""

import asyncio
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from fleet.core.errors import path_with_keys, split_validation_error
from fleet.core.file_locks import hold_lock_file, is_abandoned
from fleet.planner.connectors.virtual import Intent, PlanReport, RecordsSnapshot
from fleet.planner.ports import ConnectorUnreachable, OrchestratorGone

PLAN, REPORT, LOCK, ORCHESTRATOR = "plan.json", "report.json", ".lock", ".orchestrator"
MOST_BYTES = 1 << 20
LOCK_EVERY = 0.02  # seconds between two attempts to lock `.lock`

Record = TypeVar("Record", bound=Struct)


class FolderRecords:
    """Stores the plan and the plan report in files.

    Implements `fleet.planner.connectors.virtual.PlanRecords`. It also has methods by which an orchestrator reads the
    plan and writes its report.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def read(self) -> RecordsSnapshot:
        return await asyncio.to_thread(self._read)

    async def write(self, intent: Intent, over: RecordsSnapshot) -> bool:
        while True:
            with suppress(BlockingIOError):
                return await asyncio.to_thread(self._write, intent, over)
            # another writer holds the lock; the connector cancels this call after `fleet.planner.ports.CALL_SECONDS`
            await asyncio.sleep(LOCK_EVERY)

    def intent(self) -> Intent:
        """Return the content of the plan file, for an orchestrator; if there is no plan file, return an empty plan.

        Raises:
            ConnectorUnreachable: The folder does not exist, or the file is unreadable (rule 3).
        """
        return self._file(PLAN, Intent) or Intent()

    def report(self, report: PlanReport) -> None:
        """Write the orchestrator's plan report; raise ConnectorUnreachable if the file cannot be written."""
        self._replace(REPORT, report)

    @contextmanager
    def obeyed(self) -> Iterator[None]:
        """Hold the lock on `.orchestrator` while the context is open, so that planners know that the orchestrator runs.

        Raises:
            OSError: The file cannot be created or locked.
        """
        with hold_lock_file(self._folder / ORCHESTRATOR):
            yield

    def _read(self) -> RecordsSnapshot:
        if is_abandoned(self._folder / ORCHESTRATOR):
            raise OrchestratorGone(f"{self._folder}: whoever obeyed plans there was killed; start it again (fleet up)")
        intent = self.intent()
        return RecordsSnapshot(intent=intent, report=self._file(REPORT, PlanReport), token=intent.revision)

    def _write(self, intent: Intent, over: RecordsSnapshot) -> bool:
        try:
            lock = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _unreachable(self._folder, error) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self.intent().revision != over.token:
                return False
            self._replace(PLAN, intent)
            return True
        finally:
            os.close(lock)

    def _file(self, name: str, of: type[Record]) -> Record | None:
        path = self._folder / name
        try:
            with open(path, "rb", opener=_at_once) as file:
                content = file.read(MOST_BYTES + 1)
        except FileNotFoundError:
            if not self._folder.is_dir():
                raise ConnectorUnreachable(f"{self._folder}: is not there; is the orchestrator running?") from None
            return None
        except OSError as error:
            raise _unreachable(path, error) from error
        if len(content) > MOST_BYTES:
            raise ConnectorUnreachable(
                f"{path}: is longer than {MOST_BYTES} bytes, so it is not from whom it should be"
            )
        try:
            return msgspec.json.decode(content, type=of)
        except (UnicodeDecodeError, msgspec.DecodeError, RecursionError) as error:
            raise ConnectorUnreachable(f"{path}: {_text_with_keys(error, content, of)}") from error

    def _replace(self, name: str, record: Struct) -> None:
        beside = self._folder / f".{name}.{os.getpid()}"
        try:
            beside.write_bytes(msgspec.json.encode(record))
            beside.replace(self._folder / name)
        except OSError as error:
            with suppress(OSError):
                beside.unlink()
            raise _unreachable(self._folder / name, error) from error


def _text_with_keys(error: Exception, content: bytes, of: type[Struct]) -> str:
    """Return the text of a decoding error. If a value is wrong, the text begins with its path, which names pools."""
    if not isinstance(error, msgspec.ValidationError):
        return str(error)
    cause, _ = split_validation_error(error)
    with suppress(msgspec.DecodeError, RecursionError):
        if where := path_with_keys(error, msgspec.json.decode(content), of).removeprefix("."):
            return f"{where}: {cause}"
    return cause


def _at_once(path: str, flags: int) -> int:
    """Open a path with O_NONBLOCK, because opening a named pipe would otherwise wait for a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def _unreachable(path: Path, error: OSError) -> ConnectorUnreachable:
    return ConnectorUnreachable(f"{path}: {error.strerror or error}")
