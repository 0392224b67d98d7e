"""Which blocks sessions keep while they wait for something else, and how much that may be. Pure.

Rules:

1. A session has one hold a namespace; a new one takes the place of the old one.
2. A block is charged once, in whole pages, however many sessions hold it. All holds together have a limit: what would
   exceed it is refused, from the end of the chain, since the start is what every continuation needs.
3. A hold is a lease of the machine: it has a deadline, and its blocks are pinned until then. Bad blocks are let go.
"""

from collections.abc import Iterator, Sequence

from kvstore.messages import LeaseId
from kvstore.pool.extents import occupied_bytes
from kvstore.pool.open_namespaces import StoredBlock

SessionPinKey = tuple[bytes, str]
"""Digest of the namespace, and session."""


class SessionPins:
    """All holds of a node."""

    def __init__(self, limit_bytes: int):
        self._limit_bytes = limit_bytes
        self._holders: dict[StoredBlock, int] = {}
        self._by_session: dict[SessionPinKey, LeaseId] = {}
        self.bytes = 0

    def fitting(self, blocks: Sequence[StoredBlock]) -> int:
        """How many leading blocks may be held beside what is."""
        left = self._limit_bytes - self.bytes
        for count, block in enumerate(blocks):
            if block not in self._holders:
                left -= occupied_bytes(block.length)
            if left < 0:
                return count
        return len(blocks)

    def begin(self, key: SessionPinKey, blocks: Sequence[StoredBlock], lease_id: LeaseId) -> None:
        """Those blocks are held under that lease."""
        assert key not in self._by_session, "the former hold of the session has not ended"
        self._by_session[key] = lease_id
        for block in blocks:
            if block not in self._holders:
                self.bytes += occupied_bytes(block.length)
            self._holders[block] = self._holders.get(block, 0) + 1

    def end(self, key: SessionPinKey, blocks: Sequence[StoredBlock]) -> None:
        """The lease is over."""
        del self._by_session[key]
        for block in blocks:
            self.let_go(block)

    def let_go(self, block: StoredBlock) -> None:
        """One of its holders does not keep the block any more."""
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
        """Asserts that these are the blocks, and within the limit."""
        assert held == self._holders.keys()
        assert self.bytes == sum(occupied_bytes(block.length) for block in held) <= self._limit_bytes
        assert all(count > 0 for count in self._holders.values())

    def __contains__(self, block: StoredBlock) -> bool:
        return block in self._holders
