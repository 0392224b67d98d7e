"""What the hit rate would be at another size, or under another policy, measured on a sample of the live traffic. Pure.

Rules:

1. Blocks are sampled by name, so that a block is either always looked at or never, on every node and after every start
   (Waldspurger, Park, Garthwaite and Ahmad, "SHARDS", FAST 2015). A cache of a share of the blocks behaves like the whole
   with the same share of its capacity.
2. Not chains are sampled, but their blocks: chains share their beginnings, and a whole conversation would be in the
   sample or out of it because of one system prompt. What is sampled of a chain is again a chain.
3. The share is chosen such that about `sampled_blocks` of the live capacity are in the sample, whatever the capacity;
   that, and the largest scale asked for, bounds the memory.
4. When fewer lookups fell into the sample than its share promises, a few blocks that everybody uses are missing in it:
   the difference counts as hits, and as misses of hits the other way round.
5. What happened counts half after a half-life.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic

from msgspec import Struct

from kvstore.block import BlockHash
from kvstore.clock import SECOND, Nanos
from kvstore.eviction.policies import policy
from kvstore.eviction.policy import EvictionPolicy, K

SAMPLED_BLOCKS = 4096
HALF_LIFE = Nanos(3600 * SECOND)
FADE_EVERY = Nanos(60 * SECOND)

Sample = Callable[[Sequence[K], float], list[K]]
"""Of a chain and a share from 0 to 1: those of its blocks that are in the sample."""


class GhostCacheScenario(Struct, frozen=True):
    """What to ask for."""

    policy: str  # by name
    scale: float = 1.0  # capacity, in capacities of the live tier


class HitRateEstimate(Struct, frozen=True, kw_only=True):
    """The answer for one scenario."""

    policy: str
    scale: float
    hit_rate: float  # of the blocks that were looked up, found without a gap from the start of their chain


class _SampledCache(Generic[K]):
    """One scenario: names only."""

    def __init__(self, rule: EvictionPolicy[K], capacity_blocks: int):
        self._policy = rule
        self._capacity = capacity_blocks
        self._held: set[K] = set()
        self.hits = 0.0

    def look(self, chain: Sequence[K], now: Nanos) -> None:
        held = 0
        for key in chain:
            if key not in self._held:
                break
            held += 1
        self.hits += held
        for key in reversed(chain[:held]):
            self._policy.admit(key, 1, now)

    def store(self, chain: Sequence[K], now: Nanos) -> None:
        new = [key for key in chain if key not in self._held]
        missing = len(self._held) + len(new) - self._capacity
        if missing > 0:
            own = set(chain)
            while missing > 0 and (victim := self._policy.choose()) is not None:
                self._policy.withdraw(victim)
                if victim not in own:
                    self._held.remove(victim)
                    missing -= 1
            if missing > 0:
                del new[-missing:]
        self._held.update(new)
        for key in reversed(chain):
            if key in self._held:
                self._policy.admit(key, 1, now)


class GhostCache(Generic[K]):
    """See the module. Told of the same lookups and publications as the tier that it shadows."""

    def __init__(
        self,
        capacity_blocks: int,
        scenarios: Sequence[GhostCacheScenario],
        sample: Sample[K],
        *,
        sampled_blocks: int = SAMPLED_BLOCKS,
        half_life: Nanos = HALF_LIFE,
    ):
        """Nothing is known yet.

        Args:
            capacity_blocks: Of the live tier, in blocks of the usual size.
            scenarios: To be estimated.
            sample: Picks blocks by name: `sample_names`, or `sample_numbers`.
            sampled_blocks: Of the live capacity, in the sample.
            half_life: Of what is counted (rule 5).

        Raises:
            ValueError: There is no policy of a scenario's name, or its scale is not positive.
        """
        assert capacity_blocks > 0, capacity_blocks
        self.share = min(1.0, sampled_blocks / capacity_blocks)
        self._sample = sample
        self._half_life = half_life
        self._caches: Mapping[GhostCacheScenario, _SampledCache[K]] = {
            scenario: _SampledCache(_policy(scenario), max(1, round(capacity_blocks * self.share * scenario.scale)))
            for scenario in scenarios
        }
        self._looked_up = self._expected = 0.0  # in the sample; by its share
        self._faded_at = Nanos(0)

    def looked_up(self, chain: Sequence[K], now: Nanos) -> None:
        """A client asked for a chain; all of it, not only what was found."""
        if now >= self._faded_at + FADE_EVERY:
            self._fade(now)
        sampled = self._sample(chain, self.share)
        self._looked_up += len(sampled)
        self._expected += len(chain) * self.share
        if sampled:
            for cache in self._caches.values():
                cache.look(sampled, now)

    def stored(self, chain: Sequence[K], now: Nanos) -> None:
        """A client published what was missing of a chain; all of it, not only what was new."""
        sampled = self._sample(chain, self.share)
        if sampled:
            for cache in self._caches.values():
                cache.store(sampled, now)

    def estimates(self) -> list[HitRateEstimate]:
        """In the order of the scenarios; rates are 0 before the first lookup."""
        unseen = self._expected - self._looked_up  # rule 4
        return [
            HitRateEstimate(
                policy=scenario.policy,
                scale=scenario.scale,
                hit_rate=min(1.0, max(0.0, (cache.hits + unseen) / self._expected)) if self._expected else 0.0,
            )
            for scenario, cache in self._caches.items()
        ]

    def _fade(self, now: Nanos) -> None:
        kept = 0.5 ** ((now - self._faded_at) / self._half_life)
        self._faded_at = now
        self._looked_up *= kept
        self._expected *= kept
        for cache in self._caches.values():
            cache.hits *= kept


def sample_names(names: Sequence[BlockHash], share: float) -> list[BlockHash]:
    """By the first two bytes of a name, which is a hash already."""
    below = round(share * 65_536)
    return [name for name in names if name[0] << 8 | name[1] < below]


def sample_numbers(numbers: Sequence[int], share: float) -> list[int]:
    """For traces: by a multiplicative hash (Knuth's, of 2⁶⁴ over the golden ratio)."""
    below = round(share * (1 << 24))
    return [number for number in numbers if (number * 0x9E3779B97F4A7C15 >> 40) & 0xFFFFFF < below]


def _policy(scenario: GhostCacheScenario) -> EvictionPolicy[Any]:
    if not scenario.scale > 0:
        raise ValueError(f"scale {scenario.scale} of shadow policy {scenario.policy!r} is not positive")
    return policy(scenario.policy)
