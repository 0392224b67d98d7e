"""Node store: simulates the KV store of one node: the names of the blocks in its tiers, and the transfers of these blocks.

Rules:

1. Tiers are searched in order, beginning with the node's memory (the pool). Each tier has a capacity, and an eviction policy and
   an admission rule from `kvstore`. All nodes may share a tier, such as the last one.
2. Computed blocks are saved to the pool. When they are saved, and again each time that a load reads them, they are demoted to each
   lower tier that admits them. No request waits for a demotion. At most `QUEUE_BLOCKS` blocks wait for a demotion to one tier;
   further blocks are not demoted.
3. A load fetches the leading blocks of a prompt that an engine does not have. Each block comes from the first tier that
   has it. Consecutive blocks from one tier form a run. The load stops before the first run that the engine can compute faster than load
   (rule 3 of `kvstore.hierarchy.promotions`). Blocks that were loaded from lower tiers are also stored in the pool.
4. Blocks are not evicted while they are being loaded.
5. A store that dies loses its pool and all transfers; engines then compute the blocks. Lower tiers keep their blocks until the
   store returns.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby

from msgspec import Struct

from fleet.batching.attempts import StepTimes
from fleet.core.clock import Nanos
from fleet.core.ids import StoreId
from fleet.hardware.latency.step_model import pairs
from fleet.sim.cluster.network import LinkName, Network
from fleet.sim.cluster.store_tiers import SimulatedTier, TierProfile
from fleet.sim.kernel import Kernel
from kvstore.messages import POOL_TIER

# Maximum number of blocks that may wait for a demotion to one tier; `kvstore.hierarchy.tier_states.TierRule` has the same limit.
QUEUE_BLOCKS = 4096


class StoreProfile(Struct, frozen=True, kw_only=True):
    """Tiers and block size of a node's store; the stores of all nodes have the same profile."""

    tiers: tuple[TierProfile, ...]  # the first tier is the pool
    block_bytes: float
    block_tokens: int


class TierChange(Struct, frozen=True):
    """Names of the blocks that were stored in one tier, or removed from it. The store announces each change to the router."""

    tier: str
    stored: Sequence[int] = ()
    removed: Sequence[int] = ()
    reset: bool = False  # True: routers must forget all blocks of all tiers of this store


class _TierRun(Struct, frozen=True):
    """Consecutive blocks of a chain that a load takes from the same tier."""

    tier: SimulatedTier
    keys: Sequence[int]


class AttachedWorker(Struct, frozen=True, kw_only=True):
    """Data about a worker that the store of its node needs: the step times, and the links for loads and saves of blocks."""

    times: StepTimes
    load_link: LinkName
    save_link: LinkName


