"""Limits of client connections: which ones a port admits, which one it closes to admit another, and slow readers.

Rules:

1. A connection that waits for its client is in one of the groups of `WaitingFor`. A connection whose request is being
   served is never closed for another one.
2. If the table is full, a new connection displaces a waiting connection, which is closed. Connections that have waited
   for their client's next bytes for `GRACE_SECONDS` are displaced first, in this order: silent connections, closing
   ones, connections with an incomplete head. If no connection has waited that long for bytes, the connection that has
   waited longest is displaced, which may be an idle one. A connection with an incomplete body is displaced only if no
   other connection waits. So the connections of one burst do not displace each other while others have been idle for
   longer. If no connection waits, the new connection is refused.
3. One client address has a limited share of the connections. At that limit, a new connection displaces only connections
   of its own address. So if the share is below 1, one address cannot shut out the clients of other addresses.
4. Every operation takes constant time on average. The start of a request only sets a flag (`ConnectionSlot.served`). The
   search for a connection to displace removes the connections with this flag from their groups, each at most once per
   request.
5. In each period a client must read all bytes that waited at the beginning of the period, or at least a minimum number
   of bytes (`SlowReader`). A client that reads one byte now and then is therefore disconnected like one that reads
   nothing. A client that reads a long answer over a slow network is not. How much may wait for a slow client is limited
   by the connections themselves (`fleet.net.http.server`, rule 4; `fleet.net.grpc.http2_call`).
"""

from collections import OrderedDict
from enum import IntEnum
from ipaddress import IPv6Address
from math import ceil
from typing import Generic, Protocol, TypeVar

from msgspec import Struct

GRACE_SECONDS = 1.0
"""A silent or closing connection, or one with an incomplete head, is displaced before any idle connection if it has waited this long.

The time covers several round trips around the world with a retransmission, and is a tenth of the default first-byte
timeout.
"""

ORDER_SECONDS = 0.1
"""Connections that began to wait within this time of each other may be displaced in any order. Therefore a connection
whose requests follow each other quickly need not be moved within its group."""

# One customer usually has an IPv6 network with a prefix of this many bits. Addresses with the same prefix count as one.
IPV6_NETWORK_BITS = 64


class WaitingFor(IntEnum):
    """Groups of connections that may be displaced, in the order in which those that have waited for `GRACE_SECONDS` are displaced."""

    SILENT = 0
    """The client has never sent a byte."""

    CLOSING = 1
    """The last answer was sent, and the client has not closed the connection yet."""

    HEAD = 2
    """The head of a request has begun and is not complete."""

    IDLE = 3
    """The client may send another request."""

    BODY = 4
    """The body of a request has begun and is not complete."""


_OWING = (WaitingFor.SILENT, WaitingFor.CLOSING, WaitingFor.HEAD)

Client = TypeVar("Client")


class ConnectionSlot(Generic[Client]):
    """The slot of one connection in the table; `ConnectionTable.admit` creates it."""

    __slots__ = ("address", "client", "group", "left", "served", "since")

    def __init__(self, client: Client, address: "_ClientAddress[Client]") -> None:
        self.client = client
        self.address = address
        self.group: WaitingFor | None = None
        """The group whose lists contain the slot; None while the slot is in no group."""
        self.since = 0.0
        """The time at which the connection began to wait in `group`; up to `ORDER_SECONDS` too early."""
        self.served = False
        """True while a request is being served. The connection sets it, and `ConnectionTable.mark_waiting` clears it."""
        self.left = False
        """True after the slot was released or displaced."""


class ConnectionAdmission(Struct, Generic[Client], frozen=True):
    """Result of `ConnectionTable.admit` for a new connection."""

    slot: ConnectionSlot[Client] | None = None
    """The slot of the new connection; None if the table refused it."""

    displaced: Client | None = None
    """The displaced connection, which has left the table, and which the caller must close now; None if there is none."""

    displaced_silent: bool = False
    """True if the displaced connection has never sent a byte. Its first request may be on its way."""


