"""Connection table of one port: which connections are admitted, and which one gives way to a newcomer.

Rules:

1. A waiting connection is in one of the groups of `WaitingFor`. A connection whose request is being served never gives
   way.
2. In a full table a newcomer displaces a waiting connection. First go connections that have owed bytes for
   `GRACE_SECONDS`: silent ones, then closing ones, then incomplete heads. If there is none, the one goes that has
   waited longest, including idle ones; incomplete bodies go last. So the connections of one burst do not displace each
   other while others have been idle for longer. If no connection waits, the newcomer is refused.
3. One client address has at most `per_address` connections. At that limit it makes room among its own connections only,
   so it can never shut out another address.
4. Every operation takes constant time. The start of a request is only noted; a newcomer that meets such a connection
   removes it from its group, once per request.
"""

from collections import OrderedDict
from enum import IntEnum
from ipaddress import IPv6Address
from math import ceil
from typing import Generic, TypeVar

from msgspec import Struct

GRACE_SECONDS = 1.0
"""The time for which a connection may owe the next bytes before it goes ahead of idle ones.

This covers several round trips around the world with a retransmission, and is a tenth of the default first-byte
timeout.
"""

IPV6_NETWORK_BITS = 64  # the usual size of one customer's network, so its addresses count as one


class WaitingFor(IntEnum):
    """Groups of connections that may give way, in the order in which they do after `GRACE_SECONDS`."""

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


_OWING = (WaitingFor.SILENT, WaitingFor.CLOSING, WaitingFor.HEAD)

Client = TypeVar("Client")


class ConnectionSlot(Generic[Client]):
    """Slot of one connection in the table; `ConnectionTable.admit` makes it."""

    __slots__ = ("address", "client", "group", "left", "served", "since")

    def __init__(self, client: Client, address: "_ClientAddress[Client]") -> None:
        self.client = client
        self.address = address
        self.group: WaitingFor | None = None
        """The group whose lists hold the slot; None after it has left them."""
        self.since = 0.0
        """The time at which the connection began to wait in that group."""
        self.served = False
        """True while a request is being served. The connection sets it, and `ConnectionTable.waits` clears it."""
        self.left = False
        """True after the slot was given up or displaced."""


class ConnectionAdmission(Struct, Generic[Client], frozen=True):
    """Answer to a newcomer."""

    place: ConnectionSlot[Client] | None = None
    """The slot of the newcomer; None if the table refused it."""

    displaced: Client | None = None
    """The connection that must be closed now; it has left the table."""


