"""Eviction policies by name, for settings and for the command line."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from kvstore.eviction.hazard import HazardEviction
from kvstore.eviction.lru import LruEviction
from kvstore.eviction.policy import EvictionPolicy
from kvstore.eviction.s3fifo import S3FifoEviction
from kvstore.eviction.slru import SlruEviction

PolicyName = Literal["lru", "s3fifo", "slru", "hazard"]
"""Names of the policies, as settings have them."""

POLICIES: Mapping[str, Callable[[], EvictionPolicy[Any]]] = {  # Any: keys of any kind
    "lru": LruEviction,
    "s3fifo": S3FifoEviction,
    "slru": SlruEviction,
    "hazard": HazardEviction,
}


def policy(name: str, saving: Callable[[Any, int], float] | None = None) -> EvictionPolicy[Any]:
    """Make a policy by its name; raise ValueError, which lists the names, if it is unknown.

    `saving` gives the seconds per byte that a use of a block saves; see `HazardEviction`.
    """
    make = POLICIES.get(name)
    if make is None:
        raise ValueError(f"eviction policy {name!r} is not one of {', '.join(POLICIES)}")
    return HazardEviction(saving) if make is HazardEviction else make()
