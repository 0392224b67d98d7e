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
    """Says which key goes next, as `kvstore.ports.Eviction` does for block keys.

    A key that is admitted again was used again. Chains are admitted from their end on. A chosen key stays admitted
    until it is withdrawn.
    """

    def admit(self, key: K, size_bytes: int, now: Nanos) -> None: ...

    def withdraw(self, key: K) -> None: ...

    def choose(self) -> K | None: ...

    def __len__(self) -> int: ...

    def __contains__(self, key: K) -> bool: ...
