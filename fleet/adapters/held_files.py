"""Files that say that a process lives, by a lock (flock) that the kernel takes back however the process ends.

A process number would be somebody else's one day; a lock never is. Locks reach over containers that share a folder, and over NFS since 4.
Several may hold one file: it is left when the last of them is dead.

Only the standard library is imported, because the guardian (fleet.adapters.guardian) has to be small.
"""

import fcntl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path


@contextmanager
def held(path: Path) -> Iterator[None]:
    """A file there that this process holds, from before anybody can see it; gone at the end.

    Raises:
        OSError: It cannot be made.
    """
    beside = path.with_name(f"{path.name}.new")
    with beside.open("w") as file:  # no child inherits it
        fcntl.flock(file, fcntl.LOCK_SH)
        beside.rename(path)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


@contextmanager
def held_too(path: Path) -> Iterator[None]:
    """A file that another process holds is held by this one as well; nothing, where it is not there."""
    with ExitStack() as stack:
        with suppress(OSError):
            fcntl.flock(stack.enter_context(path.open("rb")), fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield


@contextmanager
def taken(path: Path) -> Iterator[bool]:
    """Whether there is such a file, and whoever held it is dead; while this is open nobody else is told so."""
    with ExitStack() as stack:
        try:
            fcntl.flock(stack.enter_context(path.open("rb")), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True


def left(path: Path) -> bool:
    """Whether there is such a file, and whoever held it is dead."""
    with taken(path) as dead:
        return dead
