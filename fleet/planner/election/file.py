"""File election: elects the candidate that holds the lock of a file (flock).

The kernel releases the lock when the process of its holder ends, also if the process was killed. A process that is stopped
(SIGSTOP) keeps the lock, so no other candidate leads until it goes on or is killed.

If somebody deletes the file or its folder, another candidate could create a new file at the path, and lock it. So a
candidate whose file is no longer at the path closes this file, which ends its leadership. It then tries to lock the
file that is at the path.
"""

import asyncio
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Never

from fleet.core.errors import ConfigurationRefused

log = logging.getLogger(__name__)

TRY_EVERY = 0.5  # seconds between two attempts to lock the file


class FileElection:
    """Takes part in an election by a file lock, as one candidate.

    Implements `fleet.planner.election.ports.PlanElection`.
    """

    def __init__(self, path: Path, identity: str) -> None:
        self._path = path
        self._identity = identity
        self._file: int | None = None
        self._leads = False

    def leads(self) -> bool:
        return self._leads

    async def run(self) -> Never:
        while True:
            if self._file is not None and not self._is_in_place(self._file):
                log.info("leader election file replaced", extra={"file": str(self._path), "led": self._leads})
                self.close()
            if not self._leads:
                self._try()
            await asyncio.sleep(TRY_EVERY)

    def open(self) -> None:
        """Open the lock file, unless this candidate has it open already; raise OSError if it cannot be opened or created."""
        if self._file is None:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def close(self) -> None:
        """Close the file, which releases the lock and ends the leadership."""
        self._leads = False
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _is_in_place(self, file: int) -> bool:
        """Return whether the open file is still at the path. If not, another candidate may lock the new file there."""
        try:
            there = self._path.stat()
        except OSError:
            return False
        opened = os.fstat(file)
        return (there.st_dev, there.st_ino) == (opened.st_dev, opened.st_ino)

    def _try(self) -> None:
        try:
            self.open()
            assert self._file is not None
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return
        self._leads = True
        log.info("leader election won", extra={"identity": self._identity})
        # The name in the file is only information for people. So a failure to write the name does not end leadership.
        with suppress(OSError):
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"{self._identity}\n".encode(), 0)


@contextmanager
def open_file_election(path: Path, identity: str, *, may_come_later: bool = False) -> Iterator[FileElection]:
    """Open a candidate for a lock file; when the context ends, the candidate resigns as leader.

    Args:
        path: The lock file.
        identity: Name of the candidate, which the leader writes into the file.
        may_come_later: If true, the folder of the file does not have to exist yet; nobody leads until it exists.

    Raises:
        ConfigurationRefused: The file cannot be opened or created.
    """
    election = FileElection(path, identity)
    try:
        if not may_come_later or path.parent.is_dir():
            election.open()
    except OSError as error:
        raise ConfigurationRefused(f"election.path: {path}: {error.strerror}") from error
    try:
        yield election
    finally:
        election.close()