class NodeStore:
    """The store of one node: saves, loads and demotes blocks (rules 1 to 5)."""

    def __init__(
        self,
        kernel: Kernel,
        network: Network,
        store_id: StoreId,
        profile: StoreProfile,
        shared: Mapping[str, SimulatedTier],
        notify: Callable[["NodeStore", SimulatedTier, TierChange], None],
    ):
        """Start the store. `shared` maps names to the tiers that all stores share. `notify` is called for each change of a tier."""
        self._kernel = kernel
        self._network = network
        self.id = store_id
        self._profile = profile
        self.tiers = [shared.get(tier.name) or SimulatedTier(tier) for tier in profile.tiers]
        assert self.tiers[0].profile.name == POOL_TIER
        self._pool, self._below = self.tiers[0], self.tiers[1:]
        self._notify = notify
        self._saving: dict[int, None] = {}
        self._demoting: dict[str, dict[int, None]] = {tier.profile.name: {} for tier in self._below}
        self._waiters: list[tuple[set[int], Callable[[], None]]] = []
        self.dropped = 0  # number of blocks so far that were not demoted, because a tier's queue was full (rule 2)
        self.up = False
        self.come()

    def come(self) -> None:
        """Start or restart the store, and announce to the router the blocks that its lower tiers still have."""
        if self.up:
            return
        self.up = True
        for tier in self.tiers:
            self._network.open(self._link(tier, "read"), tier.profile.read_bandwidth)
            self._network.open(self._link(tier, "write"), tier.profile.write_bandwidth)
            if len(tier):
                self._notify(self, tier, TierChange(tier.profile.name, stored=tier.names()))

    def go(self) -> None:
        """Let the store die: it loses its pool and all transfers (rule 5)."""
        if not self.up:
            return
        self.up = False
        self._pool.clear()
        for tier in self.tiers:
            self._network.close(self._link(tier, "read"))
            self._network.close(self._link(tier, "write"))
        self._notify(self, self._pool, TierChange(POOL_TIER, reset=True))
        waiters, self._waiters = self._waiters, []
        for _, action in waiters:
            action()

    # Loads.

    def offer(self, attached_worker: AttachedWorker, keys: Sequence[int], here: int) -> int:
        """Return how many leading blocks of `keys` a worker's engine will have after a load.

        The engine has the first `here` of these blocks already. Blocks that the engine can compute faster than load are
        not loaded.
        """
        return here + sum(len(run.keys) for run in self._worth_loading(attached_worker, keys, here))

    def load(
        self,
        attached_worker: AttachedWorker,
        keys: Sequence[int],
        here: int,
        ended: Callable[[Mapping[str, int] | None], None],
    ) -> None:
        """Load the blocks that `offer` has just counted for the same arguments.

        At the end, `ended` is called with the number of loaded tokens by tier, or with None if a transfer was lost.
        """
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
        """Return the leading blocks of `keys` that are in any tier, grouped into runs of consecutive blocks from the same tier."""
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
        """Handle blocks that a load has read from one tier.

        If they come from a lower tier, store them in the pool, too. If they come from the pool, offer them to the lower tiers.
        """
        now = self._kernel.instant
        if run.tier is self._pool:
            self._demote(run.keys, now)
        else:
            self._store(run.keys, now)

    # Saves.

    def save(self, attached_worker: AttachedWorker, keys: Sequence[int]) -> None:
        """Copy computed blocks from an engine to the pool, except for blocks that the pool has or that are being saved."""
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
        """Call `action` when the saves of all these blocks have ended; at once if none of the blocks is being saved now."""
        coming = self._saving.keys() & set(keys)
        if coming:
            self._waiters.append((coming, action))
        else:
            action()

    def _saved(self, keys: Sequence[int], *, came: bool) -> None:
        for key in keys:
            self._saving.pop(key, None)
        if came and self.up:
            self._store(keys, self._kernel.instant)
        ready = []
        for waiter in self._waiters:
            waiter[0].difference_update(keys)
            if not waiter[0]:
                ready.append(waiter)
        if ready:
            self._waiters = [waiter for waiter in self._waiters if waiter[0]]
            for _, action in ready:
                action()

    def _store(self, keys: Sequence[int], now: Nanos) -> None:
        """Put blocks into the pool and offer them to the lower tiers."""
        stored, removed = self._pool.put(keys, now)
        if stored or removed:
            self._notify(self, self._pool, TierChange(POOL_TIER, stored, removed))
        self._demote([key for key in keys if key in self._pool], now)

    def _demote(self, keys: Sequence[int], now: Nanos) -> None:
        for tier in self._below:
            demoting = self._demoting[tier.profile.name]
            wanted = [key for key in keys if tier.admits(key, now) and key not in tier and key not in demoting]
            room = QUEUE_BLOCKS - len(demoting)
            self.dropped += max(0, len(wanted) - room)
            wanted = wanted[:room]
            if not wanted:
                continue
            demoting.update(dict.fromkeys(wanted))
            self._network.carry(
                (self._link(tier, "write"),),
                len(wanted) * self._profile.block_bytes,
                tier.profile.latency,
                partial(self._demoted, tier, wanted, came=True),
                partial(self._demoted, tier, wanted, came=False),
            )

    def _demoted(self, tier: SimulatedTier, keys: Sequence[int], *, came: bool) -> None:
        demoting = self._demoting[tier.profile.name]
        for key in keys:
            demoting.pop(key, None)
        if came:
            stored, removed = tier.put(keys, self._kernel.instant)
            if stored or removed:
                self._notify(self, tier, TierChange(tier.profile.name, stored, removed))

    def _link(self, tier: SimulatedTier, direction: str) -> LinkName:
        return LinkName(f"{self.id} {tier.profile.name} {direction}")

    def _load_links(self, attached_worker: AttachedWorker, tier: SimulatedTier) -> tuple[LinkName, ...]:
        return (self._link(tier, "read"), attached_worker.load_link)

    def check(self) -> None:
        """Assert that the tiers are consistent, and that actions of `when_saved` wait only while blocks are being saved."""
        for tier in self.tiers:
            tier.check()
        assert not self._waiters or self._saving
