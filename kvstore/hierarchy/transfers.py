"""Transfers between a node's pool and its backing tiers. They are the commands of the tier hierarchy."""

from typing import NewType

from msgspec import Struct

from kvstore.clock import Nanos
from kvstore.messages import Address, BlockKey

PromotionId = NewType("PromotionId", int)
DemotionId = NewType("DemotionId", int)
ConfirmId = NewType("ConfirmId", int)


class Find(Struct, frozen=True):
    """Command: ask a tier how many leading blocks of `keys` it has. The answer goes to `Hierarchy.found`."""

    promotion_id: PromotionId
    tier: int
    keys: tuple[BlockKey, ...]
    deadline: Nanos


class Fetch(Struct, frozen=True):
    """Command: copy blocks from a tier into reserved slots of the pool. The results go to `Hierarchy.fetched`."""

    promotion_id: PromotionId
    tier: int
    addresses: tuple[Address, ...]
    deadline: Nanos


class Demote(Struct, frozen=True):
    """Command: copy pinned blocks of the pool to a tier. The answers go to `Hierarchy.kept`."""

    demotion_id: DemotionId
    tier: int
    addresses: tuple[Address, ...]
    checksums: tuple[int, ...]  # CRC-32C with which the blocks were published
    deadline: Nanos


class Confirm(Struct, frozen=True):
    """Command: ask a tier which blocks of `keys` it still has. The answers go to `Hierarchy.confirmed`."""

    confirm_id: ConfirmId
    tier: int
    keys: tuple[BlockKey, ...]
    deadline: Nanos


TierTransfer = Find | Fetch | Demote | Confirm

OPERATIONS = {Find: "find", Fetch: "fetch", Demote: "keep", Confirm: "confirm"}
"""Values of the label `operation` of the metric kvstore_tier_operation_seconds, by class of transfer."""


class TierCounters(Struct, kw_only=True):
    """Counters of the hierarchy for one tier since the node started. Only the tier hierarchy changes them."""

    loaded: int = 0  # number of blocks that were promoted from the tier
    kept: int = 0  # number of blocks that were demoted to the tier, including those that it had already
    dropped: int = 0  # number of blocks that were not demoted because the tier's queue was full
    # number of batches that the tier had, but that were not copied because computing the blocks was predicted to be
    # faster
    too_slow: int = 0
    failures: int = 0  # number of transfers that failed or missed their deadline
    fenced: int = 0  # number of times that a failure opened one of the tier's two circuit breakers (read, write)
