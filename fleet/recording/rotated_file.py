"""Rotated file: appends lines to a file by a thread, and renames the file when it is full.

Rules:

1. Adding a line never waits for the disk: a thread writes the lines, ten times a second. If more than `MAX_BACKLOG_BYTES` wait to be
   written, for example because the disk is full, new lines are dropped and counted. This is logged at most once a minute.
2. A file that has reached its full size is renamed to `.1`, the earlier `.1` to `.2`, and so on. The number of files to keep is a setting.
   If renaming fails, the full file grows, no line is lost, and the failure is logged at most once a minute. The oldest file is removed only
   after all files were renamed; until then there is one file more than the setting allows. After a failed or interrupted rotation, one
   number has no file. The next rotation then renames only the files with lower numbers.
3. Several processes may append to one file. Before each write, a process checks whether another process, or a program such as logrotate,
   has renamed the file. If so, it continues in the new file. The file is locked while it is renamed, so that only one process renames
   it. Other processes do not wait for this process, because it may hang: they append to the full file until it is renamed.
4. If the disk becomes full in the middle of a line, the rest of the line is written as soon as there is room.
"""

import fcntl
import logging
import os
import stat
import threading
from collections import deque
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Self

from fleet.core.clock import SECOND, Clock, Nanos
from fleet.core.errors import ConfigurationRefused

log = logging.getLogger(__name__)

MAX_BACKLOG_BYTES = 64 << 20
WRITE_INTERVAL_SECONDS = 0.1
# time limit for the writer thread to write the remaining lines when the file is closed
STOP_SECONDS = 5.0
LOG_INTERVAL = Nanos(60 * SECOND)
APPENDING = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC


class RotatedFile:
    """Appends lines to a file. The object is a context manager; at the end of its block, the remaining lines are written."""

    def __init__(self, path: Path, *, most_bytes: int, kept: int, field: str, clock: Clock) -> None:
        """Open the file for appending, and start the thread.

        Args:
            path: The file; its folder must exist.
            most_bytes: Size in bytes from which on the file is renamed.
            kept: Number of renamed files that are kept; 0: a full file is removed.
            field: The name of the settings field with the path, for error messages.
            clock: The clock that measures the time between two log messages.

        Raises:
            ConfigurationRefused: The path is not a regular file or cannot be written, or files in its folder cannot be renamed.
        """
        self._path = path
        self._most_bytes = most_bytes
        self._kept = kept
        self._clock = clock
        self._lines: deque[bytes] = deque()  # lines that the thread has not taken yet
        self._rest = memoryview(b"")  # bytes that the thread has taken, but not written yet
        self._added = 0  # number of bytes that were passed to the thread so far
        self._done = 0  # number of bytes that the thread has written so far
        self.lines = 0
        """Number of lines that were passed to the thread so far."""

        self.dropped = 0
        """Number of lines that were dropped, because the disk is full or too slow."""

        self._logged_at: dict[str, Nanos] = {}  # instant at which each message was last written to the router's log
        self._stop = threading.Event()
        try:
            if path.exists() and not path.is_file():  # for example a device, which rotation would rename
                raise ConfigurationRefused(f"{field}: {path}: is not a regular file; name another")
            if not os.access(path.parent, os.W_OK | os.X_OK) and path.parent.is_dir():
                raise ConfigurationRefused(
                    f"{field}: {path}: its folder must be writable, because a full file is renamed; name another"
                )
            self._file = os.open(path, APPENDING, 0o600)
        except (OSError, ValueError) as error:  # ValueError is raised if the name contains NUL
            raise ConfigurationRefused(f"{field}: {path}: {getattr(error, 'strerror', None) or error}") from error
        self._thread = threading.Thread(target=self._write, name="rotated file", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(STOP_SECONDS)

    def add(self, line: bytes) -> None:
        """Append a line, which has to end with a line break. Drop the line if more than `MAX_BACKLOG_BYTES` would then wait (rule 1)."""
        if self._added - self._done + len(line) > MAX_BACKLOG_BYTES:
            self.dropped += 1
            self._complain("lines not written", "the disk is too slow")
            return
        self.lines += 1
        self._added += len(line)
        self._lines.append(line)

    def _complain(self, message: str, cause: str) -> None:
        now = self._clock.now()
        logged_at = self._logged_at.get(message)
        if logged_at is None or now - logged_at >= LOG_INTERVAL:
            self._logged_at[message] = now
            log.warning(message, extra={"path": str(self._path), "cause": cause, "dropped": self.dropped})

    # The thread runs the following methods.

    def _write(self) -> None:
        stopped = False
        while not stopped:
            stopped = self._stop.wait(WRITE_INTERVAL_SECONDS)
            try:
                self._drain()
            except OSError as error:
                self._complain("lines not written", error.strerror or str(error))
        os.close(self._file)

    def _drain(self) -> None:
        if not (self._rest or self._lines):
            return
        self._follow()
        self._write_rest()
        self._rest = memoryview(b"".join(self._lines.popleft() for _ in range(len(self._lines))))
        self._write_rest()
        if os.fstat(self._file).st_size >= self._most_bytes:
            try:
                self._rotate()
            except OSError as error:
                self._complain("full file not renamed, it grows", error.strerror or str(error))

    def _write_rest(self) -> None:
        while self._rest:
            written = os.write(self._file, self._rest)
            self._rest = self._rest[written:]
            self._done += written

    def _follow(self) -> None:
        """If the open file was renamed or removed, open the file that is now at the path (rule 3)."""
        if self._is_at_path():
            return
        file = os.open(self._path, APPENDING, 0o600)
        os.close(self._file)
        self._file = file

    def _is_at_path(self) -> bool:
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return False
        return stat.S_ISREG(found.st_mode) and os.path.samestat(found, os.fstat(self._file))

    def _rotate(self) -> None:
        """Rename the full file and the earlier ones (rule 2), unless another process is doing it."""
        full = self._file
        try:
            fcntl.flock(full, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        try:
            if self._is_at_path():  # no other process has renamed the file meanwhile
                self._shift()
            self._follow()
        finally:
            if self._file == full:  # the full file could not be replaced, and is still open
                fcntl.flock(full, fcntl.LOCK_UN)

    def _shift(self) -> None:
        if not self._kept:
            self._path.unlink()
            return
        numbered = [self._path.with_name(f"{self._path.name}.{number}") for number in range(1, self._kept + 2)]
        free = next((index for index, each in enumerate(numbered) if not each.exists()), self._kept)
        for later, sooner in pairwise([*reversed(numbered[: free + 1]), self._path]):
            sooner.replace(later)
        try:
            numbered[-1].unlink(missing_ok=True)
        except OSError as error:
            self._complain("oldest file not removed", error.strerror or str(error))
