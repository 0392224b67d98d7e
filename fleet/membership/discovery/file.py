"""File directory: a folder that contains one file per worker.

Rules:

1. A file is written under another name and then renamed, so that nobody reads a half-written file. The folder may be
   shared over a network, because nothing depends on locks, on notifications of changes or on synchronised clocks.
2. Each file contains a number that grows with every renewal. A router starts a lease when it sees that the number has
   changed. It ignores the time stamps of files.
3. The file belongs to the incarnation that started last. If an incarnation wants to renew its file and finds the record of
   another incarnation in it, it has been replaced.
4. A file that is no valid record is ignored and logged once. A copy of a file under another name is ignored too.
   Otherwise the different numbers in the copy and the original would look like renewals of a dead worker.
"""

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import msgspec

from fleet.core.clock import SECOND, Nanos
from fleet.core.discovery import FileDiscovery, WorkerRecord
from fleet.core.errors import ConfigurationRefused
from fleet.core.ids import Incarnation, WorkerId
from fleet.membership.messages import DirectoryListing, DirectoryReading, RecordSeen
from fleet.membership.ports import DirectoryUnreachable, RegistryUnreachable, StatelessDirectory, WorkerSuperseded

log = logging.getLogger(__name__)

SUFFIX = ".worker.json"
MAX_BYTES = 64 << 10  # maximum size of a worker's file; a larger one is ignored. A record has a few hundred bytes
# Maximum number of bytes of a file name before its suffix; file systems allow 255. A longer name is replaced by its SHA-256.
LONGEST_NAME = 200


class DiscoveryFileEntry(WorkerRecord, frozen=True, kw_only=True):
    """Content of a worker's file: the record of the worker, and the number of renewals so far."""

    renewals: int


class FileDirectory(StatelessDirectory):
    """Publishes workers in a folder, and reads the published workers.

    Implements `Registry` and `Directory` of `fleet.membership.ports`.
    """

    def __init__(self, settings: FileDiscovery) -> None:
        """Check that the folder exists; no file is read or written yet.

        Raises:
            ConfigurationRefused: The folder does not exist.
        """
        self._settings = settings
        self._folder = Path(settings.folder)
        # For each worker that this process publishes, the number of renewals that were published so far.
        self._renewals: dict[tuple[WorkerId, Incarnation], int] = {}
        self._passed_over: set[str] = set()
        if not self._folder.is_dir():
            raise ConfigurationRefused(f"discovery.folder: {self._folder} is not a folder; make it, or mount it")

    async def register(self, worker_id: WorkerId, incarnation: Incarnation, address: str) -> Nanos:
        renewals = self._renewals.get((worker_id, incarnation), 0) + 1
        entry = DiscoveryFileEntry(
            worker_id=worker_id,
            incarnation=incarnation,
            address=address,
            lease_seconds=self._settings.lease_seconds,
            renewals=renewals,
        )
        try:
            await asyncio.to_thread(self._publish, entry)
        except OSError as error:
            raise RegistryUnreachable(f"{self._folder}: {error.strerror or error}") from error
        self._renewals[worker_id, incarnation] = renewals
        return Nanos(self._settings.lease_seconds * SECOND)

    async def deregister(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        self._renewals.pop((worker_id, incarnation), None)
        try:
            await asyncio.to_thread(self._withdraw, worker_id, incarnation)
        except OSError as error:
            raise RegistryUnreachable(f"{self._folder}: {error.strerror or error}") from error

    async def readings(self) -> AsyncGenerator[DirectoryReading, None]:
        while True:
            try:
                entries = await asyncio.to_thread(self.read_records)
            except OSError as error:
                raise DirectoryUnreachable(f"{self._folder}: {error.strerror or error}") from error
            yield DirectoryListing(all=tuple(map(_seen, entries)))
            await asyncio.sleep(self._settings.poll_ms / 1000)

    # The following functions run in threads, because file systems may block.

    def _publish(self, entry: DiscoveryFileEntry) -> None:
        path = self._path(entry.worker_id)
        there = _entry(path)
        if entry.renewals > 1 and there is not None and there.incarnation != entry.incarnation:
            raise WorkerSuperseded(f"{entry.worker_id} is held by a newer process; every worker needs an id of its own")
        beside = path.with_name(f".{quote(entry.incarnation, safe='')[:32]}.{SUFFIX}")
        try:
            beside.write_bytes(msgspec.json.encode(entry))
            beside.replace(path)
        except OSError:
            with suppress(OSError):
                beside.unlink()
            raise

    def _withdraw(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        path = self._path(worker_id)
        there = _entry(path)
        if there is not None and there.incarnation == incarnation:
            path.unlink(missing_ok=True)

    def read_records(self) -> list[DiscoveryFileEntry]:
        entries: list[DiscoveryFileEntry] = []
        passed_over: set[str] = set()
        for path in sorted(self._folder.iterdir()):
            if path.name.startswith(".") or not path.name.endswith(SUFFIX):
                continue
            if (entry := _entry(path)) is not None and self._path(entry.worker_id) == path:
                entries.append(entry)
            elif path.exists():
                passed_over.add(path.name)
                if path.name not in self._passed_over:
                    log.warning("file ignored, it is not the record of its worker", extra={"path": str(path)})
        self._passed_over = passed_over
        return entries

    def _path(self, worker_id: WorkerId) -> Path:
        name = quote(worker_id, safe="")
        if len(name) > LONGEST_NAME or name.startswith("."):
            name = hashlib.sha256(worker_id.encode()).hexdigest()
        return self._folder / f"{name}{SUFFIX}"


def _entry(path: Path) -> DiscoveryFileEntry | None:
    """Return the content of a worker's file; None if it does not exist, must not be read, or has no valid content.

    Pipes and other special files are not opened, because opening a pipe would block.
    """
    try:
        if not path.is_file():
            return None
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        return msgspec.json.decode(content, type=DiscoveryFileEntry) if len(content) <= MAX_BYTES else None
    except (FileNotFoundError, PermissionError, UnicodeDecodeError, msgspec.DecodeError, RecursionError):
        return None


def _seen(entry: DiscoveryFileEntry) -> RecordSeen:
    record = WorkerRecord(
        worker_id=entry.worker_id,
        incarnation=entry.incarnation,
        address=entry.address,
        lease_seconds=entry.lease_seconds,
    )
    return RecordSeen(record=record, renewal=str(entry.renewals))
