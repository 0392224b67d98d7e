"""Eviction policies by name: makes the policy that the settings or the command line name."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from kvstore.eviction.hazard import HazardEviction
from kvstore.eviction.lru import LruEviction
from kvstore.eviction.policy import EvictionPolicy
from kvstore.eviction.s3fifo import S3FifoEviction
from kvstore.eviction.slru import SlruEviction

PolicyName = Literal["lru", "s3fifo", "slru", "hazard"]
"""The valid names of eviction policies in settings."""

# The policies are EvictionPolicy[Any], because their keys may have any hashable type.
POLICIES: Mapping[str, Callable[[], EvictionPolicy[Any]]] = {
    "lru": LruEviction,
    "s3fifo": S3FifoEviction,
    "slru": SlruEviction,
    "hazard": HazardEviction,
}


def policy(name: str, saving: Callable[[Any, int], float] | None = None) -> EvictionPolicy[Any]:
    """Make a policy by its name. Raise ValueError for an unknown name; the message lists the known names.

    `saving` gets a block's key and size in bytes, and returns the seconds per byte that a use of the block saves. Only
    `HazardEviction` uses it.
    """
    make = POLICIES.get(name)
    if make is None:
        raise ValueError(f"eviction policy {name!r} is not one of {', '.join(POLICIES)}")
    return HazardEviction(saving) if make is HazardEviction else make()