class ConnectionTable(Generic[Client]):
    def __init__(self, most: int, address_share: float) -> None:
        """Create an empty table for `most` connections; one client address may have the part `address_share` of them."""
        assert 0 < address_share <= 1
        self.displaced = 0  # number of connections that were displaced since the start
        self.refused = 0  # number of new connections that were refused since the start
        self._most = most
        self._per_address = ceil(most * address_share)
        self._connections = 0
        self._addresses: dict[str, _ClientAddress[Client]] = {}
        self._waiting: _Groups[Client] = _Groups()

    def __len__(self) -> int:
        return self._connections

    def admit(self, client: Client, address: str, now: float) -> ConnectionAdmission[Client]:
        """Admit a connection as a silent one if there is a slot or one can be freed; otherwise refuse it.

        `address` comes from `client_key`; `now` is in seconds by a monotonic clock.
        """
        known = self._addresses.get(address)
        if known is not None and known.connections >= self._per_address:
            displaced = self._next_to_displace(known.waiting, now)
        elif self._connections >= self._most:
            displaced = self._next_to_displace(self._waiting, now)
        else:
            return ConnectionAdmission(self._add(client, address, now))
        if displaced is None:
            self.refused += 1
            return ConnectionAdmission()
        self.displaced += 1
        silent = displaced.group is WaitingFor.SILENT
        self.remove(displaced)
        return ConnectionAdmission(self._add(client, address, now), displaced.client, silent)

    def mark_waiting(self, slot: ConnectionSlot[Client], group: WaitingFor, now: float) -> None:
        """Record that a connection waits in `group` from now on. A connection that has left the table is ignored.

        A connection that has waited in this group all the time keeps its position. A connection that was served meanwhile
        moves to the end of the group, unless it began to wait there less than `ORDER_SECONDS` ago.
        """
        if slot.left:
            return
        if slot.group is not group:
            self._leave_group(slot)
            slot.group = group
            slot.since = now
            self._waiting.add(slot, group)
            slot.address.waiting.add(slot, group)
        elif slot.served and now - slot.since >= ORDER_SECONDS:
            slot.since = now
            self._waiting.move_to_end(slot, group)
            slot.address.waiting.move_to_end(slot, group)
        slot.served = False

    def remove(self, slot: ConnectionSlot[Client]) -> None:
        """Release a slot. A second call has no effect."""
        if slot.left:
            return
        slot.left = True
        self._leave_group(slot)
        self._connections -= 1
        slot.address.connections -= 1
        if not slot.address.connections:
            del self._addresses[slot.address.name]

    def check(self) -> None:
        """Assert the invariants of the table; for tests."""
        assert 0 <= self._connections <= self._most
        assert sum(each.connections for each in self._addresses.values()) == self._connections
        assert all(0 < each.connections <= self._per_address for each in self._addresses.values())
        for group in WaitingFor:
            members = self._waiting.of(group)
            assert all(slot.group is group and not slot.left for slot in members)
            of_addresses = [slot for each in self._addresses.values() for slot in each.waiting.of(group)]
            assert set(members) == set(of_addresses)
            assert len(members) == len(of_addresses)
            since = [slot.since for slot in members]
            assert since == sorted(since)

    def _next_to_displace(self, waiting: "_Groups[Client]", now: float) -> ConnectionSlot[Client] | None:
        """Return the slot of `waiting` to displace next (rule 2); None if no connection of `waiting` waits for its client."""
        longest: ConnectionSlot[Client] | None = None
        for group in _OWING:
            slot = self._longest_waiting(waiting, group)
            if slot is not None and now - slot.since >= GRACE_SECONDS:
                return slot
            if slot is not None and (longest is None or slot.since < longest.since):
                longest = slot
        idle = self._longest_waiting(waiting, WaitingFor.IDLE)
        if idle is not None and (longest is None or idle.since <= longest.since):
            return idle
        return longest or self._longest_waiting(waiting, WaitingFor.BODY)

    def _longest_waiting(self, waiting: "_Groups[Client]", group: WaitingFor) -> ConnectionSlot[Client] | None:
        """Return the slot that has waited longest in a group of `waiting`; None if there is none. Drop slots that are being served."""
        while (slot := waiting.longest_waiting(group)) is not None and slot.served:
            self._leave_group(slot)
        return slot

    def _add(self, client: Client, address: str, now: float) -> ConnectionSlot[Client]:
        known = self._addresses.get(address)
        if known is None:
            known = self._addresses[address] = _ClientAddress(address)
        known.connections += 1
        self._connections += 1
        slot = ConnectionSlot(client, known)
        self.mark_waiting(slot, WaitingFor.SILENT, now)
        return slot

    def _leave_group(self, slot: ConnectionSlot[Client]) -> None:
        if slot.group is not None:
            self._waiting.discard(slot, slot.group)
            slot.address.waiting.discard(slot, slot.group)
            slot.group = None


