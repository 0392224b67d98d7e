"""Transfers between a node's pool and its backing tiers, as commands of the hierarchy."""

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
    """Command: copy blocks from a tier into reserved places of the pool; the answer goes to `Hierarchy.fetched`."""

    promotion_id: PromotionId
    tier: int
    addresses: tuple[Address, ...]
    deadline: Nanos


class Demote(Struct, frozen=True):
    """Command: copy pinned blocks of the pool to a tier; the answer goes to `Hierarchy.kept`."""

    demotion_id: DemotionId
    tier: int
    addresses: tuple[Address, ...]
    checksums: tuple[int, ...]  # CRC-32C with which the blocks were published
    deadline: Nanos


class Confirm(Struct, frozen=True):
    """Command: ask a tier which of these blocks it still has; the answer goes to `Hierarchy.confirmed`."""

    confirm_id: ConfirmId
    tier: int
    keys: tuple[BlockKey, ...]
    deadline: Nanos


TierTransfer = Find | Fetch | Demote | Confirm

OPERATIONS = {Find: "find", Fetch: "fetch", Demote: "keep", Confirm: "confirm"}
"""The label `operation` of the metric kvstore_tier_operation_seconds."""


class TierCounters(Struct, kw_only=True):
    """Counters of the hierarchy for one tier since the node started. Only their owner changes them."""

    loaded: int = 0  # promoted blocks
    kept: int = 0  # demoted blocks
    dropped: int = 0  # blocks that were not demoted because the queue was full
    too_slow: int = 0  # promotions not begun, because computing the blocks was predicted to be faster
    failures: int = 0  # transfers that failed or missed their deadline
    fenced: int = 0  # times that a failure opened the tier's circuit breaker
