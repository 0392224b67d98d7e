"""Protocol of the eviction policies, which decide what is evicted next.

`kvstore.pool.allocator` asks the policy which block to evict, and `kvstore.eviction.policies` makes the policy that the
settings name. The keys of a policy may have any type: block keys in a pool, numbers in a trace.
"""

from collections.abc import Hashable
from typing import Protocol, TypeVar

from kvstore.clock import SECOND, Nanos

SAME_USE = Nanos(2 * SECOND)
"""Uses of a block within this time count as one use, because one request causes several uses: a match, a publication,
and another match by the worker that continues the request."""

K = TypeVar("K", bound=Hashable)


class EvictionPolicy(Protocol[K]):
    """Chooses the key to evict next.

    A pool admits published blocks. A pinned block stays admitted; the pool withdraws it only if the policy chooses it.
    """

    def admit(self, key: K, size_bytes: int, now: Nanos) -> None:
        """Add a key whose block was in use until `now`. If the key is admitted already, record another use.

        The caller adds the blocks of a chain in reverse order, beginning with its last block.
        """

    def withdraw(self, key: K) -> None:
        """Remove a key, because its block is evicted, was found wrong, or is pinned.

        A pinned block is admitted again when a use of it or its last pin ends.
        """

    def choose(self) -> K | None:
        """Return the key of the block to evict next; the key stays admitted until `withdraw`.

        Return None if no key is admitted.
        """

    def __len__(self) -> int: ...

    def __contains__(self, key: K) -> bool: ...
