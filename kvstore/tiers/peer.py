"""Blocks in the memory of other nodes, fetched with their leases and over their data plane.

Rules:

1. A peer fills itself. This tier reads, and puts nothing anywhere unless `push` says so; then a chain goes to its owner.
2. Each chain has an order of peers, its owner first: the one that the rendezvous hash of peer and first block puts
   first. It needs no table and hardly changes when peers come and go.
3. Whoever was seen to hold a block is asked first, the others in that order, and never more than `look_ups` that answer.
   A peer that does not answer costs its share of the time once, then nothing for a while.
4. Peers are asked for what is in their memory only (no patience): two nodes never wait for each other's lower tiers.
5. The checksum that a peer recorded when the block was written is verified on the bytes that arrive. Whoever may talk to
   us as a peer is settled by how `connect` connects.
"""

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Annotated, Protocol

import xxhash
from msgspec import Meta
from msgspec.structs import replace

from kvstore.addresses import host_port, unix_path
from kvstore.block import ChainHash
from kvstore.breaker import Breaker
from kvstore.buffers import ByteArray, crc32c
from kvstore.clock import SECOND, Clock, Nanos, nanos, seconds
from kvstore.errors import NamespaceUnknown, StoreError, StoreUnreachable, TierFailed, reason
from kvstore.layout import Namespace
from kvstore.messages import GONE, BlockKey, Counters, Fetched, LeaseId, Match, Outcome, TierStatus
from kvstore.recent import Recent
from kvstore.tiers.gate import Gate
from kvstore.tiers.settings import TierSettings
from kvstore.tiers.tally import Tally

HINTS = 1 << 16  # blocks of which it is remembered who has them
DOUBTS = 4096  # blocks that were found bad of late
DOUBTED_FOR = Nanos(60 * SECOND)  # then the peers have had the time to write them anew
RUNS = 8  # of consecutive blocks, fetched from one peer in one call: what has more holes is hardly worth it
LEASE_AFTER_SECONDS = 1.0  # by which a lease outlasts the call that holds it, should it not be released

log = logging.getLogger(__name__)


class PeerSettings(TierSettings, frozen=True, kw_only=True, tag="peer"):
    """Whose memory to read. Refused as a whole when a field is wrong (`ValueError` names it)."""

    peers: tuple[str, ...]
    """Control planes of the nodes, ``host:port`` or ``unix:/path``; written alike on all nodes, since that is what they
    are ranked by."""

    own_address: str = ""
    """This node's own entry among the peers. It is ranked, so that all nodes agree on owners, but never asked."""

    look_ups: Annotated[int, Meta(ge=1, le=16)] = 2
    """Peers that are asked for a chain: the one that is known or likely to have it, and one more. Each costs a round trip."""

    connect_seconds: Annotated[float, Meta(gt=0, le=60)] = 0.5
    """For the handshake with a peer; less where the deadline of the call is nearer."""

    push: bool = False
    """Whether blocks that go down are written to the memory of their chain's owner."""

    def __post_init__(self) -> None:
        if not set(self.peers) - {self.own_address}:
            raise ValueError("peers: at least one other node is needed")
        if len(set(self.peers)) < len(self.peers):
            raise ValueError("peers: an address is there twice")
        if self.own_address and self.own_address not in self.peers:
            raise ValueError(f"own_address: {self.own_address!r} is not among the peers")
        for index, address in enumerate(self.peers):
            if not unix_path(address).startswith("/") and not _has_port(address):
                raise ValueError(f"peers[{index}]: {address!r} is neither unix:/path nor host:port")


class PeerStore(Protocol):
    """What is needed of a `kvstore.client.StoreClient`, bound to one namespace of one peer."""

    @property
    def answers(self) -> bool: ...

    def match(self, hashes: Sequence[ChainHash], *, lease_seconds: float, deadline: Nanos | None = None) -> Match: ...

    def read(
        self,
        match: Match,
        indices: Sequence[int],
        destinations: Sequence[ByteArray],
        *,
        deadline: Nanos | None = None,
    ) -> list[bool]: ...

    def write(
        self, hashes: Sequence[ChainHash], sources: Sequence[ByteArray], *, deadline: Nanos | None = None
    ) -> int: ...

    def release(self, *lease_ids: LeaseId, deadline: Nanos | None = None) -> None: ...

    def counters(self) -> Counters: ...

    def close(self) -> None: ...


