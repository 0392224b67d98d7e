"""Ghost cache: estimates the pool's hit rate at other sizes and under other policies, from a sample of live traffic.

Rules:

1. Blocks are sampled by their hash. For a given sampled share, a block is always in the sample or never, on each node
   and after each start (Waldspurger, Park, Garthwaite and Ahmad, "SHARDS", FAST 2015). A cache that sees only a share
   of the blocks, and has the same share of the capacity, has about the same hit rate as the whole cache.
2. Blocks are sampled, not chains. Chains share their beginnings, so if chains were sampled by their first block, all
   conversations with one system prompt would be in the sample, or none. The sampled blocks of a chain count as a chain
   in the simulation.
3. The sampled share is chosen so that about `sampled_blocks` blocks of a full pool are in the sample, whatever the
   capacity of the pool. The memory of a ghost cache therefore does not grow with the pool.
4. The sampled share predicts how many of the looked-up blocks are in the sample. If fewer are in the sample, it lacks
   some blocks that most requests use. Such blocks are usually hits, so the difference is added to the hits. If more are
   in the sample, the difference is subtracted from the hits.
5. Observations lose half of their weight after a half-life.
6. At most `MAX_GHOST_CACHES` namespaces of a node have a ghost cache. If another namespace is used much more than the
   least used of these, it gets a ghost cache, and the least used one loses its ghost cache (rule 7).
7. "Much more" is at least `TAKES_OVER` times as much. A new ghost cache has no result for a while, so two equally used
   namespaces must not replace each other again and again.
8. The uses of at most `MAX_NAMESPACES` namespaces are remembered; the longest unused one is forgotten first.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic

from msgspec import Struct

from kvstore.block import BlockHash
from kvstore.clock import SECOND, Nanos
from kvstore.eviction.policies import policy
from kvstore.eviction.policy import EvictionPolicy, K
from kvstore.namespace import KvNamespace

SAMPLED_BLOCKS = 4096
HALF_LIFE = Nanos(3600 * SECOND)
FADE_EVERY = Nanos(60 * SECOND)

SCALES = (0.5, 1.0, 2.0, 4.0)  # sizes that are simulated with the pool's own policy, as multiples of the pool's size
ALTERNATIVES = ("lru", "hazard")  # other policies that are simulated with the pool's own size
MAX_GHOST_CACHES = 8
"""Maximum number of namespaces with a ghost cache; there are no estimates for the others. Most nodes have one or two
namespaces; nodes with adapters that are merged into the weights have many."""
MAX_NAMESPACES = 256
TAKES_OVER = 2.0

Sample = Callable[[Sequence[K], float], list[K]]
"""Function that returns the sampled blocks of a chain; its second argument is the sampled share of all blocks, from 0
to 1."""


class GhostCacheScenario(Struct, frozen=True):
    """The eviction policy and the cache size of one simulation."""

    policy: str  # name of the policy, as in `kvstore.eviction.policies`
    scale: float = 1.0  # capacity of the simulated pool, divided by the capacity of the live pool


class HitRateEstimate(Struct, frozen=True, kw_only=True):
    """Estimated hit rate of one scenario."""

    policy: str
    scale: float
    # Share of the looked-up blocks that would be hits: the cache has the block and all blocks before it in its chain.
    hit_rate: float


class _SampledCache(Generic[K]):
    """Simulates one scenario for the blocks in the sample (rule 1). It stores the keys of blocks, but not their bytes."""

    def __init__(self, rule: EvictionPolicy[K], capacity_blocks: int):
        self._policy = rule
        self._capacity = capacity_blocks
        self.held: set[K] = set()
        self.hits = 0.0

    def look(self, chain: Sequence[K], now: Nanos) -> None:
        held = 0
        for key in chain:
            if key not in self.held:
                break
            held += 1
        self.hits += held
        for key in reversed(chain[:held]):
            self._policy.admit(key, 1, now)

    def store(self, chain: Sequence[K], now: Nanos) -> None:
        new = [key for key in chain if key not in self.held]
        missing = len(self.held) + len(new) - self._capacity
        if missing > 0:
            own = set(chain)
            while missing > 0 and (victim := self._policy.choose()) is not None:
                self._policy.withdraw(victim)
                if victim not in own:
                    self.held.remove(victim)
                    missing -= 1
            if missing > 0:
                del new[-missing:]
        self.held.update(new)
        for key in reversed(chain):
            if key in self.held:
                self._policy.admit(key, 1, now)


class GhostCache(Generic[K]):
    """Simulates all scenarios for one namespace.

    The caller reports to this object each chain that a client looks up in the live pool or writes to it.
    """

    def __init__(
        self,
        capacity_blocks: int,
        scenarios: Sequence[GhostCacheScenario],
        sample: Sample[K],
        *,
        sampled_blocks: int = SAMPLED_BLOCKS,
        half_life: Nanos = HALF_LIFE,
    ):
        """Start without observations.

        Args:
            capacity_blocks: Capacity of the live pool, in blocks of the namespace's size.
            scenarios: Scenarios to simulate.
            sample: Function that samples blocks by their hash, such as `sample_names`.
            sampled_blocks: Number of blocks of a full live pool that are in the sample (rule 3).
            half_life: Half-life of the observations (rule 5).

        Raises:
            ValueError: A scenario's policy is unknown, or its scale is not positive.
        """
        assert capacity_blocks > 0, capacity_blocks
        self.share = min(1.0, sampled_blocks / capacity_blocks)
        self._sample = sample
        self._half_life = half_life
        self.caches: Mapping[GhostCacheScenario, _SampledCache[K]] = {
            scenario: _SampledCache(_policy(scenario), max(1, round(capacity_blocks * self.share * scenario.scale)))
            for scenario in scenarios
        }
        # Number of looked-up blocks in the sample, and the number that the sampled share predicts (rule 4). Older
        # look-ups have less weight in both (rule 5).
        self._looked_up = self._expected = 0.0
        self._faded_at = Nanos(0)

    def looked_up(self, chain: Sequence[K], now: Nanos) -> None:
        """Record that a client looked up a chain. `chain` has all blocks of this chain, not only those found."""
        if now >= self._faded_at + FADE_EVERY:
            self._fade(now)
        sampled = self._sample(chain, self.share)
        self._looked_up += len(sampled)
        self._expected += len(chain) * self.share
        if sampled:
            for cache in self.caches.values():
                cache.look(sampled, now)

    def stored(self, chain: Sequence[K], now: Nanos) -> None:
        """Record that a client writes the missing blocks of a chain.

        Pass the whole chain, not only the missing blocks.
        """
        sampled = self._sample(chain, self.share)
        if sampled:
            for cache in self.caches.values():
                cache.store(sampled, now)

    def estimates(self) -> list[HitRateEstimate]:
        """Return the estimated hit rates in the order of the scenarios; all are 0 before the first look-up."""
        # Number of looked-up blocks that the sample lacks; negative if the sample has too many (rule 4).
        unseen = self._expected - self._looked_up
        return [
            HitRateEstimate(
                policy=scenario.policy,
                scale=scenario.scale,
                hit_rate=min(1.0, max(0.0, (cache.hits + unseen) / self._expected)) if self._expected else 0.0,
            )
            for scenario, cache in self.caches.items()
        ]

    def _fade(self, now: Nanos) -> None:
        kept = 0.5 ** ((now - self._faded_at) / self._half_life)
        self._faded_at = now
        self._looked_up *= kept
        self._expected *= kept
        for cache in self.caches.values():
            cache.hits *= kept


class NamespaceEstimates(Struct, frozen=True, kw_only=True):
    """Estimated hit rates of one namespace."""

    fingerprint: str
    estimates: tuple[HitRateEstimate, ...]


class _NamespaceUse:
    """Counts the use of one namespace, and holds its ghost cache if it has one (rule 6)."""

    __slots__ = ("block_bytes", "ghost_cache", "used")

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.ghost_cache: GhostCache[BlockHash] | None = None
        self.used = 0.0  # number of looked-up blocks; each look-up loses half of its weight in `HALF_LIFE`


class GhostCaches:
    """Holds the ghost caches of a node's most used namespaces.

    Each ghost cache simulates a pool that contains only the blocks of its namespace.
    """

    def __init__(self, capacity_bytes: int, policy: str):
        self._capacity_bytes = capacity_bytes
        self._scenarios = [GhostCacheScenario(policy, scale) for scale in SCALES]
        self._scenarios += [GhostCacheScenario(other) for other in ALTERNATIVES if other != policy]
        # Use of each namespace, by namespace digest. The namespace that was used last is at the end.
        self.namespaces: OrderedDict[bytes, _NamespaceUse] = OrderedDict()
        self._faded_at = Nanos(0)

    def open(self, namespace: KvNamespace) -> None:
        """Record a new namespace. It gets a ghost cache at once if fewer than `MAX_GHOST_CACHES` exist."""
        digest = namespace.digest
        if digest in self.namespaces:
            return
        if len(self.namespaces) >= MAX_NAMESPACES:
            self.namespaces.popitem(last=False)
        use = self.namespaces[digest] = _NamespaceUse(namespace.block_bytes)
        if len(self._with_ghost_cache()) < MAX_GHOST_CACHES:
            self._begin(use)

    def looked_up(self, digest: bytes, chain: Sequence[BlockHash], now: Nanos) -> None:
        """Record that a client looked up a chain; `chain` has all its blocks, not only those found."""
        if (use := self.namespaces.get(digest)) is None:
            return
        self._fade(now)
        self.namespaces.move_to_end(digest)
        use.used += len(chain)
        if use.ghost_cache is None:
            self._take_over(use)
        if use.ghost_cache is not None:
            use.ghost_cache.looked_up(chain, now)

    def stored(self, digest: bytes, chain: Sequence[BlockHash], now: Nanos) -> None:
        """Record that a client writes the missing blocks of a chain; `chain` is the whole chain."""
        use = self.namespaces.get(digest)
        if use is not None and use.ghost_cache is not None:
            use.ghost_cache.stored(chain, now)

    def estimates(self) -> tuple[NamespaceEstimates, ...]:
        return tuple(
            NamespaceEstimates(fingerprint=digest.hex(), estimates=tuple(use.ghost_cache.estimates()))
            for digest, use in self.namespaces.items()
            if use.ghost_cache is not None
        )

    def _take_over(self, use: _NamespaceUse) -> None:
        """Give this namespace a new ghost cache if there are fewer than `MAX_GHOST_CACHES`.

        If there are as many, end the ghost cache of the least used namespace first; do nothing if rule 7 forbids this.
        """
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
        return [use for use in self.namespaces.values() if use.ghost_cache is not None]

    def _fade(self, now: Nanos) -> None:
        if now < self._faded_at + FADE_EVERY:
            return
        kept = 0.5 ** ((now - self._faded_at) / HALF_LIFE)
        self._faded_at = now
        for use in self.namespaces.values():
            use.used *= kept


def sample_names(names: Sequence[BlockHash], share: float) -> list[BlockHash]:
    """Return the blocks that are in the sample; `share` is the sampled share of all blocks (rule 1).

    The first two bytes of a block's hash decide whether the block is in the sample.
    """
    below = round(share * 65_536)
    return [name for name in names if name[0] << 8 | name[1] < below]


def _policy(scenario: GhostCacheScenario) -> EvictionPolicy[Any]:
    if not scenario.scale > 0:
        raise ValueError(f"ghost cache {scenario.policy!r}: scale {scenario.scale} is not positive")
    return policy(scenario.policy)
