"""Tiers of a simulated store: keep the names of their blocks, by the eviction policies and admission rules of `kvstore`."""

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from fleet.core.clock import Nanos
from kvstore.eviction.policies import PolicyName, policy
from kvstore.hierarchy.admission import ReuseAdmission

MEMORY_BANDWIDTH = 150e9
"""Bytes per second between a node's pool and its workers.

The value is about half the bandwidth of eight memory channels of DDR5-4800, because a copy both reads and writes memory.
"""


class TierProfile(Struct, frozen=True, kw_only=True):
    """Describes one tier of a simulated store: its capacity, its speed, its eviction policy and its admission rule."""

    name: str
    blocks: int  # capacity of the tier in blocks: on one node, or of all nodes together if `shared`
    policy: PolicyName = "lru"
    # blocks that the tier takes: "all", or with "reuse" only those that were offered before (`kvstore.hierarchy.admission`)
    admission: Literal["all", "reuse"] = "all"
    read_bandwidth: float = MEMORY_BANDWIDTH  # bytes per second for one node
    write_bandwidth: float = MEMORY_BANDWIDTH
    latency: Nanos = Nanos(0)
    shared: bool = False  # True: all nodes use this one tier


class SimulatedTier:
    """Holds the names of the blocks in one tier, decides which blocks are evicted, and protects blocks that are being loaded."""

    def __init__(self, profile: TierProfile):
        assert profile.blocks >= 1, profile
        self.profile = profile
        self._policy = policy(profile.policy)
        self._admission: ReuseAdmission[int] | None = ReuseAdmission() if profile.admission == "reuse" else None
        # the keys are all blocks of the tier; the value is the number of loads that read the block now
        self._pins: dict[int, int] = {}
        # Blocks that the policy chose for eviction while they were pinned. The policy has forgotten them, and learns of
        # them again when they are unpinned.
        self._aside: dict[int, None] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._pins

    def __len__(self) -> int:
        return len(self._pins)

    def names(self) -> list[int]:
        return list(self._pins)

    def admits(self, key: int, now: Nanos) -> bool:
        """Return whether the admission rule admits a block to this tier.

        Call this each time the block is written or used, because the rule counts the calls.
        """
        return self._admission is None or self._admission.admits(key, 1, now)

    def put(self, keys: Sequence[int], now: Nanos) -> tuple[list[int], list[int]]:
        """Store consecutive blocks of a chain, and evict other blocks to make room. If the room is not enough, leave out the last blocks.

        Return the blocks that are new in this tier, and the blocks that were evicted for them.
        """
        pins, rule = self._pins, self._policy
        new = [key for key in keys if key not in pins]
        removed: list[int] = []
        missing = len(pins) + len(new) - self.profile.blocks
        if missing > 0:
            own = set(keys)
            while missing > 0 and (victim := rule.choose()) is not None:
                rule.withdraw(victim)
                if pins[victim]:
                    self._aside[victim] = None
                elif victim not in own:  # a block in `keys` stays, and `_use` gives it back to the policy
                    del pins[victim]
                    removed.append(victim)
                    missing -= 1
            if missing > 0:
                del new[-missing:]
        pins.update(dict.fromkeys(new, 0))
        self._use([key for key in keys if key in pins], now)
        return new, removed

    def pin(self, keys: Sequence[int]) -> None:
        """Pin blocks, all of which must be in this tier: they are not evicted before `unpin`."""
        for key in keys:
            self._pins[key] += 1

    def unpin(self, keys: Sequence[int], now: Nanos) -> None:
        """Unpin blocks that a load has read, and report their use to the eviction policy."""
        here = [key for key in keys if key in self._pins]
        for key in here:
            self._pins[key] -= 1
        self._use(here, now)

    def clear(self) -> None:
        """Remove all blocks, as when the memory is lost."""
        for key in self._pins:
            if key not in self._aside:
                self._policy.withdraw(key)
        self._pins.clear()
        self._aside.clear()

    def _use(self, keys: Sequence[int], now: Nanos) -> None:
        """Report used blocks to the eviction policy, the last block first, because policies expect this order."""
        admit, pins, aside = self._policy.admit, self._pins, self._aside
        for key in reversed(keys):
            if key in aside:
                if pins[key]:
                    continue
                del aside[key]
            admit(key, 1, now)

    def check(self) -> None:
        """Assert that the policy knows all blocks except those set aside (`_aside`), and that the tier is not over its capacity."""
        assert len(self._pins) <= self.profile.blocks
        assert len(self._policy) == len(self._pins) - len(self._aside)
        assert all((key in self._policy) is (key not in self._aside) for key in self._pins)
        assert all(self._pins[key] for key in self._aside)
