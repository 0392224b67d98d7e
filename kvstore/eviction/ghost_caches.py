"""One shadow evaluation a namespace, of what the pool's hit rate would be at other sizes and under other policies. Pure.

Rules:

1. `MAX_GHOST_CACHES` namespaces are looked at: those that are used most. What is used counts half after a half-life.
2. A namespace takes the place of another only when it is used `TAKES_OVER` times as much: a shadow that begins anew says
   nothing for a while, and two that are used alike must not push each other out.
3. Of at most `MAX_NAMESPACES` it is known how much they are used; the one that was used the longest ago is forgotten first.
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

SCALES = (0.5, 1.0, 2.0, 4.0)  # of the pool, under its own policy
ALTERNATIVES = ("lru", "hazard")  # at its own size
MAX_GHOST_CACHES = 8  # a node has one or two namespaces; with adapters merged into the weights, many
MAX_NAMESPACES = 256
TAKES_OVER = 2.0


class NamespaceEstimates(Struct, frozen=True, kw_only=True):
    """What would be, for one namespace."""

    fingerprint: str
    estimates: tuple[HitRateEstimate, ...]


class _NamespaceUse:
    """One namespace."""

    __slots__ = ("block_bytes", "ghost_cache", "used")

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.ghost_cache: GhostCache[BlockHash] | None = None
        self.used = 0.0  # blocks looked up, those of late counting more


class GhostCaches:
    """By namespace; each is taken to have the whole pool."""

    def __init__(self, capacity_bytes: int, policy: str):
        """Nothing is known yet.

        Args:
            capacity_bytes: Of the pool.
            policy: Of the pool, by name.
        """
        self._capacity_bytes = capacity_bytes
        self._scenarios = [GhostCacheScenario(policy, scale) for scale in SCALES]
        self._scenarios += [GhostCacheScenario(other) for other in ALTERNATIVES if other != policy]
        self._namespaces: OrderedDict[bytes, _NamespaceUse] = OrderedDict()  # the one used last is last
        self._faded_at = Nanos(0)

    def open(self, namespace: KvNamespace) -> None:
        """There is such a namespace; it is looked at at once while there is a place for it."""
        digest = namespace.digest
        if digest in self._namespaces:
            return
        if len(self._namespaces) >= MAX_NAMESPACES:
            self._namespaces.popitem(last=False)
        use = self._namespaces[digest] = _NamespaceUse(namespace.block_bytes)
        if len(self._with_ghost_cache()) < MAX_GHOST_CACHES:
            self._begin(use)

    def looked_up(self, digest: bytes, chain: Sequence[BlockHash], now: Nanos) -> None:
        """A client asked for all of a chain."""
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
        """A client writes what is missing of a chain."""
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
        """Look at this namespace, where there is a place, or it is used so much more than another that has one."""
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
