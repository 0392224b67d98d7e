"""Peer connection: looks up, reads and writes blocks at one peer, behind a circuit breaker and a fence."""

import logging
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from kvstore.block import BlockHash
from kvstore.buffers import ByteArray
from kvstore.circuit_breaker import CircuitBreaker
from kvstore.clock import Clock, Nanos, seconds
from kvstore.errors import StoreError, StoreUnreachable, TierFailed, reason
from kvstore.messages import GONE, BlockOutcome, FetchResult, LeaseId, Match, StoreClientCounters
from kvstore.namespace import KvNamespace
from kvstore.net.addresses import host_port, unix_path
from kvstore.tiers.fence import Fence
from kvstore.tiers.remote import BackendHealth

RUNS = 8  # maximum number of runs of consecutive blocks that one call fetches from, or looks up at, one peer
LEASE_AFTER_SECONDS = 1.0  # a read lease that is not released ends this long after the deadline of its `fetch` call

log = logging.getLogger(__name__)


class PeerStore(Protocol):
    """The methods of `kvstore.client.store_client.StoreClient` that this tier uses, for one namespace of one peer."""

    @property
    def answers(self) -> bool: ...

    def match(self, hashes: Sequence[BlockHash], *, lease_seconds: float, deadline: Nanos | None = None) -> Match: ...

    def read(
        self,
        match: Match,
        indices: Sequence[int],
        destinations: Sequence[ByteArray],
        *,
        deadline: Nanos | None = None,
    ) -> list[bool]: ...

    def write(
        self, hashes: Sequence[BlockHash], sources: Sequence[ByteArray], *, deadline: Nanos | None = None
    ) -> int: ...

    def release(self, *lease_ids: LeaseId, deadline: Nanos | None = None) -> None: ...

    def counters(self) -> StoreClientCounters: ...

    def close(self) -> None: ...


Connect = Callable[[str, KvNamespace, float], PeerStore]
"""A function that connects to the node at an address, for one namespace, within a number of seconds. It raises
`StoreError` if the node cannot be reached."""


