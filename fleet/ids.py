"""Names of things, each its own type, so that one cannot be passed for another."""

from typing import NewType

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)
Incarnation = NewType("Incarnation", str)
"""Differs between two starts of the same process; whatever was known of an older one is void."""

ModelName = NewType("ModelName", str)
StoreId = NewType("StoreId", str)
