"""Identifiers, each of its own type, so that the type checker finds mix-ups."""

from collections.abc import Iterable
from typing import NewType

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)
Incarnation = NewType("Incarnation", str)
"""One run of a process under its name. A restart makes a new incarnation, and what was known of the old one is void."""

ModelName = NewType("ModelName", str)
StoreId = NewType("StoreId", str)


def longest_prefix(worker_id: WorkerId, names: Iterable[str]) -> str | None:
    """Return the longest of the names that is a prefix of the worker's id, or None.

    Workers are named after their pools.
    """
    return max((name for name in names if worker_id.startswith(name)), key=len, default=None)
