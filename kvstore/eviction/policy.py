"""What every policy here is: `kvstore.ports.Eviction`, over keys of any kind, so that a trace's numbers serve as well as names."""

from collections.abc import Hashable
from typing import Protocol, TypeVar

from kvstore.clock import SECOND, Nanos

SAME_USE = Nanos(2 * SECOND)
"""Uses of a block that are no further apart are one use to policies that count: to the store, a request is a match, a
publication, and another match by the worker that continues it."""

K = TypeVar("K", bound=Hashable)


class EvictionPolicy(Protocol[K]):
    """See `Eviction`: admitted again means used again, chains come tail first, and what is chosen stays admitted."""

    def admit(self, key: K, size_bytes: int, now: Nanos) -> None: ...

    def withdraw(self, key: K) -> None: ...

    def choose(self) -> K | None: ...

    def __len__(self) -> int: ...

    def __contains__(self, key: K) -> bool: ...
