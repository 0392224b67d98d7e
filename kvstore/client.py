"""The client of a store node: synchronous, for use inside an engine's processes and threads.

Rules:

1. After `connect` nothing here raises because of the node: a node that is away, slow, full or restarted means fewer
   blocks, counted, and a log line when that begins. What raises is a bug of the caller.
2. No call takes longer than its deadline, and a breaker keeps callers from paying it again and again.
3. A restarted node refuses the ids of its former incarnation; the client then shakes hands again, maps the new pool
   and repeats the call, within the same deadline.
4. What was matched in one process can be read in another that has a client of the same node.
5. Where shared memory was wanted and could not be had, since too many asked for it perhaps, a thread tries again by and by,
   and what is called from then on goes that way.
6. Ranks of one engine, each in its process, share whole blocks (`kvstore.shards`): one reserves, each writes its share, and
   the one that reserved publishes. Writing shares takes the node's own memory; they can be read by every way.
"""

import logging
import os
import socket
import threading
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self, TypeVar

import grpc
import numpy as np

from kvstore import wire
from kvstore.access import load
from kvstore.block import ChainHash
from kvstore.breaker import Breaker
from kvstore.buffers import Block, MutableBlock, pieces
from kvstore.clock import MILLISECOND, Clock, Nanos, nanos, seconds
from kvstore.credentials import Credentials
from kvstore.errors import InvalidArgument, LayoutMismatch, NamespaceUnknown, StoreUnreachable
from kvstore.layout import Namespace
from kvstore.messages import (
    NO_RESERVATION,
    Counters,
    DataPath,
    Held,
    LeaseId,
    Match,
    Outcome,
    Places,
    Slots,
    Stats,
)
from kvstore.monotonic import MonotonicClock
from kvstore.ports import Transport
from kvstore.session import Session, refusal, shake_hands, with_memory
from kvstore.shares import Grant, Share
from kvstore.transports.authentication import Key
from kvstore.transports.shared_memory import SharedMemoryTransport
from kvstore.v1 import blocks_pb2 as pb
from kvstore.v1 import blocks_pb2_grpc as pb_grpc

SLOWEST_BYTES_PER_SECOND = 100_000_000
"""A way slower than this is given up: computing the blocks again is faster."""

CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # a broken connection of one client is not another's
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),  # a restarted node is found again within this
    ("grpc.max_receive_message_length", wire.MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", wire.MAX_MESSAGE_BYTES),
)

LOOK_AGAIN_SECONDS = 0.002  # between looks at a load; a batch of it takes longer than that from any disk

WRITE_BATCH = 32  # blocks asked for at a time, so that a source that has to copy does not copy the whole chain at once

Answer = TypeVar("Answer")

log = logging.getLogger(__name__)


