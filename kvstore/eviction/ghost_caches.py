"""Ghost caches of the most used namespaces of a node. Pure.

Rules:

1. The `MAX_GHOST_CACHES` most used namespaces have a ghost cache. Uses lose half of their weight after a half-life.
2. A namespace replaces another one only if it is used `TAKES_OVER` times as much. A new ghost cache has no result for a
   while, and two equally used namespaces must not displace each other.
3. The uses of at most `MAX_NAMESPACES` are remembered; the longest unused one is forgotten first.
"""

from collections import OrderedDict
from collections.abc import Sequence

from msgspec import Struct

from kvstore.block import BlockHash
from kvstore.clock import Nanos
from kvstore.eviction.ghost_cache import (
    FADE_EVERY,
    HALF_LIFE,
    GhostCache,
    GhostCacheScenario,
    HitRateEstimate,
    sample_names,
)
from kvstore.namespace import KvNamespace

SCALES = (0.5, 1.0, 2.0, 4.0)  # sizes relative to the pool, under its own policy
ALTERNATIVES = ("lru", "hazard")  # policies at the pool's size
MAX_GHOST_CACHES = 8  # a node has one or two namespaces; with adapters merged into the weights, many
MAX_NAMESPACES = 256
TAKES_OVER = 2.0


class NamespaceEstimates(Struct, frozen=True, kw_only=True):
    """Estimated hit rates of one namespace."""

    fingerprint: str
    estimates: tuple[HitRateEstimate, ...]


class _NamespaceUse:
    """Use of one namespace, and its ghost cache if it has one."""

    __slots__ = ("block_bytes", "ghost_cache", "used")

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.ghost_cache: GhostCache[BlockHash] | None = None
        self.used = 0.0  # looked-up blocks, with more weight for recent ones


class GhostCaches:
    """Ghost caches by namespace; each assumes that its namespace has the whole pool."""

    def __init__(self, capacity_bytes: int, policy: str):
        self._capacity_bytes = capacity_bytes
        self._scenarios = [GhostCacheScenario(policy, scale) for scale in SCALES]
        self._scenarios += [GhostCacheScenario(other) for other in ALTERNATIVES if other != policy]
        self._namespaces: OrderedDict[bytes, _NamespaceUse] = OrderedDict()  # the last used one is last
        self._faded_at = Nanos(0)

    def open(self, namespace: KvNamespace) -> None:
        """Record a new namespace, which gets a ghost cache at once while there are fewer than the limit."""
        digest = namespace.digest
        if digest in self._namespaces:
            return
        if len(self._namespaces) >= MAX_NAMESPACES:
            self._namespaces.popitem(last=False)
        use = self._namespaces[digest] = _NamespaceUse(namespace.block_bytes)
        if len(self._with_ghost_cache()) < MAX_GHOST_CACHES:
            self._begin(use)

    def looked_up(self, digest: bytes, chain: Sequence[BlockHash], now: Nanos) -> None:
        """Record that a client asked for a chain; pass all of it."""
        if (use := self._namespaces.get(digest)) is None:
            return
        self._fade(now)
        self._namespaces.move_to_end(digest)
        use.used += len(chain)
        if use.ghost_cache is None:
            self._take_over(use)
        if use.ghost_cache is not None:
            use.ghost_cache.looked_up(chain, now)

    def stored(self, digest: bytes, chain: Sequence[BlockHash], now: Nanos) -> None:
        """Record that a client writes the missing blocks of a chain."""
        use = self._namespaces.get(digest)
        if use is not None and use.ghost_cache is not None:
            use.ghost_cache.stored(chain, now)

    def estimates(self) -> tuple[NamespaceEstimates, ...]:
        return tuple(
            NamespaceEstimates(fingerprint=digest.hex(), estimates=tuple(use.ghost_cache.estimates()))
            for digest, use in self._namespaces.items()
            if use.ghost_cache is not None
        )

    def _take_over(self, use: _NamespaceUse) -> None:
        """Give this namespace a ghost cache if one is free, or if another namespace is used much less."""
        simulated = self._with_ghost_cache()
        if len(simulated) >= MAX_GHOST_CACHES:
            least = min(simulated, key=lambda other: other.used)
            if use.used < TAKES_OVER * least.used:
                return
            least.ghost_cache = None
        self._begin(use)

    def _begin(self, use: _NamespaceUse) -> None:
        blocks = max(1, self._capacity_bytes // use.block_bytes)
        use.ghost_cache = GhostCache(blocks, self._scenarios, sample_names)

    def _with_ghost_cache(self) -> list[_NamespaceUse]:
        return [use for use in self._namespaces.values() if use.ghost_cache is not None]

    def _fade(self, now: Nanos) -> None:
        if now < self._faded_at + FADE_EVERY:
            return
        kept = 0.5 ** ((now - self._faded_at) / HALF_LIFE)
        self._faded_at = now
        for use in self._namespaces.values():
            use.used *= kept
