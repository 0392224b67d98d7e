"""Files that say that a process lives, by a lock (flock) that the kernel takes back however the process ends.

A process number would be somebody else's one day; a lock never is. Locks reach over containers that share a folder, and over NFS since 4.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def held(path: Path) -> Iterator[None]:
    """A file there that this process holds, from before anybody can see it; gone at the end.

    Raises:
        OSError: It cannot be made.
    """
    beside = path.with_name(f"{path.name}.new")
    with beside.open("w") as file:  # no child inherits it
        fcntl.flock(file, fcntl.LOCK_EX)
        beside.rename(path)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def left(path: Path) -> bool:
    """Whether there is such a file, and whoever held it is dead."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
    except OSError:
        return False
