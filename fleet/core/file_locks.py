"""Lock files: show that a process lives, by a lock (flock) that the kernel releases however the process ends.

Unlike a process id, a lock never passes to another process. Locks also work for containers that share a folder, and over
NFS 4. Several processes may share a lock; the lock file is abandoned when the last of them has ended.

When a folder with a lock file is removed, the lock file is removed last. An interrupted removal therefore leaves an
abandoned lock file, by which the folder is found again.

Only the standard library is imported, so that the orphan reaper stays small.
"""

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

ALIVE_FILE = "alive"
"""Name of the lock file of a runtime folder, which the supervisor of the run and the orphan reaper lock."""


@contextmanager
def hold_lock_file(path: Path) -> Iterator[None]:
    """Create a lock file and keep it locked while the context is open, then remove it.

    The file is locked before other processes can see it.

    Raises:
        OSError: The file cannot be created.
    """
    beside = path.with_name(f"{path.name}.new")
    with beside.open("w") as file:  # closed on exec, so child processes do not inherit the lock
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
    """Lock another process's lock file too while the context is open, if it exists."""
    with ExitStack() as stack:
        with suppress(OSError):
            fcntl.flock(stack.enter_context(path.open("rb")), fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield


@contextmanager
def take_abandoned(path: Path) -> Iterator[bool]:
    """Yield True if the lock file exists and the processes that locked it have ended.

    While the context is open, no other process gets True.
    """
    with ExitStack() as stack:
        try:
            fcntl.flock(stack.enter_context(path.open("rb")), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True


def is_abandoned(path: Path) -> bool:
    """Return True if the lock file exists and the processes that locked it have ended."""
    with take_abandoned(path) as dead:
        return dead


def remove_locked_folder(path: Path) -> None:
    """Remove the folder of a lock file, and the lock file last, if nothing else is left."""
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
