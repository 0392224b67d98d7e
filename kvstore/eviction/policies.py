"""The eviction policies by name, for settings and for the command line."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from kvstore.eviction.hazard import HazardEviction
from kvstore.eviction.lru import LruEviction
from kvstore.eviction.policy import EvictionPolicy
from kvstore.eviction.s3fifo import S3FifoEviction
from kvstore.eviction.slru import SlruEviction

PolicyName = Literal["lru", "s3fifo", "slru", "hazard"]
"""Of those below, as settings name them."""

POLICIES: Mapping[str, Callable[[], EvictionPolicy[Any]]] = {  # Any: keys of whatever kind the caller has
    "lru": LruEviction,
    "s3fifo": S3FifoEviction,
    "slru": SlruEviction,
    "hazard": HazardEviction,
}


def policy(name: str, saving: Callable[[Any, int], float] | None = None) -> EvictionPolicy[Any]:
    """A new policy of that name.

    Args:
        name: As settings have it.
        saving: What a use of a block saves, for the policy that goes by it; see `HazardEviction`.

    Raises:
        ValueError: There is none; the message lists those that there are.
    """
    make = POLICIES.get(name)
    if make is None:
        raise ValueError(f"eviction policy {name!r} is not one of {', '.join(POLICIES)}")
    return HazardEviction(saving) if make is HazardEviction else make()
