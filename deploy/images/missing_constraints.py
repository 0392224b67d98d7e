"""Which locked versions count beside what an image already has: `python missing_constraints.py LOCK…` prints constraints.

A package that is installed here stays as it is, whatever the lock says; every other one has the locked version.
"""

import re
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import distributions
from pathlib import Path


def beside(lock: Iterable[str], installed: Iterable[str]) -> Iterator[str]:
    """Lines of a lock about packages that are not installed.

    Args:
        lock: Lines such as ``redis==8.1.0``; others are passed over.
        installed: Names of packages, however they are spelt.
    """
    there = {_plain(name) for name in installed}
    for line in lock:
        name, exactly, _ = line.strip().partition("==")
        if exactly and not name.startswith("#") and _plain(name) not in there:
            yield line.strip()


def _plain(name: str) -> str:
    """Return a name in the form in which the Python packaging specifications compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    locked = [line for path in sys.argv[1:] for line in Path(path).read_text().splitlines()]
    sys.stdout.writelines(f"{line}\n" for line in beside(locked, (each.name for each in distributions())))
