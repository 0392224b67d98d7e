"""The client of a store node: synchronous, for use inside an engine's processes and threads.

Rules:

1. After `connect` or `join` nothing here raises because of the node: a node that is away, slow, full or restarted means fewer
   blocks, counted, and a log line when that begins (`kvstore.client.node_connection`). What raises is a bug of the caller.
2. What was matched in one process can be read in another that has a client of the same node.
3. Ranks of one engine, each in its process, share whole blocks (`kvstore.layouts.shards`): one reserves, each writes its share, and
   the one that reserved publishes. Writing shares takes the node's own memory; they can be read by every way.
"""

import logging
import os
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

import numpy as np
from msgspec import structs

from kvstore.block import BlockHash
from kvstore.buffers import Block, MutableBlock, pieces
from kvstore.client.node_connection import NodeConnection, earlier
from kvstore.client.node_session import NodeSession
from kvstore.clock import MILLISECOND, Clock, Nanos, nanos, seconds
from kvstore.errors import StoreUnreachable
from kvstore.layouts.rank_shards import RankShard, WriteGrant
from kvstore.messages import (
    NO_RESERVATION,
    BlockOutcome,
    ClientWriteReservation,
    DataPath,
    EvacuationResult,
    LeaseId,
    Match,
    SessionPinResult,
    Slots,
    Stats,
    StoreClientCounters,
    merge_promoted,
)
from kvstore.namespace import KvNamespace
from kvstore.protocol import wire
from kvstore.security.credentials import Credentials
from kvstore.system_clock import MonotonicClock
from kvstore.transports.shared_memory import SharedMemoryTransport
from kvstore.v1 import blocks_pb2 as pb

SLOWEST_BYTES_PER_SECOND = 100_000_000
"""A way slower than this is given up: computing the blocks again is faster."""

LOOK_AGAIN_SECONDS = 0.002  # between looks at a load; a batch of it takes longer than that from any disk

LEAST_BATCH = 32  # blocks
BATCH_BYTES = 16 << 20  # of more blocks than that where they are small: a batch costs something

MOVED, CORRUPT = BlockOutcome.MOVED, BlockOutcome.CORRUPT
"""Looked up once: a member of an enumeration is slow to find for each block."""

log = logging.getLogger(__name__)


