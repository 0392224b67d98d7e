"""Peer backend: reads blocks from the memory of other nodes, under a read lease and over one of their data paths.

Rules:

1. By default, this tier only reads blocks that peers have put into their own pools. If `push` is set, it also writes
   the blocks of each call to the pool of their owner (rule 2).
2. Rendezvous hashing of the peers' addresses and the first block of a call of the tier gives an order of the peers, the
   rendezvous order; the first peer in it is the owner. This needs no table, and the order hardly changes when peers
   come and go. Calls that begin with different blocks of a chain have different orders.
3. The peer that was last found to have the call's first block is queried first, then the others in rendezvous order,
   until `look_ups` peers have answered. A peer that does not answer is not queried for a while, and neither is a peer
   whose blocks are often damaged in transit (`kvstore.tiers.fence`).
4. Peers are queried only for blocks in their memory (max wait 0), so that two nodes never wait for each other's tiers.
5. The checksum that was published with a block is verified on the bytes that arrive. Bad blocks are reported to the peer,
   which removes a block if it finds the block bad too. The node passes in the function `connect`, which opens
   connections to peers with the node's credentials.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

import xxhash
from msgspec.structs import replace

from kvstore.block import BlockHash
from kvstore.buffers import ByteArray, crc32c
from kvstore.clock import SECOND, Clock, Nanos, nanos
from kvstore.errors import NamespaceUnknown, TierFailed
from kvstore.messages import GONE, BlockKey, BlockOutcome, FetchResult
from kvstore.namespace import KvNamespace
from kvstore.recent_map import RecentMap
from kvstore.tiers.peer.connections import Connect, PeerNodeConnection
from kvstore.tiers.peer.settings import PeerSettings
from kvstore.tiers.remote import BackendHealth, BlockRead, BlockWrite, RemoteTier
from kvstore.tiers.second_reading import ReadingVerdict
from kvstore.tiers.statistics import TierStatistics

# Maximum number of blocks in `PeerHints`, which remembers the peer that had each block. The oldest are forgotten.
HINTS = 1 << 16
# Maximum number of blocks in `SuspectBlocks`, which remembers blocks that were found bad. The oldest are forgotten.
SUSPECTS = 4096
SUSPECT_FOR = Nanos(60 * SECOND)
"""Time for which no peer is asked for a block that was found bad. In this time, a worker that needs the block can compute
it and store it again."""

Which = TypeVar("Which")


def open_peers(
    settings: PeerSettings, connect: Connect, *, namespaces: Callable[[bytes], KvNamespace], clock: Clock
) -> "RemoteTier[PeerBackend]":
    """Make a tier that uses the memory of peer nodes; it connects to a peer when a call needs the peer.

    Args:
        settings: The peers and limits.
        connect: Opens a connection to a peer.
        namespaces: Returns the namespace for a digest; raises `NamespaceUnknown` if it is not open here.
        clock: The clock of deadlines, also within the connections.
    """
    statistics = TierStatistics("peer")
    backend = PeerBackend(settings, connect, namespaces, statistics, clock)
    return RemoteTier(backend, statistics, clock)


class PeerBackend:
    """The `TierBackend` for peer nodes, made by `open_peers`; it writes blocks only if `push` is set."""

    def __init__(
        self,
        settings: PeerSettings,
        connect: Connect,
        namespaces: Callable[[bytes], KvNamespace],
        statistics: TierStatistics,
        clock: Clock,
    ):
        self._settings = settings
        self._connect = connect
        self._namespaces = namespaces
        self._statistics = statistics
        self._clock = clock
        self._hints = PeerHints()
        self._suspects = SuspectBlocks()
        self._lock = threading.Lock()
        self._connections: dict[tuple[str, bytes], PeerNodeConnection] = {}
        self._left = False
        self._closed = False

    def takes(self, key: BlockKey, block_bytes: int | None = None) -> bool:
        """Return whether the namespace is open, its blocks have this length, and the block was not found bad lately.

        If `block_bytes` is None, the length is not compared.
        """
        namespace = self._namespace(key.digest)
        fits = namespace is not None and block_bytes in (None, namespace.block_bytes)
        return fits and not self._suspects.has(key, self._clock.now())

    def find(self, keys: Sequence[BlockKey], deadline: Nanos) -> int:
        namespace = self._namespace(keys[0].digest)
        if namespace is None:
            return 0
        names = [key.name for key in keys]
        longest, holder, asked, failure = 0, "", 0, None
        for address in self._candidates(keys[0]):
            if asked == self._settings.look_ups or longest == len(names):
                break
            try:
                found = self._connection(address, namespace).look_up(names, self._share(deadline, asked))
            except TierFailed as error:
                failure = error
                continue
            asked += 1
            if found > longest:
                longest, holder = found, address
        self._hints.note(keys[:longest], holder)
        self._judge(failure, asked)
        return longest

    def holds(self, keys: Sequence[BlockKey], deadline: Nanos) -> list[bool]:
        """Return which blocks the peers have now.

        For each block, only the peer that was last found to have it is asked; without such a peer, the block counts as
        missing. Each peer gets at most `connections.RUNS` look-ups per namespace. Blocks that these look-ups do not
        reach count as missing.
        """
        there: set[BlockKey] = set()
        asked: dict[tuple[str, bytes], list[BlockKey]] = {}
        for key in keys:
            if (holder := self._hints.recall(key)) is not None:
                asked.setdefault((holder, key.digest), []).append(key)
        for (holder, digest), theirs in asked.items():
            if (namespace := self._namespace(digest)) is None:
                continue
            held = self._connection(holder, namespace).holds([key.name for key in theirs], deadline)
            there.update(key for key, is_there in zip(theirs, held, strict=True) if is_there)
        return [key in there for key in keys]

    def put(self, work: Mapping[BlockKey, BlockWrite], there: dict[BlockKey, bool], deadline: Nanos) -> None:
        if not self._settings.push:
            there.update(dict.fromkeys(work, False))
            return
        failure: TierFailed | None = None
        for namespace, keys in self._by_namespace({key: key for key in work}):
            try:
                self._give(namespace, {key: work[key] for key in keys}, there, deadline)
            except TierFailed as error:
                failure = error
        if failure is not None:
            raise failure

    def get(self, work: Mapping[int, BlockRead], answers: dict[int, FetchResult], deadline: Nanos) -> None:
        failure: TierFailed | None = None
        for namespace, indices in self._by_namespace({index: wanted.key for index, wanted in work.items()}):
            try:
                self._fetch(namespace, {index: work[index] for index in indices}, answers, deadline)
            except TierFailed as error:
                failure = error
        if failure is not None:
            raise failure

    def remove(self, keys: Sequence[BlockKey], deadline: Nanos) -> None:  # noqa: ARG002 - no peer is asked
        """Stop requesting these blocks for `SUSPECT_FOR`. Remove nothing, because the peers own the blocks."""
        self._suspects.note(keys, self._clock.now())
        self._hints.drop(keys)

    def examine(self, key: BlockKey, block_bytes: int, deadline: Nanos) -> ReadingVerdict:  # noqa: ARG002 - no peer is asked
        """Return UNREAD, because peers examine their own blocks after a report of a bad block."""
        return ReadingVerdict.UNREAD

    def health(self) -> BackendHealth:
        each = [connection.health for connection in self._all_connections()]
        return BackendHealth(
            corrupt=sum(one.corrupt for one in each),
            damaged=sum(one.damaged for one in each),
            fenced=sum(one.fenced for one in each),
        )

    def leave(self) -> None:
        """From now on, push all demoted blocks to the other peers, because this node will end soon.

        The blocks of a call go to the first other peer in their rendezvous order that answers (rule 2). If another node
        looks up blocks from the same first block on, it has the same order. It skips peers that do not answer, such as
        this node after its end, and therefore asks the peer that has the blocks.
        """
        others = tuple(address for address in self._settings.peers if address != self._settings.own_address)
        self._settings = replace(self._settings, peers=others, own_address="", push=True)
        self._left = True

    def close(self) -> None:
        with self._lock:
            self._closed = True
        for connection in self._all_connections():
            connection.close()

    def _give(
        self, namespace: KvNamespace, work: Mapping[BlockKey, BlockWrite], there: dict[BlockKey, bool], deadline: Nanos
    ) -> None:
        """Write blocks of one namespace to the owner of the first block; write nothing if this node is the owner."""
        owners = self._owners(next(iter(work)))
        if owners[0] == self._settings.own_address:
            there.update(dict.fromkeys(work, False))
            return
        # The blocks are copied, because the store client reads a block twice and the pool may change it in between.
        copies = {key: write.block.copy() for key, write in work.items()}
        sound = [key for key in work if crc32c([copies[key]]) == work[key].crc32c]
        there.update((key, False) for key in work if key not in set(sound))
        self._statistics.count(corrupt=len(work) - len(sound))
        if not sound:
            return
        owner, written, held = self._push(
            owners, namespace, [key.name for key in sound], [copies[key] for key in sound], deadline
        )
        self._statistics.count(bytes_written=written * namespace.block_bytes, refused=held.count(False))
        there.update(zip(sound, held, strict=True))
        self._hints.note((key for key in sound if there[key]), owner)

    def _fetch(
        self,
        namespace: KvNamespace,
        work: Mapping[int, BlockRead],
        answers: dict[int, FetchResult],
        deadline: Nanos,
    ) -> None:
        """Ask one peer after the other for the missing blocks, until all arrived or `look_ups` peers answered."""
        missing = dict(work)
        asked, failure = 0, None
        for address in self._candidates(next(iter(work.values())).key):
            if not missing or asked == self._settings.look_ups:
                break
            hinted = self._hints.recall(next(iter(missing.values())).key) == address
            until = deadline if hinted else self._share(deadline, asked)
            names, into = [each.key.name for each in missing.values()], [each.into for each in missing.values()]
            try:
                fetched = self._connection(address, namespace).fetch(names, into, until)
            except TierFailed as error:
                failure = error
                continue
            asked += 1
            moved = {i: a for i, a in zip(missing, fetched, strict=True) if a.outcome is BlockOutcome.MOVED}
            answers.update(moved)
            self._hints.note((missing.pop(index).key for index in moved), address)
        if asked:
            answers.update(dict.fromkeys(missing, GONE))
            self._hints.drop(each.key for each in missing.values())
        self._judge(failure, asked)

    def _judge(self, failure: TierFailed | None, asked: int) -> None:
        """Raise `failure`, the last failure of a peer, if no peer has answered; otherwise only count the failure.

        If `failure` is None, no peer has failed, and nothing is done.
        """
        if failure is None:
            return
        if not asked:
            raise failure
        self._statistics.count(failures=1)

    def _candidates(self, key: BlockKey) -> list[str]:
        ranked = [address for address in ranking(self._settings.peers, key) if address != self._settings.own_address]
        hinted = self._hints.recall(key)
        # The sort moves the hinted peer to the front. It is stable, so the other peers stay in rendezvous order.
        return sorted(ranked, key=lambda address: address != hinted)

    def _owners(self, key: BlockKey) -> list[str]:
        """Return the owner of the blocks of a call that begins with this block (rule 2).

        After `leave`, return all other peers in rendezvous order.
        """
        ranked = ranking(self._settings.peers, key)
        return ranked if self._left else ranked[:1]

    def _push(
        self,
        owners: Sequence[str],
        namespace: KvNamespace,
        names: Sequence[BlockHash],
        blocks: Sequence[ByteArray],
        deadline: Nanos,
    ) -> tuple[str, int, list[bool]]:
        """Push to the first of these peers that answers; return its address and the result of `PeerNodeConnection.push`.

        Raises:
            TierFailed: No peer answers.
        """
        *first, last = owners
        for owner in first:
            with suppress(TierFailed):
                return owner, *self._connection(owner, namespace).push(names, blocks, deadline)
            self._statistics.count(failures=1)
        return last, *self._connection(last, namespace).push(names, blocks, deadline)

    def _share(self, deadline: Nanos, asked: int) -> Nanos:
        """Return the deadline of the next look-up, after `asked` peers have answered.

        The time until `deadline` is divided equally among the remaining look-ups.
        """
        now = self._clock.now()
        return Nanos(now + (deadline - now) // max(self._settings.look_ups - asked, 1))

    def _by_namespace(self, work: Mapping[Which, BlockKey]) -> list[tuple[KvNamespace, list[Which]]]:
        groups: dict[bytes, list[Which]] = {}
        for which, key in work.items():
            groups.setdefault(key.digest, []).append(which)
        known = [(self._namespace(digest), found) for digest, found in groups.items()]
        return [(namespace, found) for namespace, found in known if namespace is not None]

    def _namespace(self, digest: bytes) -> KvNamespace | None:
        try:
            return self._namespaces(digest)
        except NamespaceUnknown:
            return None

    def _connection(self, address: str, namespace: KvNamespace) -> PeerNodeConnection:
        with self._lock:
            if self._closed:
                raise TierFailed("the peer tier is closed")
            connection = self._connections.get((address, namespace.digest))
            if connection is None:
                connection = PeerNodeConnection(
                    address, namespace, self._connect, nanos(self._settings.connect_seconds), self._clock
                )
                self._connections[address, namespace.digest] = connection
            return connection

    def _all_connections(self) -> list[PeerNodeConnection]:
        with self._lock:
            return list(self._connections.values())


def ranking(peers: Sequence[str], key: BlockKey) -> list[str]:
    """Return the peers in rendezvous order (rule 2) for a call that begins with this block."""

    def weight(address: str) -> tuple[int, str]:
        return xxhash.xxh3_64_intdigest(key.digest + key.name + address.encode()), address

    return sorted(peers, key=weight, reverse=True)


class PeerHints:
    """Remembers the peer that was last found to have a block, for the `HINTS` blocks that were found last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: RecentMap[BlockKey, str] = RecentMap(HINTS)

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


class SuspectBlocks:
    """Remembers for `SUSPECT_FOR` which blocks were found bad, at most `SUSPECTS` blocks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until: RecentMap[BlockKey, Nanos] = RecentMap(SUSPECTS)

    def note(self, keys: Iterable[BlockKey], now: Nanos) -> None:
        with self._lock:
            for key in keys:
                self._until.note(key, Nanos(now + SUSPECT_FOR))

    def has(self, key: BlockKey, now: Nanos) -> bool:
        until = self._until.get(key)
        return until is not None and now < until