class _Groups(Generic[Client]):
    """Keeps the slots of each group in the order in which they entered.

    A group takes memory only after its first use.
    """

    __slots__ = ("_members",)

    def __init__(self) -> None:
        # A list, indexed by the group's number, because hashing a member of an enum for a dict is slow.
        self._members: list[OrderedDict[ConnectionSlot[Client], None] | None] = [None] * len(WaitingFor)

    def add(self, slot: ConnectionSlot[Client], group: WaitingFor) -> None:
        members = self._members[group]
        if members is None:
            members = self._members[group] = OrderedDict()
        members[slot] = None

    def move_to_end(self, slot: ConnectionSlot[Client], group: WaitingFor) -> None:
        members = self._members[group]
        assert members is not None
        members.move_to_end(slot)

    def discard(self, slot: ConnectionSlot[Client], group: WaitingFor) -> None:
        members = self._members[group]
        assert members is not None
        del members[slot]

    def of(self, group: WaitingFor) -> list[ConnectionSlot[Client]]:
        return list(self._members[group] or ())

    def longest_waiting(self, group: WaitingFor) -> ConnectionSlot[Client] | None:
        """Return the slot that has been in a group longest; None if the group is empty."""
        members = self._members[group]
        return next(iter(members)) if members else None


class _ClientAddress(Generic[Client]):
    __slots__ = ("connections", "name", "waiting")

    def __init__(self, name: str) -> None:
        self.name = name
        self.connections = 0
        self.waiting: _Groups[Client] = _Groups()


def client_key(peername: object) -> str:
    """Return the key under which connections of one client are counted.

    It is an IPv4 address, the /64 network of an IPv6 address, or "" for all clients over Unix sockets.
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


class _Buffer(Protocol):
    """The part of a transport that `WriteBufferCounter` needs."""

    def get_write_buffer_size(self) -> int: ...


class WriteBufferCounter:
    """Counts the bytes that pass through the write buffer of a transport.

    The buffer's size is read only when the transport pauses and resumes writing, so a write costs nothing more.
    Bytes that enter and leave the buffer between two pauses are not counted.
    """

    __slots__ = ("_left", "written")

    def __init__(self) -> None:
        self.written = 0
        """Number of bytes that were in the buffer at the pauses of the transport so far; each byte counts once."""
        self._left = 0  # bytes in the buffer when writing was last resumed

    def paused(self, transport: _Buffer) -> None:
        """Count the waiting bytes, because the transport has paused writing."""
        self.written += transport.get_write_buffer_size() - self._left

    def resumed(self, transport: _Buffer) -> None:
        """Record the bytes that are still in the buffer, because the transport has resumed writing."""
        self._left = transport.get_write_buffer_size()


class SlowReader:
    """Decides whether one client reads too slowly. The owner calls `overdue` regularly, with increasing times."""

    __slots__ = ("_began", "_goal", "_min_bytes", "_period")

    def __init__(self, period: float, min_bytes: int) -> None:
        """Create the limit for a client that has nothing to read.

        In each `period`, the client must read `min_bytes`, or all waiting bytes if these are fewer. The period has the
        same unit as the times given to `overdue`.
        """
        self._period = period
        self._min_bytes = min_bytes
        self._began: float | None = None  # start of the present period; None while no bytes wait
        self._goal = 0

    def overdue(self, now: float, waiting: int, written: int) -> bool:
        """Return whether a period has passed in which the client has read too little. A client that has read enough begins a new period.

        Args:
            now: The present time.
            waiting: Number of bytes that wait for the client now; 0 means that the client has read everything.
            written: Number of all bytes sent to the client so far. Bytes that never had to wait may be left out.
        """
        if not waiting:
            self._began = None
            return False
        taken = written - waiting
        if self._began is None or taken >= self._goal:
            self._began = now
            self._goal = taken + min(waiting, self._min_bytes)
            return False
        return now - self._began > self._period
