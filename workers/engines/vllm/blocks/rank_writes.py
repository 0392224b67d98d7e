"""Rank writes: let the ranks of one engine write blocks to the store together; each rank writes its share of the heads.

This module does not use vLLM.

Rules:

1. Blocks in the store are whole (`kvstore.layouts.rank_shards`). The first rank leads: it reserves places, orders the other ranks
   to write their shards there, and writes its own shard meanwhile. Then it publishes, in one call, the blocks that
   every rank has written.
2. The leader does not publish a block that a rank did not write in time. The block's place in the pool becomes free at once,
   or if the leader has died, when the reservation ends. The late rank may still write to the place when the place already
   belongs to another block. This damages the other block but not its published checksum, so readers detect the damage.
3. An order identifies a block by its step and save, which are the same on all ranks, because the scheduler gives all
   ranks the same orders. A rank that has missed a save therefore notices this, and answers that it does not have the
   block.
4. Urgent and deferred blocks have separate channels: two connections from each rank to a Unix socket in a folder that
   only this engine's processes can access. Each channel carries one order at a time. The leader waits for answers, and
   followers wait for orders, up to a deadline. A save that exceeds its deadline is lost, so its blocks will have to be
   computed again. If a rank leaves an order unanswered, the leader orders no more writes of that save. It then pauses
   all writes on the channel for some time (`kvstore.circuit_breaker`). The engine therefore does not wait for this rank
   again and again. If the connection of a rank is lost, the leader orders no more writes at all.
5. If several ranks hold the same head, only one of them writes it, and the ranks take turns from block to block. The
   other ranks report a contribution of zero to the checksum.
"""

import logging
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import Self, TypeAlias

import msgspec
from msgspec import Struct

from kvstore.block import BlockHash
from kvstore.buffers import Block
from kvstore.circuit_breaker import CircuitBreaker
from kvstore.client.store_client import StoreClient, batch_blocks
from kvstore.clock import SECOND, Clock, Nanos, seconds
from kvstore.layouts.rank_shards import RankShard, WriteGrant, combined_checksums
from kvstore.layouts.shards import BlockShape
from kvstore.namespace import KvNamespace

log = logging.getLogger(__name__)

JOIN = Nanos(60 * SECOND)  # maximum wait for the other ranks at the start; a machine with few cores starts them slowly
LEAD = Nanos(2 * SECOND)  # maximum time for which the leader waits for the answers to an order (rule 4)
# Maximum wait of a follower for the next order of a save. It exceeds `LEAD`, because meanwhile the leader may wait for
# the store node and for another rank.
FOLLOW = Nanos(4 * SECOND)

ORDER_BLOCKS = 256  # maximum number of blocks in one order, which then has 10 KB
ENDED_SAVES = 1024  # maximum number of ended saves that the leader reports in one message (`WriteOrder.ended`)
# Maximum number of bytes of the blocks in one order, unless a single block is larger. It is so small that every machine
# writes the blocks within `LEAD`.
ORDER_BYTES = 256 << 20
MESSAGE_BYTES = 64 << 10

SaveKey = tuple[int, int]
"""Identifies a save of one channel: the number of its step, and its position among the step's saves of that channel."""


class RankChannel(IntEnum):
    URGENT = 0  # the channel of urgent saves, which the engine's thread uses within a step
    DEFERRED = 1


class SavedBlock(Struct, frozen=True, array_like=True):
    """Identifies one block, in the same way on all ranks: by its save, and by its position (`index`) in the save."""

    save: SaveKey
    index: int


class RankPosition(Struct, frozen=True):
    """States a rank's position in its engine, and which shard of each block it has."""

    rank: int
    ranks: int
    replicas: int  # number of ranks that hold the same heads; above 1 if there are more ranks than heads
    share: RankShard

    @classmethod
    def of(cls, namespace: KvNamespace, *, rank: int, ranks: int) -> Self:
        """Return the position of a rank, with the part of each block that the rank holds.

        Raises:
            LayoutMismatch: The heads cannot be divided among so many ranks.
        """
        shape = BlockShape.of(namespace)
        return cls(rank, ranks, shape.replicas(ranks), RankShard.of_rank(shape, tp=ranks, rank=rank))

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def writes(self, turn: int) -> bool:
        """Return True if this rank, and no other rank with the same heads, writes the block at position `turn` of a write (rule 5)."""
        return turn % self.replicas == self.rank % self.replicas


