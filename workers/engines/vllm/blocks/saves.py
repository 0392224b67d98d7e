"""Saves: write the engine's full blocks to the store, either before the step ends or when there is time.

Rules:

1. Everything here runs in the engine's worker process, between two steps of the model. An exception would end the
   engine, so a failure becomes a block that was not saved, and a log line.
2. Urgent blocks are written before the step returns. Deferred blocks are copied to a fixed staging area, and one
   thread writes them. When the area is full, blocks are dropped, because a store is only a cache.
3. A write costs milliseconds on both ends, however few its blocks, and slows down concurrent steps. So deferred
   blocks wait for a pause of the engine, at most `LONGEST_WAIT_SECONDS` or until half of the area is taken. Blocks of
   one request that have gathered meanwhile are written together.
4. If an engine has several ranks, each has a staging area of its own, and the first rank decides what is written when
   (`workers.engines.vllm.blocks.rank_writes`). The others keep what they staged until the first rank says that the save is
   over.
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

STAGING_BYTES = 64 << 20  # bytes of the staging area: 500 blocks of a tiny model, 6 of a large one
MIN_STAGED_BLOCKS = 16  # least blocks of the staging area: a decode step of 16 requests may complete that many
# Time without the begin or end of a step that counts as a pause, in which a write hardly slows the engine.
PAUSE_SECONDS = 0.02
LONGEST_WAIT_SECONDS = (
    0.25  # longest time that a computed block waits for its save; until then other engines compute it again
)
LAG_SECONDS = 1.0  # longest wait of a rank for its own copy of a block that the first rank has staged already
CLOSE_SECONDS = 5.0  # longest time to write staged blocks when the engine stops


class BlockSaverThread(Protocol):
    """Saves the blocks that became full. The engine's thread makes all calls."""

    def stepped(self) -> None:
        """Record that a step has begun."""
        ...

    def keep(self, work: StoreWork) -> None:
        """Save the blocks of a step that has ended; never raise an exception."""
        ...

    def close(self) -> None:
        """Stop after staged blocks were written, if there is time."""
        ...


class Staged(Struct, frozen=True):
    """Blocks of one request in the staging area, in the order of their chain; empty if the area was full."""

    request_id: str
    tenant: bytes = b""
    names: list[BlockHash] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    blocks: list[SavedBlock] = field(default_factory=list)
    saves: list[SaveKey] = field(default_factory=list)  # saves that have ended when these blocks are written


