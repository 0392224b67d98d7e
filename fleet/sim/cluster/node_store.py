"""The KV store of one simulated node: blocks below the engines' memory, by name and number, with the links that they take.

Rules:

1. Tiers are asked in order, the node's memory (the *pool*) first. Each has a capacity, an eviction policy and an admission, which
   are `kvstore`'s own; the last tier may be one for all nodes.
2. What an engine has computed is saved to the pool, and from there to each tier below whose admission takes it: when it is
   saved, and when it is used. Nobody waits for that. What waits to go down is bounded; the rest is dropped.
3. A load takes the leading blocks that an engine does not have, each from the first tier that has it, as long as loading them is
   predicted to take less time than computing them (rule 4 of `kvstore.hierarchy.machine`). What comes from below stays in the pool.
4. Blocks that are loaded are not evicted meanwhile.
5. When the store is lost, so are its pool and all that was on its way; engines compute then. What is on disk, or elsewhere, is there
   again when it returns.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Literal

from msgspec import Struct

from fleet.core.clock import Nanos
from fleet.core.ids import StoreId
from fleet.hardware.latency.step_model import pairs
from fleet.sim.cluster.network import LinkName, Network
from fleet.sim.engine.attempts import StepTimes
from fleet.sim.kernel import Kernel
from kvstore.eviction.policies import PolicyName, policy
from kvstore.hierarchy.admission import ReuseAdmission
from kvstore.messages import POOL_TIER

MEMORY_BANDWIDTH = 150e9
"""Bytes a second that a node's pool gives and takes: half of eight channels of DDR5-4800, since a copy reads and writes."""

QUEUE_BLOCKS = 4096  # that may wait to go down to a tier, as `kvstore.hierarchy.machine.TierRule` has it


class TierProfile(Struct, frozen=True, kw_only=True):
    """One tier."""

    name: str
    blocks: int  # that fit
    policy: PolicyName = "lru"
    admission: Literal["all", "reuse"] = "all"  # reuse: what was seen before (`kvstore.hierarchy.admission`)
    read_bandwidth: float = MEMORY_BANDWIDTH  # bytes a second, of one node
    write_bandwidth: float = MEMORY_BANDWIDTH
    latency: Nanos = Nanos(0)
    shared: bool = False  # one for all nodes


class StoreProfile(Struct, frozen=True, kw_only=True):
    """The store of every node."""

    tiers: tuple[TierProfile, ...]  # the pool first
    block_bytes: float
    block_tokens: int


class SimulatedTier:
    """What is in one tier: names only."""

    def __init__(self, profile: TierProfile):
        assert profile.blocks >= 1, profile
        self.profile = profile
        self._policy = policy(profile.policy)
        self._admission: ReuseAdmission[int] | None = ReuseAdmission() if profile.admission == "reuse" else None
        self._pins: dict[int, int] = {}  # loads that a block is part of, by name; of all blocks that are here
        # Blocks whose turn to go came while they were loaded: the policy does not know them.
        self._aside: dict[int, None] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._pins

    def __len__(self) -> int:
        return len(self._pins)

    def names(self) -> list[int]:
        return list(self._pins)

    def admits(self, key: int, now: Nanos) -> bool:
        """Note that a block was written or used; whether it is worth keeping here."""
        return self._admission is None or self._admission.admits(key, 1, now)

    def put(self, keys: Sequence[int], now: Nanos) -> tuple[list[int], list[int]]:
        """Take blocks in, in the order of their chain; returns what is new here, and what had to go for it."""
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
                elif victim not in own:  # else it is admitted again below
                    del pins[victim]
                    removed.append(victim)
                    missing -= 1
            if missing > 0:
                del new[-missing:]
        pins.update(dict.fromkeys(new, 0))
        self._use([key for key in keys if key in pins], now)
        return new, removed

    def pin(self, keys: Sequence[int]) -> None:
        """Keep blocks that are here until `unpin`."""
        for key in keys:
            self._pins[key] += 1

    def unpin(self, keys: Sequence[int], now: Nanos) -> None:
        """Keep them no longer; they have been used."""
        here = [key for key in keys if key in self._pins]
        for key in here:
            self._pins[key] -= 1
        self._use(here, now)

    def clear(self) -> list[int]:
        """Lose everything; returns what it was."""
        names = list(self._pins)
        for key in names:
            if key not in self._aside:
                self._policy.withdraw(key)
        self._pins.clear()
        self._aside.clear()
        return names

    def _use(self, keys: Sequence[int], now: Nanos) -> None:
        """Blocks that are here are used, tail first as the policies want it."""
        admit, pins, aside = self._policy.admit, self._pins, self._aside
        for key in reversed(keys):
            if key in aside:
                if pins[key]:
                    continue
                del aside[key]
            admit(key, 1, now)

    def check(self) -> None:
        """Assert that the policy knows what may be evicted, and that it fits."""
        assert len(self._pins) <= self.profile.blocks
        assert len(self._policy) == len(self._pins) - len(self._aside)
        assert all((key in self._policy) is (key not in self._aside) for key in self._pins)
        assert all(self._pins[key] for key in self._aside)