class RankHello(Struct, frozen=True, array_like=True):
    rank: int
    lane: RankChannel


class WriteOrder(Struct, frozen=True, array_like=True):
    """The leader's order to write the shards of these blocks.

    An order may also report which saves have ended. An order without blocks only reports ended saves.
    """

    number: int
    grant: WriteGrant | None = None
    first: int = 0  # position of the order's first place among all places that were reserved for the write
    blocks: tuple[SavedBlock, ...] = ()  # one block for each place
    ended: tuple[SaveKey, ...] = ()  # saves for which no more orders will come after this one

    @property
    def save(self) -> SaveKey:
        """The save of the first block in the order; if there is no block, the first save that has ended."""
        return self.blocks[0].save if self.blocks else self.ended[0]


class WrittenShards(Struct, frozen=True, array_like=True):
    """A rank's answer to an order: its part of each block's checksum, by the block's position in the order.

    The part is 0 for a block that another rank with the same heads writes (rule 5). A block that was not written is left out.
    """

    number: int
    sums: dict[int, int]


class LeaderLost(Exception):
    """Raised by a follower when the first rank has ended or has closed the channel, so that no more orders come."""


Source: TypeAlias = "Callable[[SavedBlock], Block | None]"
"""A function that returns a rank's shard of a block; None: the rank does not have the block. The shard stays valid
until the function was called for as many other blocks as `kvstore.client.store_client.batch_blocks` returns."""


