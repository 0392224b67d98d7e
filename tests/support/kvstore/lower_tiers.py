"""Driver of a store hierarchy for tests: it notes which blocks each tier has, and performs transfers when the test calls it."""

from collections import deque

from kvstore.clock import SECOND, Nanos
from kvstore.hierarchy.machine import Hierarchy
from kvstore.hierarchy.tier_states import AdmitEverything, TierRule
from kvstore.hierarchy.transfers import Confirm, Demote, Fetch, Find, TierTransfer
from kvstore.messages import GONE, BlockKey, BlockOutcome, FetchResult
from tests.support.kvstore.builders import MachineDriver

MAX_WAIT = Nanos(5 * SECOND)
CRC = 77


class HierarchyDriver:
    """Drives a hierarchy and its block machine; the tiers answer only when the test calls `perform` or `fail`."""

    def __init__(
        self,
        blocks: int = 16,
        tiers: tuple[str, ...] = ("ssd", "redis"),
        admission=None,
        max_namespaces: int = 256,
        **rule,
    ):
        self.store = MachineDriver(blocks=blocks, max_namespaces=max_namespaces)
        self.held: list[set[bytes]] = [set() for _ in tiers]
        rules = [TierRule(name=name, admission=admission or AdmitEverything(), **rule) for name in tiers]
        self.hierarchy = Hierarchy(self.store.machine, rules)
        self.waiting: deque[TierTransfer] = deque()
        self.asked: list[TierTransfer] = []
        self.now = Nanos(0)

    def prefetch(self, chain, max_wait=MAX_WAIT):
        count = self.hierarchy.prefetch(self.store.digest, chain, self.store.look(chain, self.now), max_wait, self.now)
        self.collect()
        return count

    def hold(self, chain):
        self.store.hold(chain, self.now)
        self.hierarchy.offer(self.store.digest, chain, self.now)
        self.collect()

    def lose(self, chain):
        """Remove these blocks from the pool."""
        for name in chain:
            slot = self.store.slot(name)
            assert self.store.machine.condemn(self.store.digest, name, slot.generation, self.now)

    def collect(self):
        self.store.machine.commands()
        for transfer in self.hierarchy.commands():
            self.waiting.append(transfer)
            self.asked.append(transfer)

    def perform(self, transfer=None):
        """Perform a transfer (by default the next one that waits), as a tier without faults would do it."""
        transfer = transfer or self.waiting.popleft()
        held = self.held[transfer.tier]
        match transfer:
            case Find(promotion_id=promotion_id, keys=keys):
                count = next((i for i, key in enumerate(keys) if key.name not in held), len(keys))
                self.hierarchy.found(promotion_id, count, self.now)
            case Fetch(promotion_id=promotion_id, addresses=addresses):
                answers = [FetchResult(BlockOutcome.MOVED, CRC) if a.key.name in held else GONE for a in addresses]
                self.hierarchy.fetched(promotion_id, answers, self.now)
            case Demote(demotion_id=demotion_id, addresses=addresses):
                held |= {address.key.name for address in addresses}
                self.hierarchy.kept(demotion_id, [True] * len(addresses), self.now)
            case Confirm(confirm_id=confirm_id, keys=keys):
                self.hierarchy.confirmed(confirm_id, [key.name in held for key in keys])
        self.collect()

    def perform_all(self):
        while self.waiting:
            self.perform()

    def fail(self, transfer=None):
        transfer = transfer or self.waiting.popleft()
        self.hierarchy.failed(transfer, self.now, self.now)
        self.collect()

    def tick(self, seconds: float):
        self.now = Nanos(self.now + round(seconds * SECOND))
        self.hierarchy.tick(self.now)
        self.collect()


def movement_kinds(below):
    return [(type(transfer).__name__, transfer.tier) for transfer in below.asked]


class AdmitNothing:
    """Admission policy that admits no block."""

    def admits(self, key, size_bytes, now):
        return False


def keys_of(below, chain):
    return [BlockKey(below.store.digest, name) for name in chain]
