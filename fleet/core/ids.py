"""Identifiers: define a type for each kind of id, so that the type checker finds ids of a wrong kind."""

from collections.abc import Iterable
from typing import NewType

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)
Incarnation = NewType("Incarnation", str)
"""Id of one run of a process. After a restart, the process has another incarnation, and what was known about the old
one is not valid any more."""

ModelName = NewType("ModelName", str)
StoreId = NewType("StoreId", str)


def longest_prefix(worker_id: WorkerId, names: Iterable[str]) -> str | None:
    """Return the longest name with which the id of a worker begins, or None if it begins with none of the names.

    The id of a worker begins with the name of its pool. If `names` are the names of all pools, the result is the worker's pool.
    """
    return max((name for name in names if worker_id.startswith(name)), key=len, default=None)
