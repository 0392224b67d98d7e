"""Session pins: record which blocks paused sessions keep in the pool, and limit their size.

Rules:

1. A session has at most one pin in each namespace. A new pin of the session replaces the former one.
2. All session pins together have a limit in bytes. A block counts once, in whole pages, even if several sessions pin
   it. If a chain does not fit, only its first blocks are pinned, because blocks after a missing one are useless: a
   match stops at the first missing block.
3. A session pin is a lease of the pool machine: its blocks are pinned until its deadline, or until it is released. A
   block that is condemned is removed from all session pins.
"""

from collections.abc import Iterator, Sequence

from kvstore.messages import LeaseId
from kvstore.pool.extents import occupied_bytes
from kvstore.pool.open_namespaces import StoredBlock

SessionPinKey = tuple[bytes, str]
"""Key of a session pin: the digest of the namespace, and the name of the session."""


class SessionPins:
    """Records all session pins of a node, and limits their size."""

    def __init__(self, limit_bytes: int):
        self._limit_bytes = limit_bytes
        self._holders: dict[StoredBlock, int] = {}
        self._by_session: dict[SessionPinKey, LeaseId] = {}
        self.bytes = 0

    def fitting(self, blocks: Sequence[StoredBlock]) -> int:
        """Return how many blocks, from the first of `blocks` on, can be pinned without exceeding the limit."""
        left = self._limit_bytes - self.bytes
        for count, block in enumerate(blocks):
            if block not in self._holders:
                left -= occupied_bytes(block.length)
            if left < 0:
                return count
        return len(blocks)

    def begin(self, key: SessionPinKey, blocks: Sequence[StoredBlock], lease_id: LeaseId) -> None:
        """Record that the lease `lease_id` pins these blocks for the session of `key`."""
        assert key not in self._by_session, "the session's former pin has not ended"
        self._by_session[key] = lease_id
        for block in blocks:
            if block not in self._holders:
                self.bytes += occupied_bytes(block.length)
            self._holders[block] = self._holders.get(block, 0) + 1

    def end(self, key: SessionPinKey, blocks: Sequence[StoredBlock]) -> None:
        """Record that the session pin of `key`, which was on these blocks, has ended."""
        del self._by_session[key]
        for block in blocks:
            self.let_go(block)

    def let_go(self, block: StoredBlock) -> None:
        """Record that this block was removed from one session pin, or that the pin has ended."""
        if self._holders[block] > 1:
            self._holders[block] -= 1
            return
        del self._holders[block]
        self.bytes -= occupied_bytes(block.length)

    def lease_of(self, key: SessionPinKey) -> LeaseId | None:
        return self._by_session.get(key)

    def leases(self) -> Iterator[LeaseId]:
        return iter(self._by_session.values())

    def check(self, held: set[StoredBlock]) -> None:
        """Assert that sessions pin exactly the blocks of `held`, and that these keep the limit; for tests."""
        assert held == self._holders.keys()
        assert self.bytes == sum(occupied_bytes(block.length) for block in held) <= self._limit_bytes
        assert all(count > 0 for count in self._holders.values())

    def __contains__(self, block: StoredBlock) -> bool:
        return block in self._holders
