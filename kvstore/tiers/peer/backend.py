"""Blocks in the memory of other nodes, fetched with their leases and over their data plane: a backend of `kvstore.tiers.remote`.

Rules:

1. A peer fills itself. This tier reads, and puts nothing anywhere unless `push` says so; then a chain goes to its owner.
2. Each chain has an order of peers, its owner first: the one that the rendezvous hash of peer and first block puts
   first. It needs no table and hardly changes when peers come and go.
3. Whoever was seen to hold a block is asked first, the others in that order, and never more than `look_ups` that answer.
   A peer that does not answer costs its share of the time once, then nothing for a while. So does one whose blocks are
   damaged on their way often: it is fenced (`kvstore.tiers.fence`).
4. Peers are asked for what is in their memory only (no patience): two nodes never wait for each other's lower tiers.
5. The checksum that a peer recorded when the block was written is verified on the bytes that arrive. A peer is told of bad
   blocks, and drops those that it finds bad itself. Whoever may talk to us as a peer is settled by how `connect` connects.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

import xxhash
from msgspec.structs import replace

from kvstore.block import BlockHash
from kvstore.buffers import ByteArray, crc32c
from kvstore.clock import Clock, Nanos, nanos
from kvstore.errors import NamespaceUnknown, TierFailed
from kvstore.messages import GONE, BlockKey, BlockOutcome, FetchResult
from kvstore.namespace import KvNamespace
from kvstore.tiers.peer.connections import Connect, PeerNodeConnection
from kvstore.tiers.peer.hints import PeerHints, SuspectBlocks
from kvstore.tiers.peer.settings import PeerSettings
from kvstore.tiers.remote import BackendHealth, BlockRead, BlockWrite, RemoteTier
from kvstore.tiers.second_reading import ReadingVerdict
from kvstore.tiers.statistics import TierStatistics

Which = TypeVar("Which")


def open_peers(
    settings: PeerSettings, connect: Connect, *, namespaces: Callable[[bytes], KvNamespace], clock: Clock
) -> "RemoteTier[PeerBackend]":
    """A tier in the peers' memory. Connects when it is needed; peers may be away.

    Args:
        settings: What to use.
        connect: How to reach a peer.
        namespaces: By digest; `NamespaceUnknown` where nobody has opened it here.
        clock: Of the deadlines; the one of the connections.
    """
    statistics = TierStatistics("peer")
    backend = PeerBackend(settings, connect, namespaces, statistics, clock)
    return RemoteTier(backend, statistics, clock)


class PeerBackend:
    """See `kvstore.tiers.remote`, and the module. Made by `open_peers`."""

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
        """What was found bad is not asked for again for a while."""
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
        """Asks whoever was seen to hold them, as far as `RUNS` look-ups of each tell."""
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

    def remove(self, keys: Sequence[BlockKey], deadline: Nanos) -> None:  # noqa: ARG002 - asks nobody
        """They are the peers' to forget; here they are not asked for again for a while."""
        self._suspects.note(keys, self._clock.now())
        self._hints.drop(keys)

    def examine(self, key: BlockKey, block_bytes: int, deadline: Nanos) -> ReadingVerdict:  # noqa: ARG002 - asks nobody
        """Peers look at their blocks themselves, when they are told that one is bad."""
        return ReadingVerdict.UNREAD

    def health(self) -> BackendHealth:
        each = [connection.health for connection in self._all_connections()]
        return BackendHealth(
            corrupt=sum(one.corrupt for one in each),
            damaged=sum(one.damaged for one in each),
            fenced=sum(one.fenced for one in each),
        )

    def leave(self) -> None:
        """This node goes: what goes down from now on goes to the peers' memory, and none of it to this node.

        The others rank each other as before, so what would have been here is where they look next; likewise where one of them is away.
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
        """Have the owner of their chain keep these blocks."""
        owners = self._owners(next(iter(work)))
        if owners[0] == self._settings.own_address:
            there.update(dict.fromkeys(work, False))
            return
        copies = {key: given.block.copy() for key, given in work.items()}  # the peer's client sums up what it finds
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
        """Answer for these, from one peer after the other."""
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
        """A peer that fails is counted; that no other has answered instead is a failure of the tier."""
        if failure is None:
            return
        if not asked:
            raise failure
        self._statistics.count(failures=1)

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
        namespace: KvNamespace,
        names: Sequence[BlockHash],
        blocks: Sequence[ByteArray],
        deadline: Nanos,
    ) -> tuple[str, int, list[bool]]:
        """To the first of these that answers: which it is, and what `PeerNodeConnection.push` says.

        Raises:
            TierFailed: None does.
        """
        *first, last = owners
        for owner in first:
            with suppress(TierFailed):
                return owner, *self._connection(owner, namespace).push(names, blocks, deadline)
            self._statistics.count(failures=1)
        return last, *self._connection(last, namespace).push(names, blocks, deadline)

    def _share(self, deadline: Nanos, asked: int) -> Nanos:
        """Of the time left, one part for each look-up that may follow."""
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
    """The peers in the order in which they should have the chain that begins with this block."""

    def weight(address: str) -> tuple[int, str]:
        return xxhash.xxh3_64_intdigest(key.digest + key.name + address.encode()), address

    return sorted(peers, key=weight, reverse=True)
