"""Lock files: each says that a process lives, by a lock (flock) that the kernel releases however the process ends.

A process id may belong to another process later; a lock never does. Locks also work for containers that share a folder,
and over NFS 4. Several processes may share a lock; it is abandoned when the last of them has ended.

A folder with a lock file is removed with the lock file last. So an interrupted removal leaves an abandoned lock file.

Only the standard library is imported, so that the orphan reaper stays small.
"""

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

ALIVE_FILE = "alive"
"""Lock file of a runtime folder, held by its run and by the orphan reaper."""


@contextmanager
def hold_lock_file(path: Path) -> Iterator[None]:
    """Hold a lock file, which is locked before anybody can see it, and remove it at the end.

    Raises:
        OSError: It cannot be made.
    """
    beside = path.with_name(f"{path.name}.new")
    with beside.open("w") as file:  # no child inherits it
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
    """Hold another process's lock file as well, if it exists."""
    with ExitStack() as stack:
        with suppress(OSError):
            fcntl.flock(stack.enter_context(path.open("rb")), fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield


@contextmanager
def take_abandoned(path: Path) -> Iterator[bool]:
    """Yield True if the lock file exists and its holders have ended; then nobody else gets True meanwhile."""
    with ExitStack() as stack:
        try:
            fcntl.flock(stack.enter_context(path.open("rb")), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True


def is_abandoned(path: Path) -> bool:
    """Return True if the lock file exists and its holders have ended."""
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
