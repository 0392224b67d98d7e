"""Unproven connections: limits the connections that have not proven the secret yet, and chooses which to close.

A connection leaves the list when it has proven the secret, so silent connections never displace proven ones. When the
list is full, the oldest connection of the address with the most connections is closed. A host with many silent
connections therefore displaces its own connections first, and a new client is always served.
"""

from collections.abc import Hashable
from typing import Generic, TypeVar

Connection = TypeVar("Connection", bound=Hashable)


class UnprovenConnections(Generic[Connection]):
    """Holds the unproven connections of one port, and limits their number."""

    def __init__(self, limit: int):
        assert limit >= 1, limit
        self._limit = limit
        # Connections by address; within an address, the oldest connection comes first.
        self._by_address: dict[str, dict[Connection, None]] = {}
        self._addresses: dict[Connection, str] = {}

    def __len__(self) -> int:
        return len(self._addresses)

    def __contains__(self, connection: Connection) -> bool:
        return connection in self._addresses

    def add(self, connection: Connection, address: str) -> Connection | None:
        """Add a connection from this address.

        If the list was full, first remove another connection from it, and return the removed one: the caller has to
        close it. Otherwise return None.
        """
        gone = self._crowding_out() if len(self) >= self._limit else None
        self._by_address.setdefault(address, {})[connection] = None
        self._addresses[connection] = address
        return gone

    def discard(self, connection: Connection) -> None:
        """Remove a connection that is proven or closed; do nothing if it is not in the list."""
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
