"""Saves: write the engine's full blocks to the store, urgent ones before the step ends, and deferred ones later.

Rules:

1. The engine's thread calls this module in vLLM's worker process, between two steps of the model. An exception there
   would end the engine. A failure is therefore logged, and its blocks are not saved.
2. Urgent blocks are written before the step returns. Deferred blocks are copied to a staging area of fixed size, and
   one thread writes them. When the area is full, blocks are dropped, because a block that was not saved can be computed
   again.
3. Even a write of few blocks costs milliseconds at the engine and at the node, and slows down concurrent steps.
   Deferred blocks are therefore written in a pause of the engine. They wait for a pause until `LONGEST_WAIT_SECONDS`
   have passed or half of the area is taken. The waiting blocks of one request are then written together.
4. If an engine has several ranks, each has a staging area of its own, and the first rank decides which blocks are
   written, and when (`workers.engines.vllm.blocks.rank_writes`). The other ranks keep their staged shards until the
   first rank reports that the save has ended.
"""

import logging
import queue
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from msgspec import Struct, field

from kvstore.block import BlockHash
from kvstore.buffers import ByteArray
from kvstore.client.store_client import StoreClient
from workers.engines.vllm.blocks import rank_writes as vllm_ranks
from workers.engines.vllm.blocks.block_memory import EngineBlocks, Source, Wait
from workers.engines.vllm.blocks.rank_writes import (
    FollowerRank,
    LeaderLost,
    LeaderRank,
    RankChannel,
    SavedBlock,
    SaveKey,
)
from workers.engines.vllm.store_planner import BlockSave, StoreWork

log = logging.getLogger(__name__)

# Size of a rank's staging area in bytes, unless `MIN_STAGED_BLOCKS` blocks need more. It holds 500 blocks of a tiny model.
STAGING_BYTES = 64 << 20
# Minimum number of blocks for which a staging area has room; a decode step of 16 requests may complete that many.
MIN_STAGED_BLOCKS = 16
# The engine counts as pausing if for this time no step has begun or ended. A write then hardly slows it down.
PAUSE_SECONDS = 0.02
LONGEST_WAIT_SECONDS = (
    # Maximum time for which the writer waits for a pause of the engine (rule 3). Until a block is saved, other engines have to
    # compute it again.
    0.25
)
# The first rank may order a block before another rank has staged its shard. That rank waits for the shard at most this
# many seconds.
LAG_SECONDS = 1.0
CLOSE_SECONDS = 5.0  # time limit to write staged blocks when the engine stops; the other blocks are not saved


class BlockSaverThread(Protocol):
    """Saves the blocks that have become full. The engine's thread calls all methods."""

    def stepped(self) -> None:
        """Record that a step has begun, which ends a pause of the engine."""
        ...

    def keep(self, work: StoreWork) -> None:
        """Save the blocks of a step that has ended; never raise an exception."""
        ...

    def close(self) -> None:
        """Stop; blocks in the staging area are still written if that takes no longer than `CLOSE_SECONDS`."""
        ...


class Staged(Struct, frozen=True):
    """Some blocks of one request in the staging area, in the order of their chain; no blocks if the area was full."""

    request_id: str
    tenant: bytes = b""
    names: list[BlockHash] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    blocks: list[SavedBlock] = field(default_factory=list)
    saves: list[SaveKey] = field(default_factory=list)  # saves that are complete once these blocks are written


def by_request(gathered: Sequence[Staged]) -> list[Staged]:
    """Merge the items that belong to the same request, so that its blocks from several steps are written together."""
    merged: dict[str, Staged] = {}
    for staged in gathered:
        whole = merged.setdefault(staged.request_id, Staged(staged.request_id, staged.tenant))
        whole.names.extend(staged.names)
        whole.slots.extend(staged.slots)
        whole.blocks.extend(staged.blocks)
        whole.saves.extend(staged.saves)
    return list(merged.values())


def _never() -> None:
    raise AssertionError("nothing was copied to this slot")


