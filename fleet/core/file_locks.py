"""Lock files: show that a process runs, by a lock (flock) that the kernel releases when the process ends.

A lock is better than a process id, because another process may get the same id later. Locks also work between
containers that share a folder, and over NFS 4. Several processes may share a lock. A lock file is called abandoned if
it exists and no process holds its lock, because all processes that locked it have ended.

When a folder with a lock file is removed, the lock file is removed last. So if the removal is interrupted, the
abandoned lock file stays, and the rest of the folder can still be found and removed.

This module imports only the standard library, so that the orphan reaper, which uses it, needs little memory.
"""

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

ALIVE_FILE = "alive"
"""Name of the lock file of a runtime folder. The supervisor of the local run and the orphan reaper lock it."""


@contextmanager
def hold_lock_file(path: Path) -> Iterator[None]:
    """Create a lock file and hold its lock while the context is open; remove the file at the end.

    The file is locked before it appears at `path`, so no other process finds it without a lock.

    Raises:
        OSError: The file cannot be created, locked or renamed to `path`.
    """
    beside = path.with_name(f"{path.name}.new")
    with beside.open("w") as file:  # closed on exec, so programs that this process starts do not keep the lock
        try:
            fcntl.flock(file, fcntl.LOCK_SH)
            beside.rename(path)
        except OSError:
            beside.unlink()
            raise
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


@contextmanager
def share_lock_file(path: Path) -> Iterator[None]:
    """Share the lock of another process's lock file while the context is open.

    If the file cannot be opened, or another process holds the lock by `take_abandoned`, the context opens without the lock.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            fcntl.flock(stack.enter_context(path.open("rb")), fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield


@contextmanager
def take_abandoned(path: Path) -> Iterator[bool]:
    """Try to lock a lock file; yield True if it was abandoned, and False if it is locked or cannot be opened.

    After True, no other process gets True while the context is open.
    """
    with ExitStack() as stack:
        try:
            fcntl.flock(stack.enter_context(path.open("rb")), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True


def is_abandoned(path: Path) -> bool:
    """Return True if a lock file is abandoned, and False if it is locked or cannot be opened."""
    with take_abandoned(path) as dead:
        return dead


def remove_locked_folder(path: Path) -> None:
    """Remove the folder that contains the lock file `path`, with its content.

    The lock file is removed last. If something else in the folder cannot be removed, the lock file and the folder stay.
    """
    with suppress(OSError):
        for each in path.parent.iterdir():
            if each.is_dir() and not each.is_symlink():
                shutil.rmtree(each, ignore_errors=True)
            elif each != path:
                with suppress(OSError):
                    each.unlink()
        if set(path.parent.iterdir()) <= {path}:
            path.unlink(missing_ok=True)
            path.parent.rmdir()
