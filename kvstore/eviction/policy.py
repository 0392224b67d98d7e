"""Protocol of the eviction policies. Their keys may have any type: block keys in a pool, numbers in a trace."""

from collections.abc import Hashable
from typing import Protocol, TypeVar

from kvstore.clock import SECOND, Nanos

SAME_USE = Nanos(2 * SECOND)
"""Uses of a block within this time count as one use. One request causes several: a match, a publication, and another
match by the worker that continues the request."""

K = TypeVar("K", bound=Hashable)


class EvictionPolicy(Protocol[K]):
    """Chooses the key to evict next.

    A pool admits published blocks. A pinned block stays admitted until the policy chooses it and the pool withdraws it.
    """

    def admit(self, key: K, size_bytes: int, now: Nanos) -> None:
        """Admit a key that was in use until `now`; admitting it again records another use.

        Pass a chain from its end on.
        """

    def withdraw(self, key: K) -> None:
        """Remove an admitted key: it is evicted, or it is pinned and will be admitted again when its last pin ends."""

    def choose(self) -> K | None:
        """Return the key to evict next, but keep it admitted; None if no key is admitted."""

    def __len__(self) -> int: ...

    def __contains__(self, key: K) -> bool: ...