class TierChange(Struct, frozen=True):
    """What a store tells its watchers."""

    tier: str
    stored: Sequence[int] = ()
    removed: Sequence[int] = ()
    reset: bool = False  # what was known of all its tiers is void


class _TierRun(Struct, frozen=True):
    """Consecutive blocks of a chain that come from one tier."""

    tier: SimulatedTier
    keys: Sequence[int]


class AttachedWorker(Struct, frozen=True, kw_only=True):
    """A worker of the node, as its store knows it."""

    times: StepTimes
    load_link: LinkName
    save_link: LinkName


class NodeStore:
    """The store of one node."""

    def __init__(
        self,
        kernel: Kernel,
        network: Network,
        store_id: StoreId,
        profile: StoreProfile,
        shared: Mapping[str, SimulatedTier],
        tell: Callable[["NodeStore", SimulatedTier, TierChange], None],
    ):
        """A store with nothing in it.

        Args:
            kernel: Its time.
            network: Its links.
            store_id: As the router knows it.
            profile: What it has.
            shared: The tiers that it has together with others, by name.
            tell: Told of each change, with the tier that changed.
        """
        self._kernel = kernel
        self._network = network
        self.id = store_id
        self._profile = profile
        self.tiers = [shared.get(tier.name) or SimulatedTier(tier) for tier in profile.tiers]
        assert self.tiers[0].profile.name == POOL_TIER
        self._pool, self._below = self.tiers[0], self.tiers[1:]
        self._tell = tell
        self._saving: dict[int, None] = {}
        self._going_down: dict[str, dict[int, None]] = {tier.profile.name: {} for tier in self._below}
        self._waiters: list[tuple[set[int], Callable[[], None]]] = []
        self.dropped = 0  # blocks that had no place in the queue of a tier
        self.up = False
        self.come()

    # Coming and going.

    def come(self) -> None:
        """Be there, with what is still in its tiers."""
        if self.up:
            return
        self.up = True
        for tier in self.tiers:
            self._network.open(self._link(tier, "read"), tier.profile.read_bandwidth)
            self._network.open(self._link(tier, "write"), tier.profile.write_bandwidth)
            if len(tier):
                self._tell(self, tier, TierChange(tier.profile.name, stored=tier.names()))

    def go(self) -> None:
        """Be lost (rule 5)."""
        if not self.up:
            return
        self.up = False
        self._pool.clear()
        for tier in self.tiers:
            self._network.close(self._link(tier, "read"))
            self._network.close(self._link(tier, "write"))
        self._tell(self, self._pool, TierChange(POOL_TIER, reset=True))
        waiters, self._waiters = self._waiters, []
        for _, action in waiters:
            action()

    # Loads.

    def offer(self, attached_worker: AttachedWorker, keys: Sequence[int], here: int) -> int:
        """How many leading blocks of a chain an engine has when it has loaded what is worth loading.

        Args:
            attached_worker: Whose engine.
            keys: Of the chain, as far as it may be loaded.
            here: Blocks of it that the engine has.
        """
        return here + sum(len(run.keys) for run in self._worth_loading(attached_worker, keys, here))

    def load(
        self,
        attached_worker: AttachedWorker,
        keys: Sequence[int],
        here: int,
        ended: Callable[[Mapping[str, int] | None], None],
    ) -> None:
        """Load what was offered just now; `ended` is told the tokens by tier, None when not all of it came."""
        runs = self._worth_loading(attached_worker, keys, here)
        assert runs, "nothing was offered"
        left = len(runs)
        lost = False

        def over(run: _TierRun, *, came: bool) -> None:
            nonlocal left, lost
            left -= 1
            lost = lost or not came
            run.tier.unpin(run.keys, self._kernel.instant)
            if came:
                self._used(run)
            if not left:
                ended(None if lost else self._tokens(runs))

        for run in runs:
            run.tier.pin(run.keys)
            self._network.carry(
                self._load_links(attached_worker, run.tier),
                len(run.keys) * self._profile.block_bytes,
                run.tier.profile.latency,
                partial(over, run, came=True),
                partial(over, run, came=False),
            )

    def _worth_loading(self, attached_worker: AttachedWorker, keys: Sequence[int], here: int) -> list[_TierRun]:
        if not self.up:
            return []
        worth: list[_TierRun] = []
        size, depth = self._profile.block_tokens, here
        for run in self._runs(keys[here:]):
            links = self._load_links(attached_worker, run.tier)
            num_bytes = len(run.keys) * self._profile.block_bytes
            loading = self._network.seconds(links, num_bytes, run.tier.profile.latency)
            tokens = len(run.keys) * size
            computing = attached_worker.times.seconds(tokens, pairs(tokens, depth * size), 0, 0)
            if loading is None or loading >= computing:
                break
            worth.append(run)
            depth += len(run.keys)
        return worth

    def _runs(self, keys: Sequence[int]) -> list[_TierRun]:
        """Blocks from the first on that some tier has, by tier."""
        places: list[tuple[SimulatedTier, int]] = []
        for key in keys:
            tier = next((tier for tier in self.tiers if key in tier), None)
            if tier is None:
                break
            places.append((tier, key))
        return [_TierRun(tier, [key for _, key in run]) for tier, run in groupby(places, lambda place: place[0])]

    def _tokens(self, runs: Sequence[_TierRun]) -> dict[str, int]:
        tokens: dict[str, int] = {}
        for run in runs:
            name = run.tier.profile.name
            tokens[name] = tokens.get(name, 0) + len(run.keys) * self._profile.block_tokens
        return tokens

    def _used(self, run: _TierRun) -> None:
        """Blocks have come up, or were used in the pool."""
        now = self._kernel.instant
        if run.tier is self._pool:
            self._go_down(run.keys, now)
        else:
            self._take_in(run.keys, now)

    # Saves.

    def save(self, attached_worker: AttachedWorker, keys: Sequence[int]) -> None:
        """An engine has computed blocks: copy those that are not here."""
        if not self.up:
            return
        new = [key for key in keys if key not in self._pool and key not in self._saving]
        if not new:
            return
        self._saving.update(dict.fromkeys(new))
        self._network.carry(
            (attached_worker.save_link, self._link(self._pool, "write")),
            len(new) * self._profile.block_bytes,
            Nanos(0),
            partial(self._saved, new, came=True),
            partial(self._saved, new, came=False),
        )

    def when_saved(self, keys: Sequence[int], action: Callable[[], None]) -> None:
        """Call when nothing of a chain is on its way to the pool any more: at once, where nothing is."""
        coming = self._saving.keys() & set(keys)
        if coming:
            self._waiters.append((coming, action))
        else:
            action()

    def _saved(self, keys: Sequence[int], *, came: bool) -> None:
        for key in keys:
            self._saving.pop(key, None)
        if came and self.up:
            self._take_in(keys, self._kernel.instant)
        ready = []
        for waiter in self._waiters:
            waiter[0].difference_update(keys)
            if not waiter[0]:
                ready.append(waiter)
        if ready:
            self._waiters = [waiter for waiter in self._waiters if waiter[0]]
            for _, action in ready:
                action()

    def _take_in(self, keys: Sequence[int], now: Nanos) -> None:
        stored, removed = self._pool.put(keys, now)
        if stored or removed:
            self._tell(self, self._pool, TierChange(POOL_TIER, stored, removed))
        self._go_down([key for key in keys if key in self._pool], now)

    def _go_down(self, keys: Sequence[int], now: Nanos) -> None:
        for tier in self._below:
            going = self._going_down[tier.profile.name]
            wanted = [key for key in keys if tier.admits(key, now) and key not in tier and key not in going]
            room = QUEUE_BLOCKS - len(going)
            self.dropped += max(0, len(wanted) - room)
            wanted = wanted[:room]
            if not wanted:
                continue
            going.update(dict.fromkeys(wanted))
            self._network.carry(
                (self._link(tier, "write"),),
                len(wanted) * self._profile.block_bytes,
                tier.profile.latency,
                partial(self._went_down, tier, wanted, came=True),
                partial(self._went_down, tier, wanted, came=False),
            )

    def _went_down(self, tier: SimulatedTier, keys: Sequence[int], *, came: bool) -> None:
        going = self._going_down[tier.profile.name]
        for key in keys:
            going.pop(key, None)
        if came:
            stored, removed = tier.put(keys, self._kernel.instant)
            if stored or removed:
                self._tell(self, tier, TierChange(tier.profile.name, stored, removed))

    # Lanes.

    def _link(self, tier: SimulatedTier, way: str) -> LinkName:
        return LinkName(f"{self.id} {tier.profile.name} {way}")

    def _load_links(self, attached_worker: AttachedWorker, tier: SimulatedTier) -> tuple[LinkName, ...]:
        return (self._link(tier, "read"), attached_worker.load_link)

    def check(self) -> None:
        """Assert that tiers are in order, and that nobody waits while nothing is on its way."""
        for tier in self.tiers:
            tier.check()
        assert not self._waiters or self._saving
