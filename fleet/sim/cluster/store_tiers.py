"""Tiers of a simulated store: the names of the blocks in each tier, with the eviction policies and admission rules of `kvstore`."""

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from fleet.core.clock import Nanos
from kvstore.eviction.policies import PolicyName, policy
from kvstore.hierarchy.admission import ReuseAdmission

MEMORY_BANDWIDTH = 150e9
"""Bytes per second between a node's pool and its workers.

This is half the bandwidth of eight channels of DDR5-4800, because a copy both reads and writes.
"""


class TierProfile(Struct, frozen=True, kw_only=True):
    """Size, speed and rules of one tier."""

    name: str
    blocks: int  # capacity
    policy: PolicyName = "lru"
    # "reuse" takes only blocks that were seen before (`kvstore.hierarchy.admission`)
    admission: Literal["all", "reuse"] = "all"
    read_bandwidth: float = MEMORY_BANDWIDTH  # bytes per second for one node
    write_bandwidth: float = MEMORY_BANDWIDTH
    latency: Nanos = Nanos(0)
    shared: bool = False  # True: all nodes use this one tier


class SimulatedTier:
    """The names of the blocks in one tier, and which of them are pinned by loads."""

    def __init__(self, profile: TierProfile):
        assert profile.blocks >= 1, profile
        self.profile = profile
        self._policy = policy(profile.policy)
        self._admission: ReuseAdmission[int] | None = ReuseAdmission() if profile.admission == "reuse" else None
        # the keys are all blocks of the tier; the value is the number of loads that read the block now
        self._pins: dict[int, int] = {}
        # Blocks that the policy chose for eviction while they were pinned; the policy has forgotten them.
        self._aside: dict[int, None] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._pins

    def __len__(self) -> int:
        return len(self._pins)

    def names(self) -> list[int]:
        return list(self._pins)

    def admits(self, key: int, now: Nanos) -> bool:
        """Note that a block was written or used, and return whether the admission rule lets it into this tier."""
        return self._admission is None or self._admission.admits(key, 1, now)

    def put(self, keys: Sequence[int], now: Nanos) -> tuple[list[int], list[int]]:
        """Store the blocks of a chain, in its order; return the blocks that are new here and the blocks that were evicted for them."""
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
                elif victim not in own:  # otherwise it is admitted again below
                    del pins[victim]
                    removed.append(victim)
                    missing -= 1
            if missing > 0:
                del new[-missing:]
        pins.update(dict.fromkeys(new, 0))
        self._use([key for key in keys if key in pins], now)
        return new, removed

    def pin(self, keys: Sequence[int]) -> None:
        """Pin the blocks that are in this tier: they are not evicted before `unpin`."""
        for key in keys:
            self._pins[key] += 1

    def unpin(self, keys: Sequence[int], now: Nanos) -> None:
        """Unpin blocks that a load has read, and note that they were used."""
        here = [key for key in keys if key in self._pins]
        for key in here:
            self._pins[key] -= 1
        self._use(here, now)

    def clear(self) -> None:
        """Lose all blocks."""
        for key in self._pins:
            if key not in self._aside:
                self._policy.withdraw(key)
        self._pins.clear()
        self._aside.clear()

    def _use(self, keys: Sequence[int], now: Nanos) -> None:
        """Report used blocks to the policy, beginning with the last block, because policies expect this order."""
        admit, pins, aside = self._policy.admit, self._pins, self._aside
        for key in reversed(keys):
            if key in aside:
                if pins[key]:
                    continue
                del aside[key]
            admit(key, 1, now)

    def check(self) -> None:
        """Assert that the policy knows exactly the blocks that may be evicted, and that the tier is not over its capacity."""
        assert len(self._pins) <= self.profile.blocks
        assert len(self._policy) == len(self._pins) - len(self._aside)
        assert all((key in self._policy) is (key not in self._aside) for key in self._pins)
        assert all(self._pins[key] for key in self._aside)
