"""Identifiers: each kind has its own type, so that the type checker finds ids of a wrong kind."""

from collections.abc import Iterable
from typing import NewType

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)
Incarnation = NewType("Incarnation", str)
"""One run of a process under its name. A restart makes a new incarnation, and all knowledge about the old one is void."""

ModelName = NewType("ModelName", str)
StoreId = NewType("StoreId", str)


def longest_prefix(worker_id: WorkerId, names: Iterable[str]) -> str | None:
    """Return the longest of the names that is a prefix of the worker's id; None if there is none.

    Workers are named after their pools, so this finds a worker's pool.
    """
    return max((name for name in names if worker_id.startswith(name)), key=len, default=None)
