"""Connection table of one port: which connections are admitted, and which one gives way to a newcomer.

Rules:

1. A connection that waits is in one of the groups of `Waiting`. A connection whose request is being served waits for nothing
   and never gives way.
2. When the table is full, a newcomer takes the place of one that waits: of the first group that has any, the connection that
   has been in it longest. Where no connection waits, the newcomer is refused.
3. One client address has at most `per_address` connections. An address that has so many makes room among its own connections
   only, so it can never shut out another address.
4. Every operation takes constant time, whatever the number of connections.
"""

from collections import OrderedDict
from collections.abc import Hashable
from enum import IntEnum
from ipaddress import IPv6Address
from math import ceil
from typing import Generic, TypeVar

from msgspec import Struct

IPV6_NETWORK_BITS = 64  # what one customer usually has, so that its addresses count as one


class Waiting(IntEnum):
    """Groups of connections that may give way; the first group gives way first."""

    SILENT = 0
    """The client has never sent a byte."""

    CLOSING = 1
    """The last answer was sent, and the client has not closed yet."""

    HEAD = 2
    """The head of a request has begun and is not complete."""

    IDLE = 3
    """The client may send another request."""

    BODY = 4
    """The body of a request has begun and is not complete."""


Client = TypeVar("Client", bound=Hashable)


class Admission(Struct, Generic[Client], frozen=True):
    """The answer to a newcomer."""

    admitted: bool
    displaced: Client | None = None
    """The connection that has to be closed now; it has left the table."""


class ConnectionTable(Generic[Client]):
    def __init__(self, most: int, address_share: float) -> None:
        """Begin without connections.

        Args:
            most: Connections at once.
            address_share: Part of `most` that one address may have, above 0; 1: all.
        """
        assert 0 < address_share <= 1
        self.displaced = 0  # connections that gave way, since the beginning
        self.refused = 0  # newcomers that found no place, likewise
        self._most = most
        self._per_address = ceil(most * address_share)
        self._entries: dict[Client, _Entry[Client]] = {}
        self._addresses: dict[str, _Address[Client]] = {}
        self._waiting: _Groups[Client] = _Groups()

    def __len__(self) -> int:
        return len(self._entries)

    def admit(self, client: Client, address: str) -> Admission[Client]:
        """Take a newcomer in, as one that is silent, if there is a place for it or one can be made.

        Args:
            client: The connection.
            address: Its client's address, as `counted_address` gives it.
        """
        assert client not in self._entries
        known = self._addresses.get(address)
        displaced = None
        if known is not None and known.connections >= self._per_address:
            displaced = known.waiting.first()
        elif len(self._entries) >= self._most:
            displaced = self._waiting.first()
        else:
            self._enter(client, address)
            return Admission(admitted=True)
        if displaced is None:
            self.refused += 1
            return Admission(admitted=False)
        self.displaced += 1
        self.remove(displaced)
        self._enter(client, address)
        return Admission(admitted=True, displaced=displaced)

    def waits(self, client: Client, group: Waiting) -> None:
        """Note that a connection waits from now on; nothing changes where it is in that group already."""
        entry = self._entries.get(client)
        if entry is None or entry.group is group:
            return
        if entry.group is not None:
            self._leave(client, entry)
        entry.group = group
        self._waiting.add(client, group)
        entry.address.waiting.add(client, group)

    def serves(self, client: Client) -> None:
        """Note that a request of a connection is being served."""
        entry = self._entries.get(client)
        if entry is not None and entry.group is not None:
            self._leave(client, entry)
            entry.group = None

    def remove(self, client: Client) -> None:
        """Forget a connection, if it is known."""
        entry = self._entries.pop(client, None)
        if entry is None:
            return
        if entry.group is not None:
            self._leave(client, entry)
        address = entry.address
        address.connections -= 1
        if not address.connections:
            del self._addresses[address.name]

    def check(self) -> None:
        """Assert what always holds."""
        assert len(self._entries) <= self._most
        assert sum(each.connections for each in self._addresses.values()) == len(self._entries)
        for address in self._addresses.values():
            assert 0 < address.connections <= self._per_address
        for group in Waiting:
            members = {client for client, entry in self._entries.items() if entry.group is group}
            assert members == set(self._waiting.of(group))
            assert members == {client for each in self._addresses.values() for client in each.waiting.of(group)}

    def _enter(self, client: Client, address: str) -> None:
        known = self._addresses.get(address)
        if known is None:
            known = self._addresses[address] = _Address(address)
        known.connections += 1
        self._entries[client] = _Entry(known)
        self.waits(client, Waiting.SILENT)

    def _leave(self, client: Client, entry: "_Entry[Client]") -> None:
        assert entry.group is not None
        self._waiting.discard(client, entry.group)
        entry.address.waiting.discard(client, entry.group)


class _Groups(Generic[Client]):
    """Connections by group, each in the order in which they entered it. A group takes memory once it was needed."""

    __slots__ = ("_members",)

    def __init__(self) -> None:
        # By position and not by key, because hashing a member of an enum is slow.
        self._members: list[OrderedDict[Client, None] | None] = [None] * len(Waiting)

    def add(self, client: Client, group: Waiting) -> None:
        members = self._members[group]
        if members is None:
            members = self._members[group] = OrderedDict()
        members[client] = None

    def discard(self, client: Client, group: Waiting) -> None:
        members = self._members[group]
        assert members is not None
        del members[client]

    def of(self, group: Waiting) -> list[Client]:
        return list(self._members[group] or ())

    def first(self) -> Client | None:
        """Return the connection that gives way next."""
        for members in self._members:
            if members:
                return next(iter(members))
        return None


class _Address(Generic[Client]):
    __slots__ = ("connections", "name", "waiting")

    def __init__(self, name: str) -> None:
        self.name = name
        self.connections = 0
        self.waiting: _Groups[Client] = _Groups()


class _Entry(Generic[Client]):
    __slots__ = ("address", "group")

    def __init__(self, address: "_Address[Client]") -> None:
        self.address = address
        self.group: Waiting | None = None


def counted_address(peername: object) -> str:
    """Return what connections are counted by: an IPv4 address, the /64 network of an IPv6 address, or "" for Unix sockets.

    Args:
        peername: What the transport says about its peer.
    """
    if not isinstance(peername, tuple) or not peername:
        return ""
    host = str(peername[0])
    if ":" not in host:
        return host
    address = IPv6Address(host.partition("%")[0])
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return f"{int(address) >> (128 - IPV6_NETWORK_BITS):x}/{IPV6_NETWORK_BITS}"