class StagingArea:
    """Holds copies of the engine's blocks in host memory until they are written to the store."""

    def __init__(self, blocks: EngineBlocks):
        self.engine_blocks = blocks
        self.capacity = max(MIN_STAGED_BLOCKS, STAGING_BYTES // blocks.block_bytes)
        self._rows = blocks.host_rows(self.capacity)
        # For each slot: the function that waits until the copy into the slot is complete.
        self._copied: list[Wait] = [_never] * self.capacity
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.give_back(range(self.capacity))
        self._full = False

    @property
    def free(self) -> int:
        return self._free.qsize()

    def take(self, block_ids: Sequence[int]) -> list[int]:
        """Begin to copy the engine's blocks, as many as fit into the area; return their slots.

        Never raise an exception.
        """
        slots: list[int] = []
        with suppress(queue.Empty):
            while len(slots) < len(block_ids):
                slots.append(self._free.get_nowait())
        full = len(slots) < len(block_ids)
        if full and not self._full:
            log.warning("store slower than engine, blocks are not saved")
        self._full = full
        if not slots:
            return []
        try:
            copied = self.engine_blocks.copy_out(block_ids[: len(slots)], [self._rows[slot] for slot in slots])
        except Exception:  # supervisor: a block that is not saved only has to be computed again later
            log.exception("kv block copy failed")
            self.give_back(slots)
            return []
        for slot in slots:
            self._copied[slot] = copied
        return slots

    def __getitem__(self, slot: int) -> ByteArray:
        """Wait until the copy into a slot is complete, and return the block there."""
        self._copied[slot]()
        row: ByteArray = self._rows[slot]
        return row

    def give_back(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._free.put(slot)


class SaveStore(Protocol):
    """Port by which a `LeadingSaver` writes blocks to the store: whole blocks, or the shards of several ranks.

    The caller handles errors.
    """

    def urgent(self, save: BlockSave, key: SaveKey, source: Source) -> None:
        """Write the blocks of a save that the store does not have; `source` is called in the order of the blocks."""
        ...

    def deferred(self, staged: Staged, rows: Sequence[ByteArray]) -> None:
        """Write the staged blocks that the store does not have."""
        ...


class SingleRankStore:
    """Writes the whole blocks of an engine with one rank."""

    def __init__(self, client: StoreClient):
        self._client = client

    def urgent(self, save: BlockSave, key: SaveKey, source: Source) -> None:  # noqa: ARG002 - only engines with several ranks need the key
        self._client.write(save.names, source, tenant=save.tenant)

    def deferred(self, staged: Staged, rows: Sequence[ByteArray]) -> None:
        if staged.names:
            self._client.write(staged.names, rows, tenant=staged.tenant)


class LeaderRankStore:
    """Writes the blocks of an engine with several ranks, from its first rank, which orders the others."""

    def __init__(self, leader: LeaderRank):
        self._leader = leader

    def urgent(self, save: BlockSave, key: SaveKey, source: Source) -> None:
        blocks = [SavedBlock(key, index) for index in range(len(save.names))]
        self._leader.write(
            RankChannel.URGENT,
            save.names,
            blocks,
            _by_block(source),
            tenant=save.tenant,
            ended=[key],
        )

    def deferred(self, staged: Staged, rows: Sequence[ByteArray]) -> None:
        places = dict(zip(staged.blocks, rows, strict=True))
        self._leader.write(
            RankChannel.DEFERRED,
            staged.names,
            staged.blocks,
            places.get,
            tenant=staged.tenant,
            ended=staged.saves,
        )


class LeadingSaver:
    """Saves blocks on the only or the first rank of an engine. This rank decides which blocks are written, and when."""

    def __init__(self, store: SaveStore, blocks: EngineBlocks):
        self._store = store
        self.engine_blocks = blocks
        self.area = StagingArea(blocks)
        self._turns = 0  # number of begins and ends of steps since the start; while it does not grow, the engine pauses
        self.closing = threading.Event()
        # Staged blocks for the writer thread; None ends the thread.
        self.staged: queue.SimpleQueue[Staged | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write_staged, name="fleet-kv-write", daemon=True)
        self._writer.start()

    def stepped(self) -> None:
        self._turns += 1

    def keep(self, work: StoreWork) -> None:
        self._turns += 1
        for at, save in enumerate(work.urgent):
            try:
                self._store.urgent(save, (work.step, at), self.engine_blocks.source(save.block_ids))
            except Exception:  # supervisor: a block that is not saved only has to be computed again later
                log.exception("kv block write failed")
        for at, save in enumerate(work.deferred):
            key = (work.step, at)
            slots = self.area.take(save.block_ids)
            blocks = [SavedBlock(key, index) for index in range(len(slots))]
            self.staged.put(Staged(save.request_id, save.tenant, save.names[: len(slots)], slots, blocks, [key]))

    def close(self) -> None:
        self.closing.set()
        self.staged.put(None)
        self._writer.join(timeout=CLOSE_SECONDS)

    def _write_staged(self) -> None:
        gathered: list[Staged | None] = []
        while None not in gathered:
            gathered = [self.staged.get()]
            self._await_pause()
            while not self.staged.empty():
                gathered.append(self.staged.get())
            for staged in by_request([one for one in gathered if one is not None]):
                self._write(staged)

    def _await_pause(self) -> None:
        """Wait until the engine pauses, half of the area is taken, or the saver closes, at most `LONGEST_WAIT_SECONDS` (rule 3)."""
        for _ in range(round(LONGEST_WAIT_SECONDS / PAUSE_SECONDS)):
            turns = self._turns
            closing = self.closing.wait(PAUSE_SECONDS)
            if closing or self._turns == turns or 2 * self.area.free < self.area.capacity:
                return

    def _write(self, staged: Staged) -> None:
        try:
            self._store.deferred(staged, [self.area[slot] for slot in staged.slots])
        except Exception:  # supervisor: a block that is not saved only has to be computed again later
            log.exception("kv block write failed")
        self.area.give_back(staged.slots)


class FollowingSaver:
    """Saves blocks on a rank other than the first one: it writes this rank's shards when the first rank orders it."""

    def __init__(self, follower: FollowerRank, blocks: EngineBlocks):
        self._follower = follower
        self.engine_blocks = blocks
        self.area = StagingArea(blocks)
        self._changed = threading.Condition()  # protects `staged` and `finished`; notified when a save is staged
        self.staged: dict[SaveKey, list[int]] = {}
        # Saves whose shards need not be staged any more: an order has waited for the shards too long (`LAG_SECONDS`), or the save
        # ended before the shards were staged.
        self.finished: set[SaveKey] = set()
        self.lost = False
        self._loss_logged = False  # True if the log already says that this rank saves no more blocks
        self._writer = threading.Thread(target=self._follow, name="fleet-kv-write", daemon=True)
        self._writer.start()

    def stepped(self) -> None:
        pass  # only the first rank looks for pauses

    def keep(self, work: StoreWork) -> None:
        if self.lost:
            self._tell_lost()
            return
        for at, save in enumerate(work.urgent):
            if not self._write((work.step, at), save):
                break  # if orders for this step's other saves still come, a later step answers that the blocks are missing
        for at, save in enumerate(work.deferred):
            self._stage((work.step, at), save)
        self._forget(work.step)

    def close(self) -> None:
        self._follower.close()
        self._writer.join(timeout=CLOSE_SECONDS)

    def _write(self, key: SaveKey, save: BlockSave) -> bool:
        """Write this rank's shards of an urgent save as the first rank orders.

        Return False if no order comes in time.
        """
        try:
            return self._follower.follow(key, _by_block(self.engine_blocks.source(save.block_ids)))
        except LeaderLost:
            self.lost = True
            self._tell_lost()
            return False
        except Exception:  # supervisor: a block that is not saved only has to be computed again later
            log.exception("kv block write failed")
            return True

    def _tell_lost(self) -> None:
        """Log once that the first rank has ended, unless the log already says that the writer thread has failed.

        Only the engine's thread calls this method, in a step. The writer thread may notice earlier that the first rank
        has ended, but it logs nothing, because the first rank also ends when the engine shuts down. If another step
        follows, the engine goes on without the first rank, and blocks are lost.
        """
        if not self._loss_logged:
            self._loss_logged = True
            log.warning("first rank lost, blocks are not saved any more")

    def _stage(self, key: SaveKey, save: BlockSave) -> None:
        slots = self.area.take(save.block_ids)
        with self._changed:
            if key in self.finished:
                self.area.give_back(slots)
            else:
                self.staged[key] = slots
                self._changed.notify()

    def _forget(self, step: int) -> None:
        """Forget which saves of the steps up to this one have ended; nothing more of these steps will be staged."""
        with self._changed:
            self.finished = {key for key in self.finished if key[0] > step}

    def _follow(self) -> None:
        try:
            for ended in self._follower.orders(self._find):
                self.end_saves(ended)
        except Exception:
            # Supervisor: without this thread, no shard is saved. When the channels are closed, the first rank does not
            # wait for this rank.
            log.exception("kv block writes stopped")
            self._loss_logged = True
            self._follower.close()
        with self._changed:
            self.lost = True

    def _find(self, block: SavedBlock) -> ByteArray | None:
        """Wait until this rank's shard of a deferred block is staged, and return the shard.

        Return None if the shard was not staged in time, or if there was no room for it.
        """
        with self._changed:
            known = self._changed.wait_for(
                lambda: block.save in self.staged or block.save in self.finished, LAG_SECONDS
            )
            if not known:
                self.finished.add(block.save)
            slots = self.staged.get(block.save, [])
        return self.area[slots[block.index]] if block.index < len(slots) else None

    def end_saves(self, saves: Sequence[SaveKey]) -> None:
        with self._changed:
            for key in saves:
                slots = self.staged.pop(key, None)
                if slots is None:
                    self.finished.add(key)
                else:
                    self.area.give_back(slots)


def _by_block(source: Source) -> vllm_ranks.Source:
    """Return a source that takes a block's identity, which is the same on all ranks, and uses its index in `source`."""
    return lambda block: source(block.index)
