"""Disk: reads and writes the large files of the SSD tier in one folder, in whole pages.

A test write of one page finds out whether the folder's file system supports direct I/O. If it does not, or if the
settings forbid direct I/O, the page cache is used. If the system reads or writes only a part of the bytes, this module
continues with the remaining bytes. It does not repeat failed operations.
"""

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from msgspec import Struct

from kvstore.buffers import BufferRun, ByteArray
from kvstore.pool.extents import PAGE_BYTES

SEGMENT = re.compile(r"segment-\d{6}")
LOCK = "lock"
PROBE = "probe"

BLOCK_BYTES = 512  # `st_blocks` in the status of a file counts units of this many bytes on every device
NO_DIRECT_IO = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY}
NO_SPACE = {errno.ENOSPC, errno.EDQUOT}

log = logging.getLogger(__name__)


class DiskFile(Protocol):
    """Port of the file of one segment. Offsets, lengths and memory addresses are multiples of 4 KiB. Thread-safe."""

    @property
    def size_bytes(self) -> int:
        """Size of the file when it was opened."""
        ...

    def read(self, into: Sequence[ByteArray], offset: int) -> int:
        """Fill buffers one after the other; return the number of bytes read.

        The number is smaller than the size of the buffers only if the file ends before they are full.

        Raises:
            OSError: The bytes could not be read; the content of `into` is undefined.
        """
        ...

    def write(self, parts: Sequence[ByteArray], offset: int) -> None:
        """Write buffers one after the other.

        Raises:
            OSError: The write failed; some of the bytes may have been written.
        """
        ...

    def sync(self) -> None:
        """Wait until the written bytes survive a power cut."""
        ...

    def close(self) -> None: ...


class DiskSpace(Struct, frozen=True, kw_only=True):
    """The space of a folder's file system, in bytes."""

    device: int  # id of the file system; equal for all folders on one file system
    total: int  # size of the file system; 0: unknown
    free: int
    ours: int  # space that the segments in this folder use


class Disk(Protocol):
    """Port of one folder with segment files. No other process uses the folder until `close`."""

    @property
    def folder(self) -> str: ...

    def segments(self) -> list[str]:
        """Return the names of the segment files, sorted."""
        ...

    def foreign_bytes(self) -> int:
        """Return the space in bytes that other files than the segments and the lock file use in the folder."""
        ...

    def space(self) -> DiskSpace: ...

    def open(self, name: str) -> DiskFile: ...

    def create(self, name: str, size_bytes: int) -> DiskFile:
        """Create a file, and allocate all its space. If this raises an `OSError`, no file is left behind."""
        ...

    def remove(self, name: str) -> None: ...

    def close(self) -> None: ...


class DirectoryInUse(Exception):
    """Another process has the folder open."""


def open_disk(folder: str, *, direct: bool) -> "PosixDisk":
    """Make the folder if it is missing, and lock it.

    Args:
        folder: An absolute path.
        direct: Use direct I/O if the file system supports it.

    Raises:
        DirectoryInUse: Another process has the folder open.
        OSError: The folder cannot be made or written to.
    """
    path = Path(folder)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DirectoryInUse(folder) from None
        can = _can_write(path, os.O_DIRECT) if direct else False
        if direct and not can:
            log.info("direct I/O not supported, using the page cache", extra={"folder": folder})
        if not can:
            _can_write(path, 0)
    except BaseException:
        os.close(lock)
        raise
    return PosixDisk(path, lock, os.O_DIRECT if can else 0)


class PosixDisk:
    """A `Disk` on a POSIX file system, made by `open_disk`."""

    def __init__(self, path: Path, lock: int, flags: int) -> None:
        self._path = path
        self._lock = lock
        self._flags = flags | os.O_RDWR | os.O_CLOEXEC

    @property
    def folder(self) -> str:
        return str(self._path)

    @property
    def is_direct(self) -> bool:
        return bool(self._flags & os.O_DIRECT)

    def segments(self) -> list[str]:
        return sorted(entry.name for entry in os.scandir(self._path) if _is_ours(entry))

    def foreign_bytes(self) -> int:
        total = 0
        for entry in os.scandir(self._path):
            if not _is_ours(entry) and entry.name != LOCK:
                total += entry.stat(follow_symlinks=False).st_blocks * BLOCK_BYTES
        return total

    def space(self) -> DiskSpace:
        system = os.statvfs(self._path)
        ours = sum(each.stat(follow_symlinks=False).st_blocks for each in os.scandir(self._path) if _is_ours(each))
        return DiskSpace(
            device=self._path.stat().st_dev,
            total=system.f_blocks * system.f_frsize,
            free=system.f_bavail * system.f_frsize,
            ours=ours * BLOCK_BYTES,
        )

    def open(self, name: str) -> "PosixFile":
        return PosixFile(os.open(self._path / name, self._flags | os.O_NOFOLLOW))

    def create(self, name: str, size_bytes: int) -> "PosixFile":
        file = os.open(self._path / name, self._flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(file, 0, size_bytes)
            return PosixFile(file)
        except BaseException:
            os.close(file)
            self.remove(name)
            raise

    def remove(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


class PosixFile:
    """A `DiskFile` on a POSIX file system."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._size_bytes = os.fstat(file).st_size

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def read(self, into: Sequence[ByteArray], offset: int) -> int:
        total, run = 0, BufferRun(part.data for part in into)
        while run.left:
            count = os.preadv(self._file, run.front(run.left), offset + total)
            total += count
            run.advance(count)
            if not count or count % PAGE_BYTES:  # the end of the file was reached
                break
        return total

    def write(self, parts: Sequence[ByteArray], offset: int) -> None:
        run = BufferRun(part.data for part in parts)
        while run.left:
            count = os.pwritev(self._file, run.front(run.left), offset)
            count -= count % PAGE_BYTES  # a partly written page is written again
            if not count:
                raise OSError(errno.EIO, "nothing was written")
            offset += count
            run.advance(count)

    def sync(self) -> None:
        os.fdatasync(self._file)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def aligned(size_bytes: int) -> ByteArray:
    """Allocate zeroed memory that begins on a page, as direct I/O requires."""
    return np.frombuffer(mmap.mmap(-1, size_bytes), dtype=np.uint8)


def is_aligned(buffer: ByteArray) -> bool:
    """Return whether the buffer begins on a page."""
    address: int = buffer.__array_interface__["data"][0]
    return address % PAGE_BYTES == 0


def _is_ours(entry: "os.DirEntry[str]") -> bool:
    return SEGMENT.fullmatch(entry.name) is not None and entry.is_file(follow_symlinks=False)


def _can_write(path: Path, flags: int) -> bool:
    """Return True if a page can be written to a file opened with these flags, or if the disk is full.

    Return False if the file system does not support the flags.

    Raises:
        OSError: The write failed, and the flags are not the cause.
    """
    page = aligned(PAGE_BYTES)
    probe = path / PROBE
    try:
        file = os.open(probe, flags | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.pwritev(file, [page.data], 0)
            os.preadv(file, [page.data], 0)
        finally:
            os.close(file)
            with contextlib.suppress(OSError):
                probe.unlink()
    except OSError as error:
        if error.errno in NO_SPACE:
            return True  # the disk is full, so the test fails, but existing files can still be used
        if flags and error.errno in NO_DIRECT_IO:
            return False
        raise
    return True
