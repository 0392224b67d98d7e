"""Protocol of the eviction policies, over keys of any kind: block keys in a pool, numbers in a trace."""

from collections.abc import Hashable
from typing import Protocol, TypeVar

from kvstore.clock import SECOND, Nanos

SAME_USE = Nanos(2 * SECOND)
"""Uses of a block within this time count as one use: one request causes a match, a publication, and another match by the
worker that continues it.
"""

K = TypeVar("K", bound=Hashable)


class EvictionPolicy(Protocol[K]):
    """Says which key goes next. A pool admits published blocks; pinned ones stay admitted while there is enough space."""

    def admit(self, key: K, size_bytes: int, now: Nanos) -> None:
        """Admit a key that was in use until now; again means another use. Chains come from their end on."""

    def withdraw(self, key: K) -> None:
        """Remove an admitted key. Either it is gone, or it is pinned and is admitted again with its last pin."""

    def choose(self) -> K | None:
        """Return the key that goes next, which stays admitted; None if none may go."""

    def __len__(self) -> int: ...

    def __contains__(self, key: K) -> bool: ...