def batch_blocks(block_bytes: int) -> int:
    """How many blocks are asked for at a time, so that a source that has to copy does not copy a whole chain at once.

    Its memory for a block is its own again once so many more have been asked for, and no sooner.
    """
    return max(LEAST_BATCH, BATCH_BYTES // block_bytes)


class StoreClient:
    """One namespace of one node; see the module. Thread-safe. Made by `connect` or `join`."""

    def __init__(self, connection: NodeConnection, namespace: KvNamespace, *, call_timeout: Nanos, clock: Clock):
        self.connection = connection
        self._namespace = namespace
        self._call_timeout = call_timeout
        self._clock = clock
        self._owner = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"

    @classmethod
    def connect(
        cls,
        address: str,
        namespace: KvNamespace,
        *,
        timeout_seconds: float = 5.0,
        call_timeout_seconds: float = 1.0,
        prefer: Sequence[str] = (DataPath.SHM, DataPath.NIXL, DataPath.TCP),
        credentials: Credentials | None = None,
        clock: Clock | None = None,
    ) -> Self:
        """Shake hands with a node.

        Args:
            address: Of its control plane: ``unix:/path`` or ``host:port``.
            namespace: What the bytes of this client's blocks mean.
            timeout_seconds: For the handshake; waits for a node that is just starting.
            call_timeout_seconds: For every later call, reconnecting included.
            prefer: Ways to move bytes, best first.
            credentials: Files that prove who this is to a node on another host, and the node to this; None: neither does.
            clock: The system's by default.

        Raises:
            StoreUnreachable: Nobody answers in time.
            LayoutMismatch: The node stores these weights in another layout; names the field that differs.
            InvalidArgument: No node can store such blocks; names the field.
            BadCredentials: A file of the credentials cannot be used; names the field.
        """
        clock = clock or MonotonicClock()
        call_timeout = nanos(call_timeout_seconds)
        connection = NodeConnection.open(
            address,
            namespace,
            deadline=Nanos(clock.now() + nanos(timeout_seconds)),
            call_timeout=call_timeout,
            prefer=tuple(DataPath(path) for path in prefer),
            credentials=credentials or Credentials(),
            clock=clock,
        )
        return cls(connection, namespace, call_timeout=call_timeout, clock=clock)

    @classmethod
    def join(
        cls,
        address: str,
        namespace: KvNamespace,
        *,
        wait_seconds: float,
        call_timeout_seconds: float = 1.0,
        prefer: Sequence[str] = (DataPath.SHM, DataPath.NIXL, DataPath.TCP),
        credentials: Credentials | None = None,
        clock: Clock | None = None,
    ) -> Self:
        """Shake hands with a node, or, where it does not answer, as soon as it does.

        Until then every call finds nothing, at once: a store is only a cache (`joined` says whether it is there). A node that
        answers later and has the blocks in another layout is not joined. The log says why a node is not joined yet.

        Args:
            address: As of `connect`, like the arguments below.
            namespace: What the bytes of this client's blocks mean.
            wait_seconds: How long to wait for the node here; 0: not at all.
            call_timeout_seconds: For every later call.
            prefer: Ways to move bytes, best first.
            credentials: Files that prove who this is.
            clock: The system's by default.

        Raises:
            LayoutMismatch: The node answers, and stores these weights in another layout.
            InvalidArgument: No node can store such blocks.
            BadCredentials: A file of the credentials cannot be used.
        """
        clock = clock or MonotonicClock()
        failure = ""
        if wait_seconds > 0:
            try:
                return cls.connect(
                    address,
                    namespace,
                    timeout_seconds=wait_seconds,
                    call_timeout_seconds=call_timeout_seconds,
                    prefer=prefer,
                    credentials=credentials,
                    clock=clock,
                )
            except StoreUnreachable as error:
                failure = str(error)
        call_timeout = nanos(call_timeout_seconds)
        connection = NodeConnection.open_early(
            address,
            namespace,
            call_timeout=call_timeout,
            prefer=tuple(DataPath(path) for path in prefer),
            credentials=credentials or Credentials(),
            clock=clock,
            failure=failure,
        )
        return cls(connection, namespace, call_timeout=call_timeout, clock=clock)

    @property
    def joined(self) -> bool:
        """Tell whether the node has answered once."""
        return self.connection.session is not None

    @property
    def store_id(self) -> str:
        """Return what the node is called; empty until it has answered once."""
        session = self.connection.session
        return "" if session is None else session.store_id

    @property
    def path(self) -> DataPath | None:
        """Return the way that bytes move at the moment; None until the node has answered once."""
        session = self.connection.session
        return None if session is None else session.path

    @property
    def writes_shards(self) -> bool:
        """Whether `write_shard` works here, now or as soon as the node's memory can be had (rule 3)."""
        session = self.connection.session
        return session is not None and (session.path is DataPath.SHM or bool(session.memory))

    @property
    def namespace(self) -> KvNamespace:
        return self._namespace

    @property
    def answers(self) -> bool:
        """Whether the node did when it was last called."""
        return self.connection.answers

    def match(
        self,
        hashes: Sequence[BlockHash],
        *,
        lease_seconds: float,
        max_wait_seconds: float = 0,
        tenant: bytes = b"",
        deadline: Nanos | None = None,
    ) -> Match:
        """The longest prefix of a chain that is in the node's memory, pinned.

        What follows it may lie in a slower tier. With patience the node begins to fetch that, and says how many blocks
        are on their way (`Match.loading`): match again to find them.

        Args:
            hashes: The chain from its start.
            lease_seconds: For how long at most; the node's own limit counts where it is shorter. 0 looks only:
                the blocks may be evicted before they are read, and nothing is counted.
            max_wait_seconds: How long blocks of slower tiers are worth waiting for: as long as computing them again
                would take. 0: begin nothing.
            tenant: Salt of the chain: who pays for the places of what is fetched, and is counted.
            deadline: When to give up, where that is earlier than the client would by itself; so for all calls.
        """
        asked = tuple(hashes[: wire.MAX_HASHES])
        current = self.connection.session
        nothing = Match(incarnation="" if current is None else current.incarnation)
        if not asked:
            return nothing
        names = b"".join(asked)

        def call(session: NodeSession, timeout_seconds: float) -> Match:
            lease = min(nanos(lease_seconds), session.max_lease)
            request = pb.MatchRequest(
                digest=self._namespace.digest,
                hashes=names,
                lease_ms=lease // MILLISECOND,
                incarnation=session.incarnation,
                patience_ms=nanos(max_wait_seconds) // MILLISECOND,
                tenant=tenant,
            )
            return wire.parse_match(session.calls.match(request, timeout_seconds), session.incarnation, asked)

        found = self.connection.call(call, deadline)
        match = nothing if found is None else found  # an empty one is false, and may say what is on its way
        if lease_seconds:
            self.connection.counting.add(hits=len(match), misses=len(hashes) - len(match))
        return match

    def match_and_wait(
        self, hashes: Sequence[BlockHash], *, lease_seconds: float, max_wait_seconds: float, tenant: bytes = b""
    ) -> Match:
        """As `match`, after what lies in slower tiers has been fetched; waits no longer than the patience."""
        deadline = Nanos(self._clock.now() + nanos(max_wait_seconds))
        found = self.match(hashes, lease_seconds=lease_seconds, max_wait_seconds=max_wait_seconds, tenant=tenant)
        if not found.loading:
            return found
        while self._clock.now() < deadline and not self.connection.closed.wait(LOOK_AGAIN_SECONDS):
            if not self.match(hashes, lease_seconds=0, tenant=tenant).loading:
                break
        complete = self.match(hashes, lease_seconds=lease_seconds, tenant=tenant)
        self.release(found.lease_id)  # it kept the beginning in place while the rest was fetched
        return (
            structs.replace(complete, promoted=merge_promoted(found.promoted, complete.promoted))
            if found.promoted
            else complete
        )

    def read(
        self,
        match: Match,
        indices: Sequence[int],
        destinations: Sequence[MutableBlock],
        *,
        deadline: Nanos | None = None,
    ) -> list[bool]:
        """Copy matched blocks out; checksums are verified on the copies.

        Args:
            match: From `match`, of this client or of another one of the same node and namespace.
            indices: Which of its blocks.
            destinations: Where to; one block an index, in one buffer or in a list of consecutive pieces.
            deadline: See `match`.

        Returns:
            Which blocks are there now. Where it says False, the destination's content is void.
        """

        def get(session: NodeSession, slots: Slots, until: Nanos) -> Sequence[BlockOutcome]:
            return session.transport.get(slots, destinations, until)

        return self._read(match, indices, self._namespace.block_bytes, get, deadline)

    def read_shard(
        self,
        match: Match,
        indices: Sequence[int],
        share: RankShard,
        destinations: Sequence[MutableBlock],
        *,
        deadline: Nanos | None = None,
    ) -> list[bool]:
        """As `read`, of what one rank holds of the blocks. All of a block is verified, also what is not copied."""

        def get(session: NodeSession, slots: Slots, until: Nanos) -> Sequence[BlockOutcome]:
            if isinstance(session.transport, SharedMemoryTransport):
                return session.transport.get_shard(slots, share, destinations, until)
            return _read_whole(session, slots, share, destinations, until)

        return self._read(match, indices, share.bytes, get, deadline)

    def release(self, *lease_ids: LeaseId, deadline: Nanos | None = None) -> None:
        """End leases early. May be called from any process; a lease that has ended is fine."""
        held = [lease_id for lease_id in lease_ids if lease_id]
        for start in range(0, len(held), wire.MAX_LEASES):
            request = pb.ReleaseRequest(lease_ids=held[start : start + wire.MAX_LEASES])
            self.connection.call(self._releasing(request), deadline)

    def hold(self, session: str, hashes: Sequence[BlockHash], *, seconds: float) -> SessionPinResult | None:
        """Keep the held prefix of a chain from eviction while its session waits for something else, a tool for instance.

        Ends by itself, with `release_hold`, or when the same session holds anew. A session that goes on matches first
        and releases then, so that its blocks are pinned at any time. None when the node does not answer.

        Args:
            session: Whose chain it is; the same name in another namespace is another hold.
            hashes: The chain from its start.
            seconds: For how long at most; the node's own limit counts where it is shorter.
        """
        asked = b"".join(hashes[: wire.MAX_HASHES])
        if not asked:
            return SessionPinResult(blocks=0)

        def call(current: NodeSession, timeout_seconds: float) -> SessionPinResult:
            request = pb.HoldRequest(
                digest=self._namespace.digest,
                hashes=asked,
                incarnation=current.incarnation,
                session=session,
                hold_ms=max(min(nanos(seconds), current.max_hold) // MILLISECOND, 1),
            )
            return wire.parse_hold(self.connection.stub.Hold(request, timeout=timeout_seconds))

        return self.connection.call(call)

    def release_hold(self, session: str) -> None:
        """End a hold early; one that has ended is fine."""
        request = pb.ReleaseHoldRequest(digest=self._namespace.digest, session=session)
        self.connection.call(lambda _, timeout: self.connection.stub.ReleaseHold(request, timeout=timeout))

    def evacuate(self, names: Sequence[BlockHash], *, leaving: bool) -> EvacuationResult | None:
        """Have the node bring blocks to where other nodes find them, for about half of the time that a call may take.

        Args:
            names: Of any of its blocks, what is worth most first.
            leaving: Whether the node goes as well.

        Returns:
            What has come of it; ask again for what is not `done`. None when the node does not answer.
        """
        asked = b"".join(names[: wire.MAX_EVACUATED])
        if not asked:
            return EvacuationResult()

        def call(session: NodeSession, timeout_seconds: float) -> EvacuationResult:
            request = pb.EvacuateRequest(
                digest=self._namespace.digest,
                hashes=asked,
                incarnation=session.incarnation,
                timeout_ms=round(timeout_seconds * 500),
                leaving=leaving,
            )
            return wire.parse_evacuation(self.connection.stub.Evacuate(request, timeout=timeout_seconds))

        return self.connection.call(call)

    def write(
        self,
        hashes: Sequence[BlockHash],
        sources: Callable[[int], Block] | Sequence[Block],
        *,
        tenant: bytes = b"",
        deadline: Nanos | None = None,
    ) -> int:
        """Store blocks; those already held, or being written by another, are skipped.

        Args:
            hashes: The chain from its start, as far as its blocks are there. Naming held blocks costs nothing and
                keeps the start of a chain from being evicted before its end.
            sources: The block of an index into `hashes`, asked for only when it is written; one buffer, or a list of
                consecutive pieces. Must not change during the call, or until `batch_blocks` more are asked for. What it
                raises comes out of this call; nothing is published then, and nobody waits for the reservation to end.
            tenant: Salt of the chain; whose quota the blocks count against.
            deadline: See `match`.

        Returns:
            Blocks newly published.
        """
        if not hashes:
            return 0
        asked = hashes[: wire.MAX_HASHES]
        started = self._clock.now()
        found = self._reserve(asked, tenant, deadline)
        if found is None:
            self.connection.counting.add(dropped=len(hashes))
            return 0
        session, places = found
        source = sources if callable(sources) else sources.__getitem__
        try:
            written = self._put(session, places, source, earlier(deadline, Nanos(started + session.max_reservation)))
        except BaseException:  # the caller's own; goes on to him
            self._abandon(places, deadline)
            raise
        published = self._publish(places, written, deadline) if places.indices else 0
        self.connection.counting.add(
            bytes_written=published * self._namespace.block_bytes,
            dropped=len(places) - published + places.refused + len(hashes) - len(asked),
        )
        return published

    def reserve(
        self, hashes: Sequence[BlockHash], *, tenant: bytes = b"", deadline: Nanos | None = None
    ) -> WriteGrant | None:
        """Places for those blocks that are not held and not being written, for several ranks to write to (rule 3).

        Ends with `publish`, or by itself. None when the node does not answer; arguments are those of `write`.
        """
        asked = hashes[: wire.MAX_HASHES]
        found = self._reserve(asked, tenant, deadline) if asked else None
        if found is None:
            self.connection.counting.add(dropped=len(hashes))
            return None
        session, places = found
        self.connection.counting.add(dropped=places.refused + len(hashes) - len(asked))
        return WriteGrant(incarnation=session.incarnation, places=places)

    def write_shard(
        self,
        grant: WriteGrant,
        positions: Sequence[int],
        share: RankShard,
        sources: Sequence[Block],
        *,
        deadline: Nanos | None = None,
    ) -> dict[int, int]:
        """Write what this rank holds of some of the granted blocks.

        Args:
            grant: From `reserve`, of this client or of another one of the same node and namespace.
            positions: Which of its places.
            share: What this rank holds.
            sources: Its bytes, one a position.
            deadline: See `match`.

        Returns:
            What this rank adds to the checksums of the blocks that it wrote, by position (`kvstore.layouts.rank_shards.combined_checksums`).
        """
        session = self.connection.session_of(grant.incarnation) if positions else None
        if session is None or not isinstance(session.transport, SharedMemoryTransport):
            return {}
        until = earlier(deadline, self._transfer_deadline(len(positions)))
        told = session.transport.put_shard(grant.places.slots.some(positions), share, sources, until)
        return {position: added for position, added in zip(positions, told, strict=True) if added is not None}

    def publish(self, grant: WriteGrant, checksums: Mapping[int, int], *, deadline: Nanos | None = None) -> int:
        """End a reservation of this client: blocks whose checksums are given, by position, can be found from now on.

        Returns:
            Blocks newly published.
        """
        places = grant.places
        if not places:
            return 0
        written = {places.indices[position]: crc32c for position, crc32c in checksums.items()}
        published = self._publish(places, written, deadline)
        self.connection.counting.add(
            bytes_written=published * self._namespace.block_bytes, dropped=len(places) - published
        )
        return published

    def counters(self) -> StoreClientCounters:
        """What this client did since it connected."""
        return self.connection.counting.read()

    def stats(self) -> Stats | None:
        """What the node says of itself; None when it does not answer."""

        def call(session: NodeSession, timeout_seconds: float) -> Stats:
            asked = self._clock.now()
            session.calls.settle(timeout_seconds)  # what was released before is not pinned
            left = max(timeout_seconds - seconds(self._clock.now() - asked), 0.001)
            return wire.parse_stats(self.connection.stub.Stats(pb.StatsRequest(), timeout=left))

        return self.connection.call(call)

    def close(self) -> None:
        """Calls in other threads end with misses. Leases stay until released or over."""
        self.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _releasing(self, request: pb.ReleaseRequest) -> Callable[[NodeSession, float], None]:
        wait = not self.answers  # a call that waits for nothing does not tell that the node is back

        def call(session: NodeSession, timeout_seconds: float) -> None:
            if wait:
                session.calls.release(request, timeout_seconds)
            else:
                session.calls.release_soon(request, timeout_seconds)

        return call

    def _reserve(
        self, hashes: Sequence[BlockHash], tenant: bytes, deadline: Nanos | None = None
    ) -> tuple[NodeSession, ClientWriteReservation] | None:
        names = b"".join(hashes)

        def call(session: NodeSession, timeout_seconds: float) -> tuple[NodeSession, ClientWriteReservation]:
            request = pb.ReserveRequest(
                digest=self._namespace.digest,
                hashes=names,
                lease_ms=session.max_reservation // MILLISECOND,
                incarnation=session.incarnation,
                owner=self._owner,
                tenant=tenant,
            )
            return session, wire.parse_reservation(session.calls.reserve(request, timeout_seconds))

        return self.connection.call(call, deadline)

    def _put(
        self, session: NodeSession, places: ClientWriteReservation, source: Callable[[int], Block], deadline: Nanos
    ) -> dict[int, int]:
        """The checksums of those blocks that were written, by index."""
        until = min(deadline, self._transfer_deadline(len(places)))
        written: dict[int, int] = {}
        step = batch_blocks(self._namespace.block_bytes)
        for start in range(0, len(places), step):
            indices = places.indices[start : start + step]
            blocks = [source(index) for index in indices]
            put = session.transport.put_summing(places.slots[start : start + len(indices)], blocks, until)
            written |= {index: each.crc32c for index, each in zip(indices, put, strict=True) if each.outcome is MOVED}
        return written

    def _publish(self, places: ClientWriteReservation, written: Mapping[int, int], deadline: Nanos | None) -> int:
        assert places.reservation_id != NO_RESERVATION
        request = pb.PublishRequest(
            reservation_id=places.reservation_id,
            indices=written.keys(),
            crc32c=written.values(),
            owner=self._owner,
        )
        response = self.connection.call(lambda session, timeout: session.calls.publish(request, timeout), deadline)
        return response.published if response is not None else 0

    def _read(
        self,
        match: Match,
        indices: Sequence[int],
        bytes_a_block: int,
        get: Callable[[NodeSession, Slots, Nanos], Sequence[BlockOutcome]],
        deadline: Nanos | None,
    ) -> list[bool]:
        """Which blocks are there; those that are bad are told to the node, and all are counted."""
        if not indices:
            return []
        slots = match.slots.some(indices)
        session = self.connection.session_of(match.incarnation)
        if session is None:
            self.connection.counting.add(lost=len(slots))
            return [False] * len(slots)
        outcomes = get(session, slots, earlier(deadline, self._transfer_deadline(len(slots))))
        corrupt = [index for index, outcome in zip(indices, outcomes, strict=True) if outcome is CORRUPT]
        if corrupt:
            self._condemn(match, corrupt)
        arrived = [outcome is MOVED for outcome in outcomes]
        moved = sum(arrived)
        self.connection.counting.add(
            bytes_read=moved * bytes_a_block, corrupt=len(corrupt), lost=len(outcomes) - moved - len(corrupt)
        )
        return arrived

    def _abandon(self, places: ClientWriteReservation, deadline: Nanos | None) -> None:
        """Give the places of a reservation back."""
        if places.indices:
            self.connection.counting.add(dropped=len(places))
            self._publish(places, {}, deadline)

    def _condemn(self, match: Match, indices: list[int]) -> None:
        log.warning("blocks failed their checksum", extra={"store": self.store_id, "blocks": len(indices)})
        request = pb.CondemnRequest(
            digest=self._namespace.digest,
            hashes=b"".join(match.names[index] for index in indices),
            generations=[match.slots[index].generation for index in indices],
        )
        response = self.connection.call(lambda _, timeout: self.connection.stub.Condemn(request, timeout=timeout))
        if response is not None:
            self.connection.counting.add(damaged=max(len(indices) - response.dropped, 0))

    def _transfer_deadline(self, blocks: int) -> Nanos:
        span = nanos(blocks * self._namespace.block_bytes / SLOWEST_BYTES_PER_SECOND)
        return Nanos(self._clock.now() + self._call_timeout + span)


def _read_whole(
    session: NodeSession, slots: Slots, share: RankShard, destinations: Sequence[MutableBlock], deadline: Nanos
) -> list[BlockOutcome]:
    """A rank's share of blocks, by ways that move whole ones only."""
    outcomes: list[BlockOutcome] = []
    step = batch_blocks(share.block_bytes)
    for start in range(0, len(slots), step):
        batch = slots[start : start + step]
        blocks = list(np.empty((len(batch), share.block_bytes), np.uint8))
        arrived = session.transport.get(batch, blocks, deadline)
        for block, into, outcome in zip(blocks, destinations[start : start + step], arrived, strict=True):
            if outcome is MOVED:
                share.take(block, pieces(into))
        outcomes += arrived
    return outcomes
