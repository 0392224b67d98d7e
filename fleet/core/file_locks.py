"""Files that say that a process lives, by a lock (flock) that the kernel takes back however the process ends.

A process number would be somebody else's one day; a lock never is. Locks reach over containers that share a folder, and over NFS since 4.
Several may hold one file: it is left when the last of them is dead.

A folder with such a file in it is removed around it: whatever is killed in the midst of that leaves a file that nobody holds.

Only the standard library is imported, because the guardian (fleet.local.orphan_reaper) has to be small.
"""

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

ALIVE_FILE = "alive"
"""In a runtime folder of this machine: held by its run, and by the guardian."""


@contextmanager
def hold_lock_file(path: Path) -> Iterator[None]:
    """A file there that this process holds, from before anybody can see it; gone at the end.

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
    """A file that another process holds is held by this one as well; nothing, where it is not there."""
    with ExitStack() as stack:
        with suppress(OSError):
            fcntl.flock(stack.enter_context(path.open("rb")), fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield


@contextmanager
def take_abandoned(path: Path) -> Iterator[bool]:
    """Whether there is such a file, and whoever held it is dead; while this is open nobody else is told so."""
    with ExitStack() as stack:
        try:
            fcntl.flock(stack.enter_context(path.open("rb")), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True


def is_abandoned(path: Path) -> bool:
    """Whether there is such a file, and whoever held it is dead."""
    with take_abandoned(path) as dead:
        return dead


def remove_locked_folder(path: Path) -> None:
    """Remove the folder that a held file is in; the file last of all, and only if nothing else is left."""
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
