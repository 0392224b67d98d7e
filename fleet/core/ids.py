"""Names of things, each its own type, so that one cannot be passed for another."""

from collections.abc import Iterable
from typing import NewType

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)
Incarnation = NewType("Incarnation", str)
"""Differs between two starts of the same process; whatever was known of an older one is void."""

ModelName = NewType("ModelName", str)
StoreId = NewType("StoreId", str)


def longest_prefix(worker_id: WorkerId, names: Iterable[str]) -> str | None:
    """Of these names the longest that the worker's begins with: workers are named after their pools. None: none fits."""
    return max((name for name in names if worker_id.startswith(name)), key=len, default=None)
