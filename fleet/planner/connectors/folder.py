"""Plan and report as two files in a folder, `plan.json` and `report.json`.

Rules:

1. A file is written beside its place and renamed into it, so that it is never read in parts.
2. Who writes the plan holds a lock on the file `.lock` meanwhile (flock, which file systems shared over a network know since NFS 4).
   It ends with its holder.
3. A file that says something else is no plan and no report: nothing is concluded from it, and nothing is written over it.
4. An orchestrator may hold a lock on the file `.orchestrator` while it runs. Where that file is there and nobody holds it, the orchestrator has
   been killed, and what the report says is not so any more.
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

from fleet.core.file_locks import hold_lock_file, is_abandoned
from fleet.planner.connectors.virtual import Intent, Kept, Report
from fleet.planner.ports import ConnectorUnreachable, OrchestratorGone

PLAN, REPORT, LOCK, ORCHESTRATOR = "plan.json", "report.json", ".lock", ".orchestrator"
MOST_BYTES = 1 << 20
LOCK_EVERY = 0.02  # seconds

Record = TypeVar("Record", bound=Struct)


class FolderRecords:
    """Implements `fleet.planner.connectors.virtual.Records`; and the orchestrator's side of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def read(self) -> Kept:
        return await asyncio.to_thread(self._read)

    async def write(self, intent: Intent, over: Kept) -> bool:
        while True:
            with suppress(BlockingIOError):
                return await asyncio.to_thread(self._write, intent, over)
            await asyncio.sleep(LOCK_EVERY)  # somebody else is writing; the caller's deadline ends this

    def intent(self) -> Intent:
        """What is wanted, for an orchestrator; as at first where there is no file. Raises Unreachable."""
        return self._file(PLAN, Intent) or Intent()

    def report(self, report: Report) -> None:
        """Say what there is. Raises Unreachable."""
        self._replace(REPORT, report)

    @contextmanager
    def obeyed(self) -> Iterator[None]:
        """For as long as this is open, or the process lives, there is somebody who obeys. Raises OSError."""
        with hold_lock_file(self._folder / ORCHESTRATOR):
            yield

    def _read(self) -> Kept:
        if is_abandoned(self._folder / ORCHESTRATOR):
            raise OrchestratorGone(f"{self._folder}: whoever obeyed plans there was killed; start it again (fleet up)")
        intent = self.intent()
        return Kept(intent=intent, report=self._file(REPORT, Report), token=intent.revision)

    def _write(self, intent: Intent, over: Kept) -> bool:
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
            raise ConnectorUnreachable(f"{path}: {error}") from error

    def _replace(self, name: str, record: Struct) -> None:
        beside = self._folder / f".{name}.{os.getpid()}"
        try:
            beside.write_bytes(msgspec.json.encode(record))
            beside.replace(self._folder / name)
        except OSError as error:
            with suppress(OSError):
                beside.unlink()
            raise _unreachable(self._folder / name, error) from error


def _at_once(path: str, flags: int) -> int:
    """Open it, without waiting for anybody at the other end of what is no file."""
    return os.open(path, flags | os.O_NONBLOCK)


def _unreachable(path: Path, error: OSError) -> ConnectorUnreachable:
    return ConnectorUnreachable(f"{path}: {error.strerror or error}")