class LeaderRank:
    """Leads the other ranks in the process of the first rank: it sends them orders on all channels."""

    def __init__(self, client: StoreClient, seat: RankPosition, path: Path, clock: Clock):
        """Listen on a Unix socket at the given path; `gather` accepts the other ranks."""
        self.seat = seat
        self._client = client
        self.clock = clock
        self._path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(self._path))
        self._listener.listen(len(RankChannel) * seat.ranks)
        self._turns = [threading.Lock() for _ in RankChannel]
        self._numbers = [0 for _ in RankChannel]
        # For each channel: the sockets of the other ranks, by rank.
        self._followers: list[dict[int, socket.socket]] = [{} for _ in RankChannel]
        # For each channel: a circuit breaker that opens when a rank has left an order unanswered (rule 4).
        self.answering = [CircuitBreaker() for _ in RankChannel]
        self.lost = False
        self.at_once = min(max(ORDER_BYTES // seat.share.block_bytes, 1), ORDER_BLOCKS)

    def gather(self) -> None:
        """Wait until every other rank has joined.

        Raises:
            TimeoutError: A rank has not joined within `JOIN`.
        """
        deadline = Nanos(self.clock.now() + JOIN)
        while any(len(lane) < self.seat.ranks - 1 for lane in self._followers):
            self._listener.settimeout(_left(deadline, self.clock))
            follower, _ = self._listener.accept()
            follower.settimeout(_left(deadline, self.clock))
            hello = msgspec.msgpack.decode(follower.recv(MESSAGE_BYTES), type=RankHello)
            lane = self._followers[hello.lane]
            assert 0 < hello.rank < self.seat.ranks, hello
            assert hello.rank not in lane, hello
            lane[hello.rank] = follower

    def write(
        self,
        lane: RankChannel,
        names: Sequence[BlockHash],
        blocks: Sequence[SavedBlock],
        source: Source,
        *,
        tenant: bytes,
        ended: Sequence[SaveKey],
    ) -> int:
        """Let all ranks write the blocks that the store lacks; return the number of newly stored blocks.

        Args:
            lane: The channel on which the followers expect the order.
            names: Block hashes from the start of the chain.
            blocks: The identity of each block, one for each hash.
            source: Function that returns this rank's shard of a block.
            tenant: Salt of the chain; the blocks count towards the quota of its tenant.
            ended: Saves that are reported to the followers as ended, after the orders of this call.
        """
        with self._turns[lane]:
            grant: WriteGrant | None = None
            checksums: dict[int, int] = {}
            try:
                if names and not self.lost and self.answering[lane].allows(self.clock.now()):
                    grant = self._client.reserve(names, tenant=tenant)
                if grant is not None:
                    self._order_all(lane, grant, blocks, source, checksums)
            finally:
                for first in range(0, len(ended), ENDED_SAVES):
                    self._order(lane, WriteOrder(self._number(lane), ended=tuple(ended[first : first + ENDED_SAVES])))
                published = self._client.publish(grant, checksums) if grant is not None else 0
        return published

    def close(self) -> None:
        """Close all channels, by which the followers notice that the leader ends."""
        for lane in self._followers:
            for follower in lane.values():
                follower.close()
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def _order_all(
        self,
        lane: RankChannel,
        grant: WriteGrant,
        blocks: Sequence[SavedBlock],
        source: Source,
        checksums: dict[int, int],
    ) -> None:
        """Send orders for all places that were reserved, until a rank does not answer one.

        Collect the checksums of the blocks that all ranks have written.
        """
        for first in range(0, len(grant.places), self.at_once):
            part = grant.some(first, first + self.at_once)
            order = WriteOrder(self._number(lane), part, first, tuple([blocks[index] for index in part.places.indices]))
            started = self.clock.now()
            self._order(lane, order)
            sums_by_rank = [_put(self._client, self.seat, order, source)]
            for rank, follower in self._followers[lane].items():
                sums = self._answer(rank, follower, order.number, Nanos(started + LEAD))
                if sums is None:
                    self.answering[lane].failed(started, self.clock.now())
                    return
                sums_by_rank.append(sums)
            self.answering[lane].succeeded()
            written = combined_checksums(self.seat.share.block_bytes, sums_by_rank)
            checksums.update((first + at, crc32c) for at, crc32c in written.items())

    def _order(self, lane: RankChannel, order: WriteOrder) -> None:
        message = msgspec.msgpack.encode(order)
        for rank, follower in self._followers[lane].items():
            try:
                follower.settimeout(seconds(LEAD))
                follower.send(message)
            except OSError as error:
                self._lose(rank, error)

    def _answer(self, rank: int, follower: socket.socket, number: int, deadline: Nanos) -> Mapping[int, int] | None:
        """Return the checksum parts of a rank's answer (`WrittenShards.sums`).

        Return None if the rank does not answer by the deadline, or is lost.
        """
        while not self.lost:
            try:
                follower.settimeout(_left(deadline, self.clock))
                message = follower.recv(MESSAGE_BYTES)
            except TimeoutError:
                log.warning("engine rank does not answer, blocks are not kept", extra={"rank": rank})
                break
            except OSError as error:
                self._lose(rank, error)
                break
            if not message:
                self._lose(rank, EOFError("the rank closed its end"))
                break
            written = msgspec.msgpack.decode(message, type=WrittenShards)
            if written.number == number:
                return written.sums
        return None

    def _lose(self, rank: int, error: Exception) -> None:
        if not self.lost:
            log.warning("engine rank lost, blocks are not kept any more", extra={"rank": rank, "cause": str(error)})
        self.lost = True

    def _number(self, lane: RankChannel) -> int:
        self._numbers[lane] += 1
        return self._numbers[lane]


class FollowerRank:
    """Follows the leader's orders in the process of any other rank; each channel is used by one thread at a time."""

    def __init__(self, client: StoreClient, seat: RankPosition, path: Path, clock: Clock):
        """Join the leader at the given path; the leader may still be starting.

        Raises:
            TimeoutError: The leader has not started within `JOIN`.
        """
        self.seat = seat
        self._client = client
        self.clock = clock
        deadline = Nanos(clock.now() + JOIN)
        self._lanes = [_join(path, RankHello(seat.rank, lane), deadline, clock) for lane in RankChannel]
        self._early: WriteOrder | None = None  # an order that has arrived already, but is for a later save

    def follow(self, save: SaveKey, source: Source) -> bool:
        """Write this rank's shards of the blocks of an urgent save, as the leader orders.

        Return False if no order came in time, so that the caller need not wait for the other urgent saves of this step.

        Raises:
            LeaderLost: The leader has ended, so no more orders will come.
        """
        while True:
            deadline = Nanos(self.clock.now() + FOLLOW)
            order, self._early = self._early or self._next(RankChannel.URGENT, deadline), None
            if order is None:
                log.warning("first rank orders nothing, blocks are not kept")
                return False
            if order.save > save:
                self._early = order
                return True
            if order.blocks:
                self._do(RankChannel.URGENT, order, source if order.save == save else _nothing)
            if save in order.ended:
                return True

    def orders(self, source: Source) -> Iterator[Sequence[SaveKey]]:
        """Write this rank's shards of deferred blocks as ordered, until the leader ends.

        Yield the saves that the leader reports as ended.
        """
        with suppress(LeaderLost):
            while True:
                order = self._next(RankChannel.DEFERRED, None)
                assert order is not None
                if order.blocks:
                    self._do(RankChannel.DEFERRED, order, source)
                yield order.ended

    def close(self) -> None:
        """Close the channels, so that threads that wait for orders end."""
        for lane in self._lanes:
            with suppress(
                OSError
            ):  # on some systems the socket raises this if the leader has closed the channel already
                lane.shutdown(socket.SHUT_RDWR)
            lane.close()

    def _next(self, lane: RankChannel, deadline: Nanos | None) -> WriteOrder | None:
        connection = self._lanes[lane]
        try:
            connection.settimeout(None if deadline is None else _left(deadline, self.clock))
            message = connection.recv(MESSAGE_BYTES)
        except TimeoutError:
            return None
        except OSError as error:
            raise LeaderLost from error
        if not message:
            raise LeaderLost
        return msgspec.msgpack.decode(message, type=WriteOrder)

    def _do(self, lane: RankChannel, order: WriteOrder, source: Source) -> None:
        sums: Mapping[int, int] = {}
        try:
            sums = _put(self._client, self.seat, order, source)
        finally:  # answer even after an error, because the leader waits for the answer
            try:
                self._lanes[lane].settimeout(seconds(LEAD))
                self._lanes[lane].send(msgspec.msgpack.encode(WrittenShards(order.number, dict(sums))))
            except TimeoutError:
                log.warning("first rank takes no answers, blocks are not kept")
            except OSError as error:
                raise LeaderLost from error


def _put(client: StoreClient, seat: RankPosition, order: WriteOrder, source: Source) -> Mapping[int, int]:
    """Write this rank's shards of the blocks of an order, and return the checksum parts for its answer (`WrittenShards.sums`)."""
    assert order.grant is not None
    sums = {at: 0 for at in range(len(order.blocks)) if not seat.writes(order.first + at)}
    mine = [at for at in range(len(order.blocks)) if at not in sums]
    # The size of a whole block is used here, so a step has at most as many shards as the source keeps valid.
    step = batch_blocks(seat.share.block_bytes)
    for start in range(0, len(mine), step):
        found = {at: block for at in mine[start : start + step] if (block := source(order.blocks[at])) is not None}
        sums |= client.write_shard(order.grant, list(found), seat.share, list(found.values()))
    return sums


def _nothing(_: SavedBlock) -> None:
    return None


def _join(path: Path, hello: RankHello, deadline: Nanos, clock: Clock) -> socket.socket:
    waiting = threading.Event()
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(_left(deadline, clock))
            connection.connect(str(path))
            connection.send(msgspec.msgpack.encode(hello))
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            if clock.now() >= deadline:
                raise TimeoutError("the first rank does not start") from None
            waiting.wait(0.05)
        else:
            return connection


def _left(deadline: Nanos, clock: Clock) -> float:
    return max(seconds(Nanos(deadline - clock.now())), 0.001)