def by_request(gathered: Sequence[Staged]) -> list[Staged]:
    """Merge the items of each request, so that the steps of one chain become one write."""
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
    """Host memory for blocks that wait to be written."""

    def __init__(self, blocks: EngineBlocks):
        self.engine_blocks = blocks
        self.capacity = max(MIN_STAGED_BLOCKS, STAGING_BYTES // blocks.block_bytes)
        self._rows = blocks.host_rows(self.capacity)
        # For each slot: function that waits for the copy into the slot.
        self._copied: list[Wait] = [_never] * self.capacity
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.give_back(range(self.capacity))
        self._full = False

    @property
    def free(self) -> int:
        return self._free.qsize()

    def take(self, block_ids: Sequence[int]) -> list[int]:
        """Begin to copy as many of the engine's blocks as fit; return their slots; never raise an exception."""
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
        except Exception:  # supervisor: a block that is not saved is only a later miss
            log.exception("kv block copy failed")
            self.give_back(slots)
            return []
        for slot in slots:
            self._copied[slot] = copied
        return slots

    def __getitem__(self, slot: int) -> ByteArray:
        """Return the block in a slot; wait until it has been copied."""
        self._copied[slot]()
        row: ByteArray = self._rows[slot]
        return row

    def give_back(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._free.put(slot)


class SaveStore(Protocol):
    """Protocol of writing blocks to the store: whole blocks, or the first rank's shards. The caller handles errors."""

    def urgent(self, save: BlockSave, key: SaveKey, source: Source) -> None:
        """Write the blocks of a save that the store does not have; `source` is called in the order of the blocks."""
        ...

    def deferred(self, staged: Staged, rows: Sequence[ByteArray]) -> None:
        """Write the staged blocks that the store does not have."""
        ...


class SingleRankStore:
    """`SaveStore` for an engine with one rank."""

    def __init__(self, client: StoreClient):
        self._client = client

    def urgent(self, save: BlockSave, key: SaveKey, source: Source) -> None:  # noqa: ARG002 - only engines with several ranks need the key
        self._client.write(save.names, source, tenant=save.tenant)

    def deferred(self, staged: Staged, rows: Sequence[ByteArray]) -> None:
        if staged.names:
            self._client.write(staged.names, rows, tenant=staged.tenant)


class LeaderRankStore:
    """`SaveStore` for the first of several ranks."""

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
    """Saver of an engine's only rank, or of its first rank: decides which blocks are written, and when."""

    def __init__(self, store: SaveStore, blocks: EngineBlocks):
        self._store = store
        self.engine_blocks = blocks
        self.area = StagingArea(blocks)
        self._turns = 0  # number of begins and ends of steps
        self.closing = threading.Event()
        # Blocks for the writer's thread; None ends the thread.
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
            except Exception:  # supervisor: a block that is not saved is only a later miss
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
        """Wait for a pause of the engine (rule 3)."""
        for _ in range(round(LONGEST_WAIT_SECONDS / PAUSE_SECONDS)):
            turns = self._turns
            closing = self.closing.wait(PAUSE_SECONDS)
            if closing or self._turns == turns or 2 * self.area.free < self.area.capacity:
                return

    def _write(self, staged: Staged) -> None:
        try:
            self._store.deferred(staged, [self.area[slot] for slot in staged.slots])
        except Exception:  # supervisor: a block that is not saved is only a later miss
            log.exception("kv block write failed")
        self.area.give_back(staged.slots)


class FollowingSaver:
    """Saver of every other rank: writes its shards when the first rank orders it."""

    def __init__(self, follower: FollowerRank, blocks: EngineBlocks):
        self._follower = follower
        self.engine_blocks = blocks
        self.area = StagingArea(blocks)
        self._changed = threading.Condition()  # lock of the following fields, and condition for their changes
        self.staged: dict[SaveKey, list[int]] = {}
        self.finished: set[SaveKey] = set()  # saves that must not be staged any more
        self.lost = False
        self._told = False  # True after the loss of the first rank was logged
        self._writer = threading.Thread(target=self._follow, name="fleet-kv-write", daemon=True)
        self._writer.start()

    def stepped(self) -> None:
        pass  # steps are counted only by the first rank

    def keep(self, work: StoreWork) -> None:
        if self.lost:
            self._tell_lost()
            return
        for at, save in enumerate(work.urgent):
            if not self._write((work.step, at), save):
                break  # orders for the remaining saves are answered in a later step
        for at, save in enumerate(work.deferred):
            self._stage((work.step, at), save)
        self._forget(work.step)

    def close(self) -> None:
        self._follower.close()
        self._writer.join(timeout=CLOSE_SECONDS)

    def _write(self, key: SaveKey, save: BlockSave) -> bool:
        """Write an urgent save as the first rank orders; return False if no order comes."""
        try:
            return self._follower.follow(key, _by_block(self.engine_blocks.source(save.block_ids)))
        except LeaderLost:
            self.lost = True
            self._tell_lost()
            return False
        except Exception:  # supervisor: a block that is not saved is only a later miss
            log.exception("kv block write failed")
            return True

    def _tell_lost(self) -> None:
        """Log once that the first rank has ended.

        Only the engine's thread calls this. The writer's thread may notice the end first, but cannot distinguish a loss from the
        engine's shutdown. Only a later step shows that the engine goes on and that blocks are lost.
        """
        if not self._told:
            self._told = True
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
        """Forget the saves of steps up to this one, because they are staged or will never be staged."""
        with self._changed:
            self.finished = {key for key in self.finished if key[0] > step}

    def _follow(self) -> None:
        try:
            for ended in self._follower.orders(self._find):
                self.end_saves(ended)
        except Exception:
            # Supervisor: without this thread no block is saved; the channels are closed, so that the first rank does
            # not wait.
            log.exception("kv block writes stopped")
            self._told = True
            self._follower.close()
        with self._changed:
            self.lost = True

    def _find(self, block: SavedBlock) -> ByteArray | None:
        """Return this rank's shard of a deferred block; wait if the shard is about to be staged.

        None if there was no room for the shard.
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
    """Return a source by the identities of blocks, which are the same on all ranks."""
    return lambda block: source(block.index)
