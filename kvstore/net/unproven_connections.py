"""Newcomers: connections that have not proven yet who they are, and which of them goes when there are too many. Pure.

A connection that is proven leaves this list and counts here no more, so that strangers who say nothing cost those who can
prove the secret no place. When a newcomer finds the list full, the oldest of the address that has most of them goes: one
host with many silent connections pushes out its own first, and a client that comes last always has its turn.
"""

from collections.abc import Hashable
from typing import Generic, TypeVar

Connection = TypeVar("Connection", bound=Hashable)


class UnprovenConnections(Generic[Connection]):
    """Holds the newcomers of one port, and chooses which of them goes."""

    def __init__(self, limit: int):
        assert limit >= 1, limit
        self._limit = limit
        self._by_address: dict[str, dict[Connection, None]] = {}  # oldest first
        self._addresses: dict[Connection, str] = {}

    def __len__(self) -> int:
        return len(self._addresses)

    def add(self, connection: Connection, address: str) -> Connection | None:
        """Note a connection of that address, and return the one that has to be cut for it, which is forgotten."""
        gone = self._crowding_out() if len(self) >= self._limit else None
        self._by_address.setdefault(address, {})[connection] = None
        self._addresses[connection] = address
        return gone

    def discard(self, connection: Connection) -> None:
        """Forget a connection that is proven or over; one that is not here is fine."""
        address = self._addresses.pop(connection, None)
        if address is None:
            return
        others = self._by_address[address]
        del others[connection]
        if not others:
            del self._by_address[address]

    def _crowding_out(self) -> Connection:
        most = max(self._by_address.values(), key=len)
        gone = next(iter(most))
        self.discard(gone)
        return gone
