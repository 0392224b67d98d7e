"""Ghost cache: the pool's hit rate at other sizes or under other policies, from a sample of the live traffic.

Rules:

1. Blocks are sampled by their hash. A block is either always in the sample or never, on each node and after each start
   (Waldspurger, Park, Garthwaite and Ahmad, "SHARDS", FAST 2015). A cache for a share of the blocks behaves like the
   whole cache with the same share of its capacity.
2. Blocks are sampled, not chains. Chains share their beginnings, so one system prompt would decide whether a whole
   conversation is in the sample. The sampled blocks of a chain form a chain again.
3. The share puts about `sampled_blocks` of the live capacity into the sample, whatever the capacity. This and the
   largest scale bound the memory.
4. If fewer look-ups fall into the sample than its share predicts, it lacks a few blocks that everybody uses: the
   difference counts as hits. If more do, the difference is subtracted from the hits.
5. Observations lose half of their weight after a half-life.
6. The `MAX_GHOST_CACHES` most used namespaces of a node have a ghost cache.
7. A namespace replaces another one only if it is used `TAKES_OVER` times as much. A new ghost cache has no result for a
   while, and two equally used namespaces must not displace each other.
8. The uses of at most `MAX_NAMESPACES` are remembered; the longest unused one is forgotten first.
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

SCALES = (0.5, 1.0, 2.0, 4.0)  # sizes relative to the pool, under its own policy
ALTERNATIVES = ("lru", "hazard")  # policies at the pool's size
MAX_GHOST_CACHES = 8  # a node has one or two namespaces; with adapters merged into the weights, many
MAX_NAMESPACES = 256
TAKES_OVER = 2.0

Sample = Callable[[Sequence[K], float], list[K]]
"""Returns the sampled blocks of a chain, for a share from 0 to 1."""


class GhostCacheScenario(Struct, frozen=True):
    """Policy and size to simulate."""

    policy: str  # name of the policy
    scale: float = 1.0  # capacity relative to the live pool


class HitRateEstimate(Struct, frozen=True, kw_only=True):
    """Result for one scenario."""

    policy: str
    scale: float
    hit_rate: float  # share of the looked-up blocks that would be found without a gap from the start of their chain


class _SampledCache(Generic[K]):
    """Simulation of one scenario, with keys only."""

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
    """Simulations of one namespace. It is told of the same look-ups and publications as the live pool."""

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
            capacity_blocks: Capacity of the live pool, in blocks of the usual size.
            scenarios: Scenarios to simulate.
            sample: Samples blocks by their hash, such as `sample_names`.
            sampled_blocks: Blocks of the live capacity that are in the sample.
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
        self._looked_up = self._expected = 0.0  # look-ups in the sample; look-ups that its share predicts
        self._faded_at = Nanos(0)

    def looked_up(self, chain: Sequence[K], now: Nanos) -> None:
        """Record that a client asked for a chain; pass all of it, not only the blocks that were found."""
        if now >= self._faded_at + FADE_EVERY:
            self._fade(now)
        sampled = self._sample(chain, self.share)
        self._looked_up += len(sampled)
        self._expected += len(chain) * self.share
        if sampled:
            for cache in self.caches.values():
                cache.look(sampled, now)

    def stored(self, chain: Sequence[K], now: Nanos) -> None:
        """Record that a client published the missing blocks of a chain; pass all of it, not only the new blocks."""
        sampled = self._sample(chain, self.share)
        if sampled:
            for cache in self.caches.values():
                cache.store(sampled, now)

    def estimates(self) -> list[HitRateEstimate]:
        """Return the hit rates in the order of the scenarios; 0 before the first look-up."""
        unseen = self._expected - self._looked_up  # rule 4
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
        self.namespaces: OrderedDict[bytes, _NamespaceUse] = OrderedDict()  # the last used one is last
        self._faded_at = Nanos(0)

    def open(self, namespace: KvNamespace) -> None:
        """Record a new namespace, which gets a ghost cache at once while there are fewer than the limit."""
        digest = namespace.digest
        if digest in self.namespaces:
            return
        if len(self.namespaces) >= MAX_NAMESPACES:
            self.namespaces.popitem(last=False)
        use = self.namespaces[digest] = _NamespaceUse(namespace.block_bytes)
        if len(self._with_ghost_cache()) < MAX_GHOST_CACHES:
            self._begin(use)

    def looked_up(self, digest: bytes, chain: Sequence[BlockHash], now: Nanos) -> None:
        """Record that a client asked for a chain; pass all of it."""
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
        """Record that a client writes the missing blocks of a chain."""
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
        return [use for use in self.namespaces.values() if use.ghost_cache is not None]

    def _fade(self, now: Nanos) -> None:
        if now < self._faded_at + FADE_EVERY:
            return
        kept = 0.5 ** ((now - self._faded_at) / HALF_LIFE)
        self._faded_at = now
        for use in self.namespaces.values():
            use.used *= kept


def sample_names(names: Sequence[BlockHash], share: float) -> list[BlockHash]:
    """Sample by the first two bytes of a block hash."""
    below = round(share * 65_536)
    return [name for name in names if name[0] << 8 | name[1] < below]


def _policy(scenario: GhostCacheScenario) -> EvictionPolicy[Any]:
    if not scenario.scale > 0:
        raise ValueError(f"ghost cache {scenario.policy!r}: scale {scenario.scale} is not positive")
    return policy(scenario.policy)