class StoreClient:
    """One namespace of one node; see the module. Thread-safe. Made by `connect`."""

    def __init__(
        self,
        address: str,
        namespace: Namespace,
        channel: grpc.Channel,
        session: Session,
        *,
        call_timeout: Nanos,
        prefer: tuple[DataPath, ...],
        data_key: Key | None,
        clock: Clock,
    ):
        self._address = address
        self._namespace = namespace
        self._channel = channel
        self._stub = pb_grpc.BlockStoreStub(channel)
        self._session = session
        self._outdated = False  # the node said that it is another one by now
        self._call_timeout = call_timeout
        self._prefer = prefer
        self._data_key = data_key
        self._clock = clock
        self._owner = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._breaker = Breaker()
        self._void: deque[str] = deque(maxlen=16)  # incarnations that are known to be over
        self._ended = threading.Event()
        self._handshake = threading.Lock()
        self._memory = Breaker()  # of attempts to get at it after all (rule 5)
        self._seeking = threading.Lock()
        self._slower: list[Transport] = []  # ways that were used before it, and may be still
        self._counting = threading.Lock()
        self._counts = dict.fromkeys(Counters.__struct_fields__, 0)

    @classmethod
    def connect(
        cls,
        address: str,
        namespace: Namespace,
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
        paths = tuple(DataPath(path) for path in prefer)
        access = load(credentials or Credentials())
        channel = access.channel(address, CHANNEL_OPTIONS)
        deadline = Nanos(clock.now() + nanos(timeout_seconds))
        try:
            session = shake_hands(
                pb_grpc.BlockStoreStub(channel), address, namespace, paths, access.data_key, clock, deadline
            )
        except BaseException:
            channel.close()
            raise
        return cls(
            address,
            namespace,
            channel,
            session,
            call_timeout=nanos(call_timeout_seconds),
            prefer=paths,
            data_key=access.data_key,
            clock=clock,
        )

    @property
    def store_id(self) -> str:
        return self._session.store_id

    @property
    def path(self) -> DataPath:
        """How bytes move at the moment."""
        return self._session.path

    @property
    def writes_shares(self) -> bool:
        """Whether `write_share` works here, now or as soon as the node's memory can be had (rules 5 and 6)."""
        return self.path is DataPath.SHM or bool(self._session.memory)

    @property
    def namespace(self) -> Namespace:
        return self._namespace

    @property
    def answers(self) -> bool:
        """Whether the node did when it was last called."""
        return self._breaker.closed

    def match(
        self,
        hashes: Sequence[ChainHash],
        *,
        lease_seconds: float,
        patience_seconds: float = 0,
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
            patience_seconds: How long blocks of slower tiers are worth waiting for: as long as computing them again
                would take. 0: begin nothing.
            tenant: Salt of the chain: who pays for the places of what is fetched, and is counted.
            deadline: When to give up, where that is earlier than the client would by itself; so for all calls.
        """
        asked = tuple(hashes[: wire.MAX_HASHES])
        nothing = Match(incarnation=self._session.incarnation)
        if not asked:
            return nothing
        names = b"".join(asked)

        def call(session: Session, timeout_seconds: float) -> Match:
            lease = min(nanos(lease_seconds), session.max_lease)
            request = pb.MatchRequest(
                digest=self._namespace.digest,
                hashes=names,
                lease_ms=lease // MILLISECOND,
                incarnation=session.incarnation,
                patience_ms=nanos(patience_seconds) // MILLISECOND,
                tenant=tenant,
            )
            return wire.parse_match(session.calls.match(request, timeout_seconds), session.incarnation, asked)

        found = self._call(call, deadline)
        match = nothing if found is None else found  # an empty one is false, and may say what is on its way
        if lease_seconds:
            self._count(hits=len(match), misses=len(hashes) - len(match))
        return match

    def match_patiently(
        self, hashes: Sequence[ChainHash], *, lease_seconds: float, patience_seconds: float, tenant: bytes = b""
    ) -> Match:
        """As `match`, after what lies in slower tiers has been fetched; waits no longer than the patience."""
        deadline = Nanos(self._clock.now() + nanos(patience_seconds))
        found = self.match(hashes, lease_seconds=lease_seconds, patience_seconds=patience_seconds, tenant=tenant)
        if not found.loading:
            return found
        while self._clock.now() < deadline and not self._ended.wait(LOOK_AGAIN_SECONDS):
            if not self.match(hashes, lease_seconds=0, tenant=tenant).loading:
                break
        complete = self.match(hashes, lease_seconds=lease_seconds, tenant=tenant)
        self.release(found.lease_id)  # it kept the beginning in place while the rest was fetched
        return complete

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
        if not indices:
            return []
        slots = match.slots.some(indices)
        session = self._session_of(match.incarnation)
        if session is None:
            self._count(lost=len(slots))
            return [False] * len(slots)
        outcomes = session.transport.get(slots, destinations, _earlier(deadline, self._transfer_deadline(len(slots))))
        return self._judge_read(match, indices, outcomes, self._namespace.block_bytes)

    def read_share(
        self,
        match: Match,
        indices: Sequence[int],
        share: Share,
        destinations: Sequence[MutableBlock],
        *,
        deadline: Nanos | None = None,
    ) -> list[bool]:
        """As `read`, of what one rank holds of the blocks. All of a block is verified, also what is not copied."""
        if not indices:
            return []
        slots = match.slots.some(indices)
        session = self._session_of(match.incarnation)
        if session is None:
            self._count(lost=len(slots))
            return [False] * len(slots)
        until = _earlier(deadline, self._transfer_deadline(len(slots)))
        if isinstance(session.transport, SharedMemoryTransport):
            outcomes = session.transport.get_share(slots, share, destinations, until)
        else:
            outcomes = _read_whole(session, slots, share, destinations, until)
        return self._judge_read(match, indices, outcomes, share.bytes)

    def release(self, *lease_ids: LeaseId, deadline: Nanos | None = None) -> None:
        """End leases early. May be called from any process; a lease that has ended is fine."""
        held = [lease_id for lease_id in lease_ids if lease_id]
        if held:
            request = pb.ReleaseRequest(lease_ids=held)
            wait = not self._breaker.closed  # a call that waits for nothing does not tell that the node is back

            def call(session: Session, timeout_seconds: float) -> None:
                if wait:
                    session.calls.release(request, timeout_seconds)
                else:
                    session.calls.release_soon(request, timeout_seconds)

            self._call(call, deadline)

    def hold(self, session: str, hashes: Sequence[ChainHash], *, seconds: float) -> Held | None:
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
            return Held(blocks=0)

        def call(current: Session, timeout_seconds: float) -> Held:
            request = pb.HoldRequest(
                digest=self._namespace.digest,
                hashes=asked,
                incarnation=current.incarnation,
                session=session,
                hold_ms=max(min(nanos(seconds), current.max_hold) // MILLISECOND, 1),
            )
            return wire.parse_hold(self._stub.Hold(request, timeout=timeout_seconds))

        return self._call(call)

    def release_hold(self, session: str) -> None:
        """End a hold early; one that has ended is fine."""
        request = pb.ReleaseHoldRequest(digest=self._namespace.digest, session=session)
        self._call(lambda _, timeout: self._stub.ReleaseHold(request, timeout=timeout))

    def write(
        self,
        hashes: Sequence[ChainHash],
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
                consecutive pieces. Must not change during the call. What it raises comes out of this call; nothing is
                published then, and nobody waits for the reservation to end.
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
            self._count(dropped=len(hashes))
            return 0
        session, places = found
        source = sources if callable(sources) else sources.__getitem__
        try:
            written = self._put(session, places, source, _earlier(deadline, Nanos(started + session.max_reservation)))
        except BaseException:  # the caller's own; goes on to him
            self._abandon(places, deadline)
            raise
        published = self._publish(places, written, deadline) if places.indices else 0
        self._count(
            bytes_written=published * self._namespace.block_bytes,
            dropped=len(places) - published + places.refused + len(hashes) - len(asked),
        )
        return published

    def reserve(
        self, hashes: Sequence[ChainHash], *, tenant: bytes = b"", deadline: Nanos | None = None
    ) -> Grant | None:
        """Places for those blocks that are not held and not being written, for several ranks to write to (rule 6).

        Ends with `publish`, or by itself. None when the node does not answer; arguments are those of `write`.
        """
        asked = hashes[: wire.MAX_HASHES]
        found = self._reserve(asked, tenant, deadline) if asked else None
        if found is None:
            self._count(dropped=len(hashes))
            return None
        session, places = found
        self._count(dropped=places.refused + len(hashes) - len(asked))
        return Grant(incarnation=session.incarnation, places=places)

    def write_share(
        self,
        grant: Grant,
        positions: Sequence[int],
        share: Share,
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
            What this rank adds to the checksums of the blocks that it wrote, by position (`kvstore.shares.together`).
        """
        session = self._session_of(grant.incarnation) if positions else None
        if session is None or not isinstance(session.transport, SharedMemoryTransport):
            return {}
        until = _earlier(deadline, self._transfer_deadline(len(positions)))
        told = session.transport.put_share(grant.places.slots.some(positions), share, sources, until)
        return {position: added for position, added in zip(positions, told, strict=True) if added is not None}

    def publish(self, grant: Grant, checksums: Mapping[int, int], *, deadline: Nanos | None = None) -> int:
        """End a reservation of this client: blocks whose checksums are given, by position, can be found from now on.

        Returns:
            Blocks newly published.
        """
        places = grant.places
        if not places:
            return 0
        written = {places.indices[position]: crc32c for position, crc32c in checksums.items()}
        published = self._publish(places, written, deadline)
        self._count(bytes_written=published * self._namespace.block_bytes, dropped=len(places) - published)
        return published

    def counters(self) -> Counters:
        """What this client did since it connected."""
        with self._counting:
            return Counters(**self._counts)

    def stats(self) -> Stats | None:
        """What the node says of itself; None when it does not answer."""

        def call(session: Session, timeout_seconds: float) -> Stats:
            asked = self._clock.now()
            session.calls.settle(timeout_seconds)  # what was released before is not pinned
            left = max(timeout_seconds - seconds(self._clock.now() - asked), 0.001)
            return wire.parse_stats(self._stub.Stats(pb.StatsRequest(), timeout=left))

        return self._call(call)

    def close(self) -> None:
        """Calls in other threads end with misses. Leases stay until released or over."""
        self._ended.set()
        self._session.calls.close()
        self._channel.close()
        with self._handshake:
            self._close_ways(self._session)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _reserve(
        self, hashes: Sequence[ChainHash], tenant: bytes, deadline: Nanos | None = None
    ) -> tuple[Session, Places] | None:
        names = b"".join(hashes)

        def call(session: Session, timeout_seconds: float) -> tuple[Session, Places]:
            request = pb.ReserveRequest(
                digest=self._namespace.digest,
                hashes=names,
                lease_ms=session.max_reservation // MILLISECOND,
                incarnation=session.incarnation,
                owner=self._owner,
                tenant=tenant,
            )
            return session, wire.parse_reservation(session.calls.reserve(request, timeout_seconds))

        return self._call(call, deadline)

    def _put(self, session: Session, places: Places, source: Callable[[int], Block], deadline: Nanos) -> dict[int, int]:
        """The checksums of those blocks that were written, by index."""
        until = min(deadline, self._transfer_deadline(len(places)))
        written: dict[int, int] = {}
        for start in range(0, len(places), WRITE_BATCH):
            indices = places.indices[start : start + WRITE_BATCH]
            blocks = [source(index) for index in indices]
            put = session.transport.put_summing(places.slots[start : start + len(indices)], blocks, until)
            for index, each in zip(indices, put, strict=True):
                if each.outcome is Outcome.MOVED:
                    written[index] = each.crc32c
        return written

    def _publish(self, places: Places, written: Mapping[int, int], deadline: Nanos | None) -> int:
        assert places.reservation_id != NO_RESERVATION
        request = pb.PublishRequest(
            reservation_id=places.reservation_id,
            indices=written.keys(),
            crc32c=written.values(),
            owner=self._owner,
        )
        response = self._call(lambda session, timeout: session.calls.publish(request, timeout), deadline)
        return response.published if response is not None else 0

    def _judge_read(
        self, match: Match, indices: Sequence[int], outcomes: Sequence[Outcome], bytes_a_block: int
    ) -> list[bool]:
        """Which blocks are there; those that are bad are told to the node, and all are counted."""
        corrupt = [index for index, outcome in zip(indices, outcomes, strict=True) if outcome is Outcome.CORRUPT]
        if corrupt:
            self._condemn(match, corrupt)
        moved = sum(outcome is Outcome.MOVED for outcome in outcomes)
        self._count(bytes_read=moved * bytes_a_block, corrupt=len(corrupt), lost=len(outcomes) - moved - len(corrupt))
        return [outcome is Outcome.MOVED for outcome in outcomes]

    def _abandon(self, places: Places, deadline: Nanos | None) -> None:
        """Give the places of a reservation back."""
        if places.indices:
            self._count(dropped=len(places))
            self._publish(places, {}, deadline)

    def _condemn(self, match: Match, indices: list[int]) -> None:
        log.warning("blocks failed their checksum", extra={"store": self._session.store_id, "blocks": len(indices)})
        request = pb.CondemnRequest(
            digest=self._namespace.digest,
            hashes=b"".join(match.names[index] for index in indices),
            generations=[match.slots[index].generation for index in indices],
        )
        self._call(lambda _, timeout: self._stub.Condemn(request, timeout=timeout))

    def _call(self, act: Callable[[Session, float], Answer], until: Nanos | None = None) -> Answer | None:
        """The node's answer; None when there is none in time, or the breaker is open."""
        started = self._clock.now()
        deadline = _earlier(until, Nanos(started + self._call_timeout))
        if self._ended.is_set() or not self._breaker.allows(started):
            return None
        for _ in range(2):  # the second time after shaking hands again (rule 3)
            session = self._current(deadline)
            if session is None:
                return None
            try:
                answer = act(session, seconds(max(deadline - self._clock.now(), MILLISECOND)))
            except grpc.RpcError as error:
                self._judge(error, started)
                if not self._outdated:
                    return None
            else:
                self._breaker.succeeded()
                if session.memory:
                    self._seek_memory(session)
                return answer
        return None

    def _judge(self, error: grpc.RpcError, started: Nanos) -> None:
        """What a failed call says of the node."""
        match error.code():
            case grpc.StatusCode.FAILED_PRECONDITION:
                self._outdated = True
            case grpc.StatusCode.INVALID_ARGUMENT:
                raise refusal(self._address, error) from error
            case grpc.StatusCode.RESOURCE_EXHAUSTED:
                self._count(failures=1)
                log.warning("store node refuses", extra={"address": self._address, "details": error.details()})
            case code:
                self._failed(started, f"{code.name}: {error.details()}")

    def _failed(self, started: Nanos, reason: str) -> None:
        if self._ended.is_set():
            return
        self._count(failures=1)
        if self._breaker.closed:
            log.warning("store node does not answer", extra={"address": self._address, "reason": reason})
        self._breaker.failed(started, self._clock.now())

    def _current(self, deadline: Nanos) -> Session | None:
        """The session with the node that is there now; None while another thread is shaking hands, or it fails."""
        if not self._outdated:
            return self._session
        if not self._handshake.acquire(blocking=False):
            return None
        try:
            return self._renew(deadline)
        finally:
            self._handshake.release()

    def _renew(self, deadline: Nanos) -> Session | None:
        if not self._outdated:  # another thread has just done it
            return self._session
        started = self._clock.now()
        try:
            session = shake_hands(
                self._stub, self._address, self._namespace, self._prefer, self._data_key, self._clock, deadline
            )
        except (StoreUnreachable, LayoutMismatch, InvalidArgument) as error:
            self._failed(started, str(error))
            return None
        former, self._session = self._session, session
        self._outdated = False
        if former.incarnation != session.incarnation:
            self._void.append(former.incarnation)
            log.info("store node has restarted", extra={"store": session.store_id, "incarnation": session.incarnation})
        former.calls.retire()
        self._close_ways(former)
        return session

    def _seek_memory(self, session: Session) -> None:
        if self._memory.allows(self._clock.now()) and self._seeking.acquire(blocking=False):
            threading.Thread(target=self._map, args=(session,), name="kvstore-memory", daemon=True).start()

    def _map(self, session: Session) -> None:
        started = self._clock.now()
        try:
            better = with_memory(session, self._namespace, self._clock, Nanos(started + self._call_timeout))
        except (StoreUnreachable, NamespaceUnknown):
            self._memory.failed(started, self._clock.now())
            return
        else:
            with self._handshake:
                if self._session is session and not self._ended.is_set():
                    self._session = better
                    self._slower.append(session.transport)
            self._memory.succeeded()
        finally:
            self._seeking.release()

    def _close_ways(self, session: Session) -> None:
        """Those of a session, and those that were used before it had memory."""
        session.transport.close()
        while self._slower:
            self._slower.pop().close()

    def _session_of(self, incarnation: str) -> Session | None:
        """The session that a match belongs to, which may come from a process that met a restarted node before us."""
        session = self._session
        if session.incarnation == incarnation:
            return session
        now = self._clock.now()
        if self._ended.is_set() or incarnation in self._void or not self._breaker.allows(now):
            return None
        self._outdated = True
        renewed = self._current(Nanos(now + self._call_timeout))
        if renewed is None:
            return None
        self._breaker.succeeded()
        if renewed.incarnation != incarnation:
            self._void.append(incarnation)
            return None
        return renewed

    def _transfer_deadline(self, blocks: int) -> Nanos:
        span = nanos(blocks * self._namespace.block_bytes / SLOWEST_BYTES_PER_SECOND)
        return Nanos(self._clock.now() + self._call_timeout + span)

    def _count(self, **more: int) -> None:
        with self._counting:
            for name, count in more.items():
                self._counts[name] += count


def _earlier(deadline: Nanos | None, other: Nanos) -> Nanos:
    return other if deadline is None else min(deadline, other)


def _read_whole(
    session: Session, slots: Slots, share: Share, destinations: Sequence[MutableBlock], deadline: Nanos
) -> list[Outcome]:
    """A rank's share of blocks, by ways that move whole ones only."""
    outcomes: list[Outcome] = []
    for start in range(0, len(slots), WRITE_BATCH):
        batch = slots[start : start + WRITE_BATCH]
        blocks = list(np.empty((len(batch), share.block_bytes), np.uint8))
        arrived = session.transport.get(batch, blocks, deadline)
        for block, into, outcome in zip(blocks, destinations[start : start + WRITE_BATCH], arrived, strict=True):
            if outcome is Outcome.MOVED:
                share.take(block, pieces(into))
        outcomes += arrived
    return outcomes