class PeerNodeConnection:
    """Reads and writes blocks of one namespace at one peer. Thread-safe.

    The connection is opened when a call needs it. If the connection cannot be opened, calls fail at once until a pause
    has passed.
    """

    def __init__(self, address: str, namespace: KvNamespace, connect: Connect, connect_within: Nanos, clock: Clock):
        self._address = address
        self._namespace = namespace
        self._connect = connect
        self._connect_within = connect_within
        self._clock = clock
        self._breaker = CircuitBreaker()
        self._lock = threading.Lock()
        self._store: PeerStore | None = None
        self._closed = False
        self._guard = threading.Lock()  # guards `_fence` and `_reported_damaged`
        self._fence = Fence()
        self._reported_damaged = 0

    @property
    def health(self) -> BackendHealth:
        """Counts of blocks from this peer that failed their checksum; `fenced` is 1 if the peer is fenced, else 0.

        Without a connection, all counts are 0.
        """
        store = self._store
        if store is None:
            return BackendHealth()
        counters = store.counters()
        return BackendHealth(counters.corrupt, counters.damaged, int(self._fence.is_closed))

    def look_up(self, names: Sequence[BlockHash], deadline: Nanos) -> int:
        """Return how many leading blocks the peer has in its memory.

        Raises:
            TierFailed: The peer is fenced, cannot be reached in time, refused the call, or gave no valid answer.
        """
        return len(self._match(self._open(deadline), names, 0, deadline))

    def fetch(self, names: Sequence[BlockHash], into: Sequence[ByteArray], deadline: Nanos) -> list[FetchResult]:
        """Fetch the blocks that the peer has, in at most `RUNS` runs of consecutive blocks.

        A run ends at a block that the peer does not have, and the next run begins after this block.

        Raises:
            TierFailed: No block arrived, because the peer is fenced, cannot be reached in time, refused the call, gave
                no valid answer, or did not deliver blocks that it had announced.
        """
        store = self._open(deadline)
        answers = [GONE] * len(names)
        start = 0
        for _ in range(RUNS):
            if start >= len(names):
                break
            lease_seconds = max(seconds(deadline - self._clock.now()), 0) + LEASE_AFTER_SECONDS
            try:
                match = self._match(store, names[start:], lease_seconds, deadline)
                if not match:
                    break
                self._read(store, match, into[start : start + len(match)], answers, start, deadline)
            except TierFailed:
                if all(answer is GONE for answer in answers):
                    raise
                break
            start += len(match) + 1
        return answers

    def _report_to_fence(self, store: PeerStore, good: Sequence[bool]) -> None:
        """Tell the fence how many of the blocks that were read are undamaged, and how many were damaged in transit."""
        damaged = store.counters().damaged
        with self._guard:
            more, self._reported_damaged = max(damaged - self._reported_damaged, 0), damaged
            closes = self._fence.record(sound=sum(good), damaged=more, now=self._clock.now())
        if closes:
            log.warning("peer fenced, answers damaged in transit", extra={"peer": self._address})

    def _require_unfenced(self) -> None:
        with self._guard:
            opens = self._fence.reopen(self._clock.now())
            is_closed = self._fence.is_closed
        if opens:
            log.info("peer fence opened", extra={"peer": self._address})
        if is_closed:
            raise TierFailed(f"{self._address} is fenced, because its answers were damaged in transit")

    def push(self, names: Sequence[BlockHash], blocks: Sequence[ByteArray], deadline: Nanos) -> tuple[int, list[bool]]:
        """Write blocks into the peer's memory.

        Return how many of the blocks were written, and for each block whether the peer has it now.

        Raises:
            TierFailed: The peer is fenced, cannot be reached in time, refused the call, or gave no valid answer.
        """
        store = self._open(deadline)
        try:
            written = store.write(names, blocks, deadline=deadline)
        except (StoreError, ValueError) as error:
            raise TierFailed(f"{self._address}: {error}") from error
        return written, self._held(store, names, deadline)

    def holds(self, names: Sequence[BlockHash], deadline: Nanos) -> list[bool]:
        """Return which blocks the peer has in its memory.

        At most `RUNS` look-ups are made; blocks that these look-ups do not reach count as missing.

        Raises:
            TierFailed: The peer is fenced, cannot be reached in time, refused the call, or gave no valid answer.
        """
        return self._held(self._open(deadline), names, deadline)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            store, self._store = self._store, None
        if store is not None:
            store.close()

    def _held(self, store: PeerStore, names: Sequence[BlockHash], deadline: Nanos) -> list[bool]:
        held = [False] * len(names)
        start = 0
        for _ in range(RUNS):
            if start >= len(names):
                break
            run = len(self._match(store, names[start:], 0, deadline))
            held[start : start + run] = [True] * run
            start += run + 1
        return held

    def _match(self, store: PeerStore, names: Sequence[BlockHash], lease_seconds: float, deadline: Nanos) -> Match:
        try:
            match = store.match(names, lease_seconds=lease_seconds, deadline=deadline)
        except (StoreError, ValueError) as error:
            raise TierFailed(f"{self._address}: {error}") from error
        if not match and not store.answers:
            raise TierFailed(f"{self._address} does not answer")
        if len(match) > len(names):
            raise TierFailed(f"{self._address}: found {len(match)} blocks, but {len(names)} were asked for")
        return match

    def _read(
        self,
        store: PeerStore,
        match: Match,
        into: Sequence[ByteArray],
        answers: list[FetchResult],
        start: int,
        deadline: Nanos,
    ) -> None:
        try:
            good = store.read(match, range(len(match)), into, deadline=deadline)
        except (StoreError, ValueError) as error:
            raise TierFailed(f"{self._address}: {error}") from error
        finally:
            if self._clock.now() < deadline:
                # After the deadline no call is made, because the lease ends soon by itself (`LEASE_AFTER_SECONDS`).
                store.release(match.lease_id, deadline=deadline)
        self._report_to_fence(store, good)
        for index, (is_there, slot) in enumerate(zip(good, match.slots, strict=True), start):
            if is_there:
                answers[index] = FetchResult(BlockOutcome.MOVED, slot.crc32c)
        if not any(good):
            raise TierFailed(f"{self._address} announced blocks and delivered none")

    def _open(self, deadline: Nanos) -> PeerStore:
        self._require_unfenced()
        store = self._store
        if store is not None:
            return store
        left = seconds(deadline - self._clock.now())
        if not self._lock.acquire(timeout=max(left, 0)):
            raise TierFailed(f"{self._address}: another call is still connecting")
        try:
            if self._store is None:
                self._store = self._connect_store(deadline)
            return self._store
        finally:
            self._lock.release()

    def _connect_store(self, deadline: Nanos) -> PeerStore:
        started = self._clock.now()
        if self._closed or not self._breaker.allows(started):
            raise TierFailed(f"{self._address} is unreachable")
        within = seconds(min(Nanos(deadline - started), self._connect_within))
        try:
            probe(self._address, within)
            store = self._connect(self._address, self._namespace, within)
        except (StoreError, OSError) as error:
            if self._breaker.closed:
                log.warning("peer unreachable", extra={"peer": self._address, "reason": str(error)})
            self._breaker.failed(started, self._clock.now())
            raise TierFailed(f"{self._address}: {error}") from error
        self._breaker.succeeded()
        return store


def probe(address: str, within_seconds: float) -> None:
    """Check that a process listens at the address. A handshake would take longer to notice that nothing listens.

    Raises:
        StoreUnreachable: No process has accepted a connection at the address within this time.
    """
    try:
        if path := unix_path(address):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(max(within_seconds, 0.001))
                connection.connect(path)
        else:
            socket.create_connection(host_port(address), max(within_seconds, 0.001)).close()
    except OSError as error:
        raise StoreUnreachable(f"nothing listens there: {reason(error)}") from error