class ConnectionTable(Generic[Client]):
    def __init__(self, most: int, address_share: float) -> None:
        """Create an empty table.

        Args:
            most: Largest number of connections.
            address_share: Largest part of `most` for one client address, above 0; 1 means all.
        """
        assert 0 < address_share <= 1
        self.displaced = 0  # connections that gave way since the start
        self.refused = 0  # newcomers that were refused since the start
        self._most = most
        self._per_address = ceil(most * address_share)
        self._connections = 0
        self._addresses: dict[str, _ClientAddress[Client]] = {}
        self._waiting: _Groups[Client] = _Groups()

    def __len__(self) -> int:
        return self._connections

    def admit(self, client: Client, address: str, now: float) -> ConnectionAdmission[Client]:
        """Admit a connection as a silent one if there is a slot or one can be freed.

        Args:
            client: The connection.
            address: The client's key from `client_key`.
            now: The present time in seconds by a monotonic clock.
        """
        known = self._addresses.get(address)
        if known is not None and known.connections >= self._per_address:
            displaced = self._first(known.waiting, now)
        elif self._connections >= self._most:
            displaced = self._first(self._waiting, now)
        else:
            return ConnectionAdmission(self._enter(client, address, now))
        if displaced is None:
            self.refused += 1
            return ConnectionAdmission()
        self.displaced += 1
        self.remove(displaced)
        return ConnectionAdmission(self._enter(client, address, now), displaced.client)

    def waits(self, place: ConnectionSlot[Client], group: WaitingFor, now: float) -> None:
        """Note that a connection waits from now on. A connection that has left the table is ignored.

        A connection that has waited in the same group all the time keeps its turn; one that was served goes to the end.
        """
        if place.left:
            return
        if place.group is not group:
            self._leave_group(place)
            place.group = group
            place.since = now
            self._waiting.add(place, group)
            place.address.waiting.add(place, group)
        elif place.served:
            place.since = now
            self._waiting.to_end(place, group)
            place.address.waiting.to_end(place, group)
        place.served = False

    def remove(self, place: ConnectionSlot[Client]) -> None:
        """Give up a slot. A second call has no effect."""
        if place.left:
            return
        place.left = True
        self._leave_group(place)
        self._connections -= 1
        place.address.connections -= 1
        if not place.address.connections:
            del self._addresses[place.address.name]

    def check(self) -> None:
        """Assert the invariants of the table."""
        assert 0 <= self._connections <= self._most
        assert sum(each.connections for each in self._addresses.values()) == self._connections
        assert all(0 < each.connections <= self._per_address for each in self._addresses.values())
        for group in WaitingFor:
            members = self._waiting.of(group)
            assert all(place.group is group and not place.left for place in members)
            of_addresses = [place for each in self._addresses.values() for place in each.waiting.of(group)]
            assert set(members) == set(of_addresses)
            assert len(members) == len(of_addresses)
            since = [place.since for place in members]
            assert since == sorted(since)

    def _first(self, waiting: "_Groups[Client]", now: float) -> ConnectionSlot[Client] | None:
        """Return the slot to give up next; None if every connection is being served."""
        longest: ConnectionSlot[Client] | None = None
        for group in _OWING:
            place = self._longest(waiting, group)
            if place is not None and now - place.since >= GRACE_SECONDS:
                return place
            if place is not None and (longest is None or place.since < longest.since):
                longest = place
        idle = self._longest(waiting, WaitingFor.IDLE)
        if idle is not None and (longest is None or idle.since <= longest.since):
            return idle
        return longest or self._longest(waiting, WaitingFor.BODY)

    def _longest(self, waiting: "_Groups[Client]", group: WaitingFor) -> ConnectionSlot[Client] | None:
        """Return the slot of that group that has waited longest; None if the group is empty."""
        while (first := waiting.first(group)) is not None and first.served:
            self._leave_group(first)
        return first

    def _enter(self, client: Client, address: str, now: float) -> ConnectionSlot[Client]:
        known = self._addresses.get(address)
        if known is None:
            known = self._addresses[address] = _ClientAddress(address)
        known.connections += 1
        self._connections += 1
        place = ConnectionSlot(client, known)
        self.waits(place, WaitingFor.SILENT, now)
        return place

    def _leave_group(self, place: ConnectionSlot[Client]) -> None:
        if place.group is not None:
            self._waiting.discard(place, place.group)
            place.address.waiting.discard(place, place.group)
            place.group = None


class _Groups(Generic[Client]):
    """Slots by group, each group in the order of entry. A group takes memory only after its first use."""

    __slots__ = ("_members",)

    def __init__(self) -> None:
        # By position and not by key, because hashing a member of an enum is slow.
        self._members: list[OrderedDict[ConnectionSlot[Client], None] | None] = [None] * len(WaitingFor)

    def add(self, place: ConnectionSlot[Client], group: WaitingFor) -> None:
        members = self._members[group]
        if members is None:
            members = self._members[group] = OrderedDict()
        members[place] = None

    def to_end(self, place: ConnectionSlot[Client], group: WaitingFor) -> None:
        members = self._members[group]
        assert members is not None
        members.move_to_end(place)

    def discard(self, place: ConnectionSlot[Client], group: WaitingFor) -> None:
        members = self._members[group]
        assert members is not None
        del members[place]

    def of(self, group: WaitingFor) -> list[ConnectionSlot[Client]]:
        return list(self._members[group] or ())

    def first(self, group: WaitingFor) -> ConnectionSlot[Client] | None:
        """Return the slot that has been in that group longest; None if the group is empty."""
        members = self._members[group]
        return next(iter(members)) if members else None


class _ClientAddress(Generic[Client]):
    __slots__ = ("connections", "name", "waiting")

    def __init__(self, name: str) -> None:
        self.name = name
        self.connections = 0
        self.waiting: _Groups[Client] = _Groups()


def client_key(peername: object) -> str:
    """Return the key for counting: an IPv4 address, the /64 network of an IPv6 address, or "" for Unix sockets."""
    if not isinstance(peername, tuple) or not peername:
        return ""
    host = str(peername[0])
    if ":" not in host:
        return host
    address = IPv6Address(host.partition("%")[0])
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return f"{int(address) >> (128 - IPV6_NETWORK_BITS):x}/{IPV6_NETWORK_BITS}"