Connect = Callable[[str, Namespace, float], PeerStore]
"""Shakes hands with the node at an address, within that many seconds; raises `StoreError`."""


class PeerTier:
    """See `kvstore.ports.BackingTier`, and the module."""

    name = "peer"
    finds_in_memory = False

    def __init__(
        self, settings: PeerSettings, connect: Connect, *, namespaces: Callable[[bytes], Namespace], clock: Clock
    ):
        """Connects when it is needed; peers may be away.

        Args:
            settings: What to use.
            connect: How to reach a peer.
            namespaces: By digest; `NamespaceUnknown` where nobody has opened it here.
            clock: Of the deadlines; the one of the connections.
        """
        self._settings = settings
        self._connect = connect
        self._namespaces = namespaces
        self._clock = clock
        self._tally = Tally(self.name)
        self._gate = Gate(self._tally, clock)
        self._hints = Hints()
        self._doubts = Doubts()
        self._lock = threading.Lock()
        self._links: dict[tuple[str, bytes], Link] = {}
        self._left = False

    def find(self, keys: Sequence[BlockKey], deadline: Nanos) -> int:
        self._gate.require_open()
        chain = self._sound(keys)
        namespace = self._namespace(chain[0].digest) if chain else None
        if namespace is None or self._gate.is_late(deadline):
            return 0
        names = [key.name for key in chain]
        longest, holder, asked, failure = 0, "", 0, None
        for address in self._candidates(chain[0]):
            if asked == self._settings.look_ups or longest == len(names):
                break
            try:
                found = self._link(address, namespace).look(names, self._share(deadline, asked))
            except TierFailed as error:
                failure = error
                continue
            asked += 1
            if found > longest:
                longest, holder = found, address
        self._tally.count(failures=failure is not None)
        if not asked and failure is not None:
            raise failure
        self._hints.note(chain[:longest], holder)
        return longest

    def holds(self, keys: Sequence[BlockKey], deadline: Nanos) -> list[bool]:
        """Asks whoever was seen to hold them."""
        self._gate.require_open()
        now, there = self._clock.now(), [False] * len(keys)
        asked: dict[tuple[str, bytes], list[int]] = {}
        for index, key in enumerate(keys):
            if (holder := self._hints.recall(key)) and not self._doubts.has(key, now):
                asked.setdefault((holder, key.digest), []).append(index)
        for (holder, digest), indices in asked.items():
            if (namespace := self._namespace(digest)) is None:
                continue
            try:
                held = self._link(holder, namespace).holds([keys[index].name for index in indices], deadline)
            except TierFailed:
                self._tally.count(failures=1)
                raise
            for index, is_there in zip(indices, held, strict=True):
                there[index] = is_there
        return there

    def put(
        self,
        keys: Sequence[BlockKey],
        blocks: Sequence[ByteArray],
        deadline: Nanos,
        checksums: Sequence[int],
    ) -> list[bool]:
        self._gate.require_open()
        there = [False] * len(keys)
        if not self._settings.push or self._gate.is_late(deadline):
            return there
        for namespace, fitting in self._by_namespace(keys, blocks):
            owners = self._owners(keys[fitting[0]])
            if owners[0] == self._settings.own_address:
                continue
            copies = {index: blocks[index].copy() for index in fitting}  # the peer's client sums up what it finds
            indices = [index for index in fitting if crc32c([copies[index]]) == checksums[index]]
            self._tally.count(corrupt=len(fitting) - len(indices))
            if not indices:
                continue
            names = [keys[index].name for index in indices]
            try:
                owner, written, held = self._push(
                    owners, namespace, names, [copies[index] for index in indices], deadline
                )
            except TierFailed:
                self._tally.count(failures=1)
                if not any(there):
                    raise
                continue
            self._tally.count(bytes_written=written * namespace.block_bytes, refused=held.count(False))
            for index, is_there in zip(indices, held, strict=True):
                there[index] = is_there
            self._hints.note((keys[index] for index in indices if there[index]), owner)
        self._tally.present(key for key, is_there in zip(keys, there, strict=True) if is_there)
        return there

    def get(self, keys: Sequence[BlockKey], into: Sequence[ByteArray], deadline: Nanos) -> list[Fetched]:
        self._gate.require_open()
        answers = [GONE] * len(keys)
        if not self._gate.is_late(deadline):
            failure: TierFailed | None = None
            for namespace, indices in self._by_namespace(keys, into):
                try:
                    self._fetch(namespace, indices, keys, into, answers, deadline)
                except TierFailed as error:
                    failure = error
            if failure is not None and all(answer is GONE for answer in answers):
                raise failure
        self._tally.fetched(answers, into)
        return answers

    def discard(self, keys: Sequence[BlockKey]) -> None:
        """They are the peers' to forget; here they are not asked for again for a while."""
        self._doubts.note(keys, self._clock.now())
        self._hints.drop(keys)
        self._tally.missed(keys)

    def gone(self) -> list[BlockKey]:
        return self._tally.gone()

    def held(self) -> list[BlockKey]:
        """Their own nodes tell."""
        return []

    def leave(self) -> None:
        """This node goes: what goes down from now on goes to the peers' memory, and none of it to this node.

        The others rank each other as before, so what would have been here is where they look next; likewise where one of them is away.
        """
        others = tuple(address for address in self._settings.peers if address != self._settings.own_address)
        self._settings = replace(self._settings, peers=others, own_address="", push=True)
        self._left = True

    def status(self) -> TierStatus:
        status = self._tally.status()
        return replace(status, corrupt=status.corrupt + sum(link.corrupt for link in self._all_links()))

    def close(self) -> None:
        self._gate.close()
        for link in self._all_links():
            link.close()

    def _fetch(
        self,
        namespace: Namespace,
        indices: Sequence[int],
        keys: Sequence[BlockKey],
        into: Sequence[ByteArray],
        answers: list[Fetched],
        deadline: Nanos,
    ) -> None:
        """Fill in the answers for these indices, from one peer after the other."""
        missing = list(indices)
        asked, failure = 0, None
        for address in self._candidates(keys[indices[0]]):
            if not missing or asked == self._settings.look_ups:
                break
            hinted = self._hints.recall(keys[missing[0]]) == address
            until = deadline if hinted else self._share(deadline, asked)
            names = [keys[index].name for index in missing]
            try:
                fetched = self._link(address, namespace).fetch(names, [into[index] for index in missing], until)
            except TierFailed as error:
                failure = error
                continue
            asked += 1
            for index, answer in zip(missing, fetched, strict=True):
                answers[index] = answer
            moved = [keys[index] for index in missing if answers[index].outcome is Outcome.MOVED]
            missing = [index for index in missing if answers[index].outcome is not Outcome.MOVED]
            self._hints.note(moved, address)
        self._tally.count(failures=failure is not None)
        if not asked and failure is not None:
            raise failure
        self._hints.drop(keys[index] for index in missing)
        self._tally.missed(keys[index] for index in missing)

    def _candidates(self, key: BlockKey) -> list[str]:
        ranked = [address for address in ranking(self._settings.peers, key) if address != self._settings.own_address]
        hinted = self._hints.recall(key)
        return sorted(ranked, key=lambda address: address != hinted)  # stable: all others stay in their order

    def _owners(self, key: BlockKey) -> list[str]:
        """Who should have its chain; of a node that has left, then those that others ask where that one is away."""
        ranked = ranking(self._settings.peers, key)
        return ranked if self._left else ranked[:1]

    def _push(
        self,
        owners: Sequence[str],
        namespace: Namespace,
        names: Sequence[ChainHash],
        blocks: Sequence[ByteArray],
        deadline: Nanos,
    ) -> tuple[str, int, list[bool]]:
        """To the first of these that answers: which it is, and what `Link.push` says.

        Raises:
            TierFailed: None does.
        """
        *first, last = owners
        for owner in first:
            with suppress(TierFailed):
                return owner, *self._link(owner, namespace).push(names, blocks, deadline)
            self._tally.count(failures=1)
        return last, *self._link(last, namespace).push(names, blocks, deadline)

    def _share(self, deadline: Nanos, asked: int) -> Nanos:
        """Of the time left, one part for each look-up that may follow."""
        now = self._clock.now()
        return Nanos(now + (deadline - now) // max(self._settings.look_ups - asked, 1))

    def _sound(self, keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
        """The chain up to the first block that was found bad."""
        now = self._clock.now()
        return keys[: next((index for index, key in enumerate(keys) if self._doubts.has(key, now)), len(keys))]

    def _by_namespace(
        self, keys: Sequence[BlockKey], buffers: Sequence[ByteArray]
    ) -> list[tuple[Namespace, list[int]]]:
        """Indices of what can be moved at all."""
        now = self._clock.now()
        groups: dict[bytes, list[int]] = {}
        for index, key in enumerate(keys):
            if not self._doubts.has(key, now):
                groups.setdefault(key.digest, []).append(index)
        known = [(self._namespace(digest), indices) for digest, indices in groups.items()]
        fitting = [
            (namespace, [index for index in indices if buffers[index].nbytes == namespace.block_bytes])
            for namespace, indices in known
            if namespace is not None
        ]
        return [(namespace, indices) for namespace, indices in fitting if indices]

    def _namespace(self, digest: bytes) -> Namespace | None:
        try:
            return self._namespaces(digest)
        except NamespaceUnknown:
            return None

    def _link(self, address: str, namespace: Namespace) -> "Link":
        with self._lock:
            self._gate.require_open()
            link = self._links.get((address, namespace.digest))
            if link is None:
                link = Link(address, namespace, self._connect, nanos(self._settings.connect_seconds), self._clock)
                self._links[address, namespace.digest] = link
            return link

    def _all_links(self) -> list["Link"]:
        with self._lock:
            return list(self._links.values())


class Link:
    """One namespace of one peer: connected to when it is needed, and again after a pause when that failed. Thread-safe."""

    def __init__(self, address: str, namespace: Namespace, connect: Connect, connect_within: Nanos, clock: Clock):
        self._address = address
        self._namespace = namespace
        self._connect = connect
        self._connect_within = connect_within
        self._clock = clock
        self._breaker = Breaker()
        self._lock = threading.Lock()
        self._store: PeerStore | None = None
        self._closed = False

    @property
    def corrupt(self) -> int:
        """Blocks whose bytes did not have the checksum that the peer gave them."""
        store = self._store
        return 0 if store is None else store.counters().corrupt

    def look(self, names: Sequence[ChainHash], deadline: Nanos) -> int:
        """How many leading blocks the peer has in its memory.

        Raises:
            TierFailed: It does not say.
        """
        return len(self._match(self._opened(deadline), names, 0, deadline))

    def fetch(self, names: Sequence[ChainHash], into: Sequence[ByteArray], deadline: Nanos) -> list[Fetched]:
        """Blocks that the peer has; a run that follows a hole is looked for once some have been found.

        Raises:
            TierFailed: It does not answer, or says that it has blocks and does not deliver one.
        """
        store = self._opened(deadline)
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

    def push(self, names: Sequence[ChainHash], blocks: Sequence[ByteArray], deadline: Nanos) -> tuple[int, list[bool]]:
        """Write blocks into the peer's memory.

        Returns:
            How many were new there, and which are there now.

        Raises:
            TierFailed: It does not answer.
        """
        store = self._opened(deadline)
        try:
            written = store.write(names, blocks, deadline=deadline)
        except (StoreError, ValueError) as error:
            raise TierFailed(f"{self._address}: {error}") from error
        return written, self._held(store, names, deadline)

    def holds(self, names: Sequence[ChainHash], deadline: Nanos) -> list[bool]:
        """Which blocks the peer has in its memory, as far as `RUNS` look-ups tell.

        Raises:
            TierFailed: It does not say.
        """
        return self._held(self._opened(deadline), names, deadline)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            store, self._store = self._store, None
        if store is not None:
            store.close()

    def _held(self, store: PeerStore, names: Sequence[ChainHash], deadline: Nanos) -> list[bool]:
        held = [False] * len(names)
        start = 0
        for _ in range(RUNS):
            if start >= len(names):
                break
            run = len(self._match(store, names[start:], 0, deadline))
            held[start : start + run] = [True] * run
            start += run + 1
        return held

    def _match(self, store: PeerStore, names: Sequence[ChainHash], lease_seconds: float, deadline: Nanos) -> Match:
        try:
            match = store.match(names, lease_seconds=lease_seconds, deadline=deadline)
        except (StoreError, ValueError) as error:
            raise TierFailed(f"{self._address}: {error}") from error
        if not match and not store.answers:
            raise TierFailed(f"{self._address} does not answer")
        if len(match) > len(names):
            raise TierFailed(f"{self._address}: found {len(match)} blocks of {len(names)}")
        return match

    def _read(
        self,
        store: PeerStore,
        match: Match,
        into: Sequence[ByteArray],
        answers: list[Fetched],
        start: int,
        deadline: Nanos,
    ) -> None:
        try:
            good = store.read(match, range(len(match)), into, deadline=deadline)
        except (StoreError, ValueError) as error:
            raise TierFailed(f"{self._address}: {error}") from error
        finally:
            if self._clock.now() < deadline:  # else it ends by itself
                store.release(match.lease_id, deadline=deadline)
        for index, (is_there, slot) in enumerate(zip(good, match.slots, strict=True), start):
            if is_there:
                answers[index] = Fetched(Outcome.MOVED, slot.crc32c)
        if not any(good):
            raise TierFailed(f"{self._address} has blocks that do not arrive")

    def _opened(self, deadline: Nanos) -> PeerStore:
        store = self._store
        if store is not None:
            return store
        left = seconds(deadline - self._clock.now())
        if not self._lock.acquire(timeout=max(left, 0)):
            raise TierFailed(f"{self._address}: still being connected to")
        try:
            if self._store is None:
                self._store = self._connected(deadline)
            return self._store
        finally:
            self._lock.release()

    def _connected(self, deadline: Nanos) -> PeerStore:
        started = self._clock.now()
        if self._closed or not self._breaker.allows(started):
            raise TierFailed(f"{self._address} is away")
        within = seconds(min(Nanos(deadline - started), self._connect_within))
        try:
            probe(self._address, within)
            store = self._connect(self._address, self._namespace, within)
        except (StoreError, OSError) as error:
            if self._breaker.closed:
                log.warning("peer cannot be used", extra={"peer": self._address, "reason": str(error)})
            self._breaker.failed(started, self._clock.now())
            raise TierFailed(f"{self._address}: {error}") from error
        self._breaker.succeeded()
        return store


class Hints:
    """Who was seen to have which block. Thread-safe, bounded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: Recent[BlockKey, str] = Recent(HINTS)

    def note(self, keys: Iterable[BlockKey], holder: str) -> None:
        with self._lock:
            for key in keys:
                self._holders.note(key, holder)

    def drop(self, keys: Iterable[BlockKey]) -> None:
        with self._lock:
            for key in keys:
                self._holders.forget(key)

    def recall(self, key: BlockKey) -> str | None:
        with self._lock:
            return self._holders.get(key)


class Doubts:
    """Blocks that were found bad, for a while. Thread-safe, bounded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until: Recent[BlockKey, Nanos] = Recent(DOUBTS)

    def note(self, keys: Iterable[BlockKey], now: Nanos) -> None:
        with self._lock:
            for key in keys:
                self._until.note(key, Nanos(now + DOUBTED_FOR))

    def has(self, key: BlockKey, now: Nanos) -> bool:
        until = self._until.get(key)
        return until is not None and now < until


def ranking(peers: Sequence[str], key: BlockKey) -> list[str]:
    """The peers in the order in which they should have the chain that begins with this block."""

    def weight(address: str) -> tuple[int, str]:
        return xxhash.xxh3_64_intdigest(key.digest + key.name + address.encode()), address

    return sorted(peers, key=weight, reverse=True)


def probe(address: str, within_seconds: float) -> None:
    """Whether anybody listens there at all, which a handshake is too patient to tell at once.

    Raises:
        StoreUnreachable: Nobody does.
    """
    try:
        if path := unix_path(address):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(max(within_seconds, 0.001))
                connection.connect(path)
        else:
            socket.create_connection(host_port(address), max(within_seconds, 0.001)).close()
    except OSError as error:
        raise StoreUnreachable(f"nobody listens: {reason(error)}") from error


def _has_port(address: str) -> bool:
    try:
        return host_port(address)[1] > 0
    except ValueError:
        return False
