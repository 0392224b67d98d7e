"""The way between two ends in one process: for an embedded store, and for tests."""

from collections.abc import Sequence

from kvstore.buffers import Block, MutableBlock, crc32c, pieces
from kvstore.clock import Nanos
from kvstore.messages import AnySlots, BlockOutcome, FetchResult, Slot
from kvstore.pool.machine import BlockMachine
from kvstore.ports import MemoryTier
from kvstore.transports.checksums import put_with_checksums


class InProcessTransport:
    """Asks the machine, then the tier. Not for several threads, since the machine is not."""

    def __init__(self, machine: BlockMachine, tier: MemoryTier, digest: bytes):
        """Binds to a namespace.

        Raises:
            NamespaceUnknown: It was never opened.
        """
        machine.namespace(digest)
        self._machine = machine
        self._tier = tier
        self._digest = digest

    def get(self, slots: AnySlots, into: Sequence[MutableBlock], deadline: Nanos) -> list[BlockOutcome]:  # noqa: ARG002 - nothing here waits
        return [self._get(slot, block) for slot, block in zip(slots, into, strict=True)]

    def put(self, slots: AnySlots, blocks: Sequence[Block], deadline: Nanos) -> list[BlockOutcome]:  # noqa: ARG002 - nothing here waits
        return [self._put(slot, block) for slot, block in zip(slots, blocks, strict=True)]

    def put_summing(self, slots: AnySlots, blocks: Sequence[Block], deadline: Nanos) -> list[FetchResult]:
        return put_with_checksums(self.put, slots, blocks, deadline)

    def close(self) -> None:
        pass

    def _get(self, slot: Slot, into: MutableBlock) -> BlockOutcome:
        address = self._machine.readable(self._digest, slot)
        if address is None or not self._tier.read(address, into):
            return BlockOutcome.GONE
        return BlockOutcome.MOVED if crc32c(pieces(into)) == slot.crc32c else BlockOutcome.CORRUPT

    def _put(self, slot: Slot, block: Block) -> BlockOutcome:
        address = self._machine.writable(self._digest, slot)
        if address is None or crc32c(pieces(block)) != slot.crc32c:
            return BlockOutcome.GONE if address is None else BlockOutcome.CORRUPT
        return BlockOutcome.MOVED if self._tier.write(address, block) else BlockOutcome.GONE
