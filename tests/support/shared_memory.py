"""Shared-memory segments in /dev/shm: finds segments that processes use, and segments that no process uses any more."""

from pathlib import Path

import psutil

FOLDER = Path("/dev/shm")


def abandoned_segments() -> set[str]:
    """Return the names of segments that no living process has mapped, so that no process will remove them."""
    names = {path.name for path in FOLDER.iterdir()}
    return names - _mapped()


def remaining_of(segments: set[str]) -> set[str]:
    """Return the names in `segments` that still exist."""
    return segments & {path.name for path in FOLDER.iterdir()}


def segments_of(pid: int) -> set[str]:
    """Return the names of the segments that a process has mapped."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return set()
    return {line.rpartition("/dev/shm/")[2] for line in maps.splitlines() if "/dev/shm/" in line}


def _mapped() -> set[str]:
    return set().union(*map(segments_of, psutil.pids()))
