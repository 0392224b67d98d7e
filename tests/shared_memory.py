"""What is left in /dev/shm, whoever else uses it meanwhile."""

import time
from pathlib import Path

import psutil

FOLDER = Path("/dev/shm")


def abandoned_segments() -> set[str]:
    """Names in /dev/shm that no living process has mapped, so that nobody is going to remove them."""
    names = {path.name for path in FOLDER.iterdir()}
    return names - _mapped()


def nothing_new_is_abandoned(before: set[str], seconds: float = 30.0) -> bool:
    """Whether all that `abandoned_segments` has beyond `before` goes away in time: others map theirs a moment after making it."""
    deadline = time.monotonic() + seconds
    while not abandoned_segments() <= before:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def segments_of(pid: int) -> set[str]:
    """Names in /dev/shm that a process has mapped."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return set()
    return {line.rpartition("/dev/shm/")[2] for line in maps.splitlines() if "/dev/shm/" in line}


def _mapped() -> set[str]:
    return set().union(*map(segments_of, psutil.pids()))
