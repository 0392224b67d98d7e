"""Store client: synchronous client of a store node, for use inside an engine's processes and threads.

Rules:

1. After `connect` or `join`, a failure of the node raises no exception. If the node does not answer, is slow or full,
   or has restarted, calls find or store fewer blocks. The client counts failures and logs when they begin
   (`kvstore.client.node_connection`). An exception means a bug in the caller.
2. A match that one process made can be read by another process, if that process has a client for the same node and
   namespace.
3. The ranks of one engine, each in its own process, share whole blocks (`kvstore.layouts.shards`): one rank reserves
   slots, each rank writes its shard, and the rank that has reserved publishes. Writing shards requires the node's
   shared memory; the blocks can be read over every data path.
4. A client talks to one node only, usually the one of its host. That node finds blocks of other nodes
   (`kvstore.tiers.peer.backend`).
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
"""The time limit of a transfer is the time that its bytes take at this speed, plus the client's call timeout. If a
transfer is slower, the engine can compute the blocks faster."""

# Pause between two look-ups of blocks that are being promoted. With a shorter pause, no blocks would be found earlier,
# because each disk needs more time than this for a batch.
LOOK_AGAIN_SECONDS = 0.002

LEAST_BATCH = 32  # minimum size of a batch (`batch_blocks`) in blocks, even if they are larger than `BATCH_BYTES`
# Size of a batch (`batch_blocks`) in bytes. Small blocks are moved in large batches, because each batch has a fixed
# cost.
BATCH_BYTES = 16 << 20

MOVED, CORRUPT = BlockOutcome.MOVED, BlockOutcome.CORRUPT
"""Members of `BlockOutcome`. They are constants of this module because an enum look-up for each block is slow."""

log = logging.getLogger(__name__)


def batch_blocks(block_bytes: int) -> int:
    """Return the number of blocks in a batch: `StoreClient.write` requests so many blocks from `sources` at a time.

    A source that copies blocks into buffers needs buffers for this number of blocks only. It may use the buffer of a
    block again when this number of other blocks has been requested after that block.
    """
    return max(LEAST_BATCH, BATCH_BYTES // block_bytes)


class StoreClient:
    """Client for one namespace of one node. `connect` and `join` make a client. Thread-safe."""

    def __init__(
        self,
        address: str,
        namespace: KvNamespace,
        *,
        call_timeout_seconds: float,
        prefer: Sequence[str],
        credentials: Credentials | None,
        credentials_field: str,
        clock: Clock | None,
    ):
        self._clock = clock or MonotonicClock()
        self._namespace = namespace
        self._call_timeout = nanos(call_timeout_seconds)
        self._owner = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self.connection = NodeConnection(
            address,
            namespace,
            call_timeout=self._call_timeout,
            prefer=tuple(DataPath(path) for path in prefer),
            credentials=credentials or Credentials(),
            credentials_field=credentials_field,
            clock=self._clock,
        )

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
        credentials_field: str = "credentials",
        clock: Clock | None = None,
    ) -> Self:
        """Connect to a node and perform the handshake.

        Args:
            address: Address of the node's control plane: ``unix:/path`` or ``host:port``.
            namespace: Namespace of this client's blocks.
            timeout_seconds: Time limit for the handshake, in which the client waits for a node that is starting.
            call_timeout_seconds: Time limit for each later call, including a new handshake if the node has restarted.
            prefer: Data paths in order of preference, best first.
            credentials: Files by which this client and a node on another host authenticate each other; None: no
                authentication.
            credentials_field: Setting of the caller that names these files, for error messages.
            clock: Clock of all deadlines; by default the monotonic clock of the system.

        Raises:
            StoreUnreachable: No node answers in time, no data path works, or the node refuses the client, for example
                because the secret is wrong or too many namespaces are open. If client and node speak no common version
                of the protocol, the error is the subclass IncompatibleVersion.
            LayoutMismatch: The node has a namespace of the same model that differs, for example in its layout or data type, or client and
                node have different format versions. The error names the field that differs.
            InvalidArgument: The node cannot store blocks of this namespace; the error names the invalid field of the namespace.
            BadCredentials: A file of the credentials cannot be used; the error names the field.
        """
        client = cls(
            address,
            namespace,
            call_timeout_seconds=call_timeout_seconds,
            prefer=prefer,
            credentials=credentials,
            credentials_field=credentials_field,
            clock=clock,
        )
        client.connection.open(Nanos(client._clock.now() + nanos(timeout_seconds)))
        return client

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
        credentials_field: str = "credentials",
        clock: Clock | None = None,
    ) -> Self:
        """Connect to a node, or make a client that connects as soon as the node answers.

        This call waits for the node for at most `wait_seconds`, or not at all if this is 0. It raises the errors of
        `connect` except StoreUnreachable; without a wait, only BadCredentials. The other arguments are also those of
        `connect`. Until the client has connected (`joined`), each call returns at once and finds nothing. If the node
        answers later, but the handshake fails, for example because the node has another layout, the client tries again
        every second. The log says why the node is not used yet.
        """
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
                    credentials_field=credentials_field,
                    clock=clock,
                )
            except StoreUnreachable as error:
                failure = str(error)
        client = cls(
            address,
            namespace,
            call_timeout_seconds=call_timeout_seconds,
            prefer=prefer,
            credentials=credentials,
            credentials_field=credentials_field,
            clock=clock,
        )
        client.connection.open_early(failure)
        return client

    @property
    def joined(self) -> bool:
        """True if a handshake with the node has succeeded."""
        return self.connection.session is not None

    @property
    def store_id(self) -> str:
        """Name of the node; empty before the first successful handshake."""
        session = self.connection.session
        return "" if session is None else session.store_id

    @property
    def path(self) -> DataPath | None:
        """The data path that is used now; None before the first successful handshake."""
        session = self.connection.session
        return None if session is None else session.path

    @property
    def writes_shards(self) -> bool:
        """True if `write_shard` works with this node, or will work when its shared memory is mapped (rule 3)."""
        session = self.connection.session
        return session is not None and (session.path is DataPath.SHM or bool(session.memory))

    @property
    def namespace(self) -> KvNamespace:
        return self._namespace

    @property
    def answers(self) -> bool:
        """False after a call or a repeated handshake has failed, and until one succeeds. A refusal by the node changes nothing. True at the start."""
        return self.connection.answers

    def match(
        self,
        hashes: Sequence[BlockHash],
        *,
        lease_seconds: float,
        max_wait_seconds: float = 0,
        tenant: bytes = b"",
        deadline: Nanos | None = None,
        trace: bytes = b"",
    ) -> Match:
        """Find the longest prefix of a chain in the node's pool and pin it by a read lease.

        The blocks after the prefix may lie in a backing tier. If `max_wait_seconds` is positive, the node begins to
        promote these blocks and returns their number (`Match.loading`). A later match then finds them in the pool.

        Args:
            hashes: Block hashes from the start of the chain; only the first `wire.MAX_HASHES` are looked up.
            lease_seconds: Maximum duration of the lease. A duration above the node's own limit is shortened to that
                limit. 0: only look the blocks up, without a lease. The blocks may then be evicted before they are
                read, and neither hits nor misses are counted.
            max_wait_seconds: Maximum time for which the caller will wait for blocks of backing tiers: the time that
                computing them would take. 0: promote nothing.
            tenant: Tenant's salt. Promoted blocks count towards the quota of this tenant. Hits and misses are counted
                in the tenant's statistics.
            deadline: Instant at which the call ends, if that is earlier than the end of the client's call timeout.
            trace: The trace context of the request that causes this call (`kvstore.tracing.context.call_trace`); empty:
                the request is not traced.
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
                trace=trace,
            )
            return wire.parse_match(session.calls.match(request, timeout_seconds), session.incarnation, asked)

        found = self.connection.call(call, deadline)
        # The match is compared with None, because an empty match is false as a bool but may report loading blocks.
        match = nothing if found is None else found
        if lease_seconds:
            self.connection.counting.add(hits=len(match), misses=len(hashes) - len(match))
        return match

    def match_and_wait(
        self,
        hashes: Sequence[BlockHash],
        *,
        lease_seconds: float,
        max_wait_seconds: float,
        tenant: bytes = b"",
        trace: bytes = b"",
    ) -> Match:
        """Match a chain, with the arguments of `match`.

        If blocks of it are being promoted, wait for them, at most for `max_wait_seconds`, and match again.
        """
        deadline = Nanos(self._clock.now() + nanos(max_wait_seconds))
        found = self.match(
            hashes, lease_seconds=lease_seconds, max_wait_seconds=max_wait_seconds, tenant=tenant, trace=trace
        )
        if not found.loading:
            return found
        while self._clock.now() < deadline and not self.connection.closed.wait(LOOK_AGAIN_SECONDS):
            if not self.match(hashes, lease_seconds=0, tenant=tenant).loading:
                break
        complete = self.match(hashes, lease_seconds=lease_seconds, tenant=tenant, trace=trace)
        self.release(found.lease_id)  # the lease of the first match, which has kept the prefix in the pool until now
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
        """Copy matched blocks out of the pool, and verify the checksums of the copies.

        Args:
            match: Match of this client, or of another client of the same node and namespace.
            indices: Indices of the blocks within the match.
            destinations: One buffer, or one list of consecutive pieces, for each index.
            deadline: Instant at which the call ends, if that is earlier than the time limit of the transfer
                (`SLOWEST_BYTES_PER_SECOND`).

        Returns:
            For each index, whether the block arrived. If it did not, the content of its destination is undefined.
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
        """Read one rank's shard (`share`) of each block, as `read` does; the checksums of the whole blocks are verified."""

        def get(session: NodeSession, slots: Slots, until: Nanos) -> Sequence[BlockOutcome]:
            if isinstance(session.transport, SharedMemoryTransport):
                return session.transport.get_shard(slots, share, destinations, until)
            return _read_whole(session, slots, share, destinations, until)

        return self._read(match, indices, share.bytes, get, deadline)

    def release(self, *lease_ids: LeaseId, deadline: Nanos | None = None) -> None:
        """End leases before their deadlines.

        The leases may also come from a match that another process has made. Leases that have ended already are ignored.
        """
        held = [lease_id for lease_id in lease_ids if lease_id]
        for start in range(0, len(held), wire.MAX_LEASES):
            request = pb.ReleaseRequest(lease_ids=held[start : start + wire.MAX_LEASES])
            self.connection.call(self._releasing(request), deadline)

    def hold(self, session: str, hashes: Sequence[BlockHash], *, seconds: float) -> SessionPinResult | None:
        """Pin the leading blocks of a chain that are in the pool, for a session that pauses, such as during a tool call.

        The pin ends at its deadline, with `release_hold`, or when the same session pins again. When the session
        continues, the caller first matches the chain and then releases the pin, so the blocks are pinned without a gap.
        Return how many blocks are pinned; None if the node cannot be reached.

        Args:
            session: Name of the session. The same name in another namespace is another session.
            hashes: Block hashes from the start of the chain; only the first `wire.MAX_HASHES` are used.
            seconds: Maximum duration of the pin. A duration above the node's own limit is shortened to that limit.
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
        """End a session's pin before its deadline; a pin that has ended is ignored."""
        request = pb.ReleaseHoldRequest(digest=self._namespace.digest, session=session)
        self.connection.call(lambda _, timeout: self.connection.stub.ReleaseHold(request, timeout=timeout))

    def evacuate(self, names: Sequence[BlockHash], *, leaving: bool) -> EvacuationResult | None:
        """Ask the node to copy blocks to a tier that other nodes can read.

        The node stops copying after half of the call timeout. The caller has to call again for the blocks that are not
        `done`.

        Args:
            names: Hashes of the blocks, the most valuable first; only the first `wire.MAX_EVACUATED` are sent.
            leaving: True if the node will end together with its worker, so that the blocks in its memory would be lost.

        Returns:
            The numbers of copied and refused blocks, and how many leading blocks are done; None if the node cannot be
            reached.
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
        trace: bytes = b"",
    ) -> int:
        """Store blocks, except those that the node has already or that another client is writing.

        Args:
            hashes: Block hashes from the start of the chain to the last block that the caller has. Include blocks that
                are stored already: they are not written again, but the call counts as a use of them. The start of a
                chain is therefore not evicted before its end. Only the first `wire.MAX_HASHES` blocks are stored.
            sources: Function or sequence that returns the block for an index into `hashes`, in one buffer or a list of
                consecutive pieces. It is called only for blocks that are written. The memory of a block must not change
                until `batch_blocks` other blocks have been requested after it, or until this call ends. If a source
                raises, this call raises the same exception, publishes nothing and ends the reservation at once.
            tenant: Tenant's salt. The blocks count towards the quota of this tenant.
            deadline: Instant at which the call ends; None: only each step of the call has a time limit.
            trace: As for `match`.

        Returns:
            Number of newly published blocks.
        """
        if not hashes:
            return 0
        asked = hashes[: wire.MAX_HASHES]
        started = self._clock.now()
        found = self.request_slots(asked, tenant, deadline, trace)
        if found is None:
            self.connection.counting.add(dropped=len(hashes))
            return 0
        session, places = found
        source = sources if callable(sources) else sources.__getitem__
        try:
            written = self._put(session, places, source, earlier(deadline, Nanos(started + session.max_reservation)))
        except BaseException:  # the function that the caller has passed as the source may raise any exception
            self._abandon(places, deadline)
            raise
        published = self._publish(places, written, deadline, trace) if places.indices else 0
        self.connection.counting.add(
            bytes_written=published * self._namespace.block_bytes,
            dropped=len(places) - published + places.refused + len(hashes) - len(asked),
        )
        return published

    def reserve(
        self, hashes: Sequence[BlockHash], *, tenant: bytes = b"", deadline: Nanos | None = None
    ) -> WriteGrant | None:
        """Reserve slots for those blocks that are neither stored nor being written.

        Several ranks can then write the blocks, each rank its shards (rule 3).

        The reservation ends with `publish`, or after the time that the node allows (`NodeSession.max_reservation`). The
        arguments are those of `write`. Return None if `hashes` is empty, or if the node cannot be reached.
        """
        asked = hashes[: wire.MAX_HASHES]
        found = self.request_slots(asked, tenant, deadline) if asked else None
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
        """Write this rank's shard of some of the reserved blocks.

        `positions` are positions in the grant; `sources` has one shard for each position. Return for each written
        block, by its position, the rank's contribution to the checksum of the block
        (`kvstore.layouts.rank_shards.combined_checksums`). Nothing is written if the node has restarted, or if its
        shared memory is not mapped.
        """
        session = self.connection.session_of(grant.incarnation) if positions else None
        if session is None or not isinstance(session.transport, SharedMemoryTransport):
            return {}
        until = earlier(deadline, self._transfer_deadline(len(positions)))
        contributions = session.transport.put_shard(grant.places.slots.some(positions), share, sources, until)
        return {position: added for position, added in zip(positions, contributions, strict=True) if added is not None}

    def publish(self, grant: WriteGrant, checksums: Mapping[int, int], *, deadline: Nanos | None = None) -> int:
        """End a reservation of this client, and publish the blocks whose checksums are given, by position in the grant.

        Return the number of newly published blocks.
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
        """Return the counters of this client since it was made."""
        return self.connection.counting.read()

    def stats(self) -> Stats | None:
        """Return the statistics of the node; None if it cannot be reached."""

        def call(session: NodeSession, timeout_seconds: float) -> Stats:
            asked = self._clock.now()
            # Wait until the node has answered the calls of `release` that were sent without waiting. Otherwise it could
            # still count the released blocks as pinned.
            session.calls.settle(timeout_seconds)
            left = max(timeout_seconds - seconds(self._clock.now() - asked), 0.001)
            return wire.parse_stats(self.connection.stub.Stats(pb.StatsRequest(), timeout=left))

        return self.connection.call(call)

    def close(self) -> None:
        """Close the client.

        Calls that run in other threads return as if nothing was found. Leases that are still open stay until their
        deadline or until another client releases them.
        """
        self.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _releasing(self, request: pb.ReleaseRequest) -> Callable[[NodeSession, float], None]:
        # If the node did not answer the last call, wait for its answer to the release, to find out whether it answers
        # again.
        wait = not self.answers

        def call(session: NodeSession, timeout_seconds: float) -> None:
            if wait:
                session.calls.release(request, timeout_seconds)
            else:
                session.calls.release_soon(request, timeout_seconds)

        return call

    def request_slots(
        self, hashes: Sequence[BlockHash], tenant: bytes, deadline: Nanos | None = None, trace: bytes = b""
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
                trace=trace,
            )
            return session, wire.parse_reservation(session.calls.reserve(request, timeout_seconds))

        return self.connection.call(call, deadline)

    def _put(
        self, session: NodeSession, places: ClientWriteReservation, source: Callable[[int], Block], deadline: Nanos
    ) -> dict[int, int]:
        """Write the blocks of a reservation; return the checksums of the written blocks, by index into the hashes."""
        until = min(deadline, self._transfer_deadline(len(places)))
        written: dict[int, int] = {}
        step = batch_blocks(self._namespace.block_bytes)
        for start in range(0, len(places), step):
            indices = places.indices[start : start + step]
            blocks = [source(index) for index in indices]
            put = session.transport.put_summing(places.slots[start : start + len(indices)], blocks, until)
            written |= {index: each.crc32c for index, each in zip(indices, put, strict=True) if each.outcome is MOVED}
        return written

    def _publish(
        self, places: ClientWriteReservation, written: Mapping[int, int], deadline: Nanos | None, trace: bytes = b""
    ) -> int:
        assert places.reservation_id != NO_RESERVATION
        request = pb.PublishRequest(
            reservation_id=places.reservation_id,
            indices=written.keys(),
            crc32c=written.values(),
            owner=self._owner,
            trace=trace,
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
        """Read blocks by the function `get`, report corrupt blocks to the node, and count all outcomes."""
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
            self.condemn(match, corrupt)
        arrived = [outcome is MOVED for outcome in outcomes]
        moved = sum(arrived)
        self.connection.counting.add(
            bytes_read=moved * bytes_a_block, corrupt=len(corrupt), lost=len(outcomes) - moved - len(corrupt)
        )
        return arrived

    def _abandon(self, places: ClientWriteReservation, deadline: Nanos | None) -> None:
        """End a reservation without publishing a block."""
        if places.indices:
            self.connection.counting.add(dropped=len(places))
            self._publish(places, {}, deadline)

    def condemn(self, match: Match, indices: list[int]) -> None:
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
    """Read one rank's shard of each block over a data path that can move only whole blocks."""
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
