"""Implementation of `put_summing` for transports that need checksums before they write.

`kvstore.native.checksums` computes the checksums. The entry "checksum" in docs/glossary.md lists the places where
readers compare them.
"""

from collections.abc import Callable, Sequence

from kvstore.buffers import Block, crc32c, pieces
from kvstore.clock import Nanos
from kvstore.messages import GONE, AnySlots, BlockOutcome, FetchResult, Slot

MOVED = BlockOutcome.MOVED  # a constant of this module, because an enum look-up for each block is slow

Put = Callable[[AnySlots, Sequence[Block], Nanos], list[BlockOutcome]]


def put_with_checksums(put: Put, slots: AnySlots, blocks: Sequence[Block], deadline: Nanos) -> list[FetchResult]:
    """Compute the checksums of blocks, write them by `Transport.put`, and return the results with the checksums."""
    summed = [
        Slot(slot.offset, slot.generation, crc32c(pieces(block))) for slot, block in zip(slots, blocks, strict=True)
    ]
    outcomes = put(summed, blocks, deadline)
    return [fetch_result(outcome, slot.crc32c) for outcome, slot in zip(outcomes, summed, strict=True)]


def fetch_result(outcome: BlockOutcome, checksum: int) -> FetchResult:
    """Return the result for one block, with its checksum if it was moved."""
    if outcome is MOVED:
        return FetchResult(outcome, checksum)
    return GONE if outcome is GONE.outcome else FetchResult(outcome)
