"""Values of what moves between a node's pool and the tiers below it."""

from typing import NewType

from msgspec import Struct

from kvstore.clock import Nanos
from kvstore.messages import Address, BlockKey

PromotionId = NewType("PromotionId", int)
DemotionId = NewType("DemotionId", int)
ConfirmId = NewType("ConfirmId", int)


class Find(Struct, frozen=True):
    """Command: ask a tier how many of these leading blocks it holds; the answer goes to `Hierarchy.found`."""

    promotion_id: PromotionId
    tier: int
    keys: tuple[BlockKey, ...]
    deadline: Nanos


class Fetch(Struct, frozen=True):
    """Command: fetch blocks into reserved places of the pool; the answer goes to `Hierarchy.fetched`."""

    promotion_id: PromotionId
    tier: int
    addresses: tuple[Address, ...]
    deadline: Nanos


class Demote(Struct, frozen=True):
    """Command: have a tier keep blocks that are pinned in the pool; the answer goes to `Hierarchy.kept`."""

    demotion_id: DemotionId
    tier: int
    addresses: tuple[Address, ...]
    checksums: tuple[int, ...]  # CRC-32C with which the blocks were published
    deadline: Nanos


class Confirm(Struct, frozen=True):
    """Command: ask a tier which of these blocks it has still; the answer goes to `Hierarchy.confirmed`."""

    confirm_id: ConfirmId
    tier: int
    keys: tuple[BlockKey, ...]
    deadline: Nanos


TierTransfer = Find | Fetch | Demote | Confirm

OPERATIONS = {Find: "find", Fetch: "fetch", Demote: "keep", Confirm: "confirm"}
"""The label `operation` of the metric kvstore_tier_operation_seconds."""


class PinnedBlocks(Struct, frozen=True):
    """Blocks of the pool that stay where they are until `unpin`."""

    pin_id: int
    addresses: tuple[Address, ...]
    checksums: tuple[int, ...]  # CRC-32C with which they were published


class TierCounters(Struct, kw_only=True):
    """What the hierarchy did with one tier since the node started. Changed in place by its owner only."""

    loaded: int = 0  # blocks that came up
    kept: int = 0  # blocks that went down
    dropped: int = 0  # blocks that should have gone down, and for which the queue had no room
    too_slow: int = 0  # loads not begun, because computing the blocks again was predicted to be faster
    failures: int = 0  # movements that failed, or did not come back in time
    fenced: int = 0  # times that a failure closed the tier for a while
