"""Evacuation: copies a draining worker's warm blocks to a tier that other workers read, in a thread of its own.

Rules:

1. Blocks are copied out of memory that is freed when the worker ends. First the engine writes its blocks to the store,
   if it can. From the store they are copied to a tier that other nodes read (`kvstore.service.evacuation`). If the
   store node ends with this process and has no such tier, the blocks are copied to the node's peers or to its disk.
2. Blocks are copied in the order of `workers.store.evacuation_priority`, so that a drain with little time or a small
   `most_bytes` saves the prefixes that are used most.
3. One thread makes the calls one after the other. Each call has the time limit of the store client, and no call begins after the
   drain's deadline. The engine and the routers never wait for an evacuation.
4. A call that the node does not answer in time counts as one failure, and so does a batch that the tier fails to take.
   Their blocks are tried again. If a circuit breaker opens meanwhile, the evacuation continues after the breaker's
   pause. The evacuation stops at the deadline, when `most_bytes` are copied, and after `MOST_FAILURES` failures in a
   row.
5. The log has one line with the result: blocks and bytes copied, blocks that were in the tier already, blocks left, and
   failures. If requests still ran, a second evacuation follows for the blocks that they added, with a second line. If
   no handshake with the node has succeeded, nothing is copied, and there is no line.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from msgspec import Struct, structs

from fleet.core.clock import SECOND, Clock, Nanos
from kvstore.block import BlockHash
from kvstore.layouts.fingerprint import Fingerprint
from kvstore.security.credentials import Credentials
from workers.ports import BlockSaver, RecentPrompt
from workers.store.client_thread import StoreThread, open_store_thread
from workers.store.evacuation_priority import by_evacuation_priority

log = logging.getLogger(__name__)

BLOCKS_PER_CALL = 1024
"""Maximum number of blocks in one call of `StoreClient.evacuate`. It takes the node a few milliseconds to look up all
blocks of a call, and it does no other work in this time."""

# Failures in a row that end the evacuation: several tries over some seconds mean that the tier or the node is lost.
MOST_FAILURES = 5
# Pause after a call that failed, or that the client's circuit breaker did not let through.
TRY_AGAIN_SECONDS = 0.05

BLOCKS_PER_SAVE = 64  # maximum number of blocks that the engine writes to the store in one call of `BlockSaver.save`
SAVE_WITHIN = Nanos(2 * SECOND)


class EvacuationSummary(Struct, frozen=True, kw_only=True):
    """Result of one evacuation, for the log (rule 5)."""

    warm: int = 0  # number of blocks to copy: blocks of recent prompts and blocks in the engine's cache, each once
    saved: int = 0  # number of blocks that were written from the engine's memory to the store
    moved: int = 0  # number of blocks that were copied from the store to `tier`
    moved_bytes: int = 0  # bytes of the blocks that `moved` counts, by their size in the store
    there: int = 0  # number of blocks that `tier` had already
    left: int = 0  # number of blocks that were not copied, for lack of time or room, or because the tier failed
    failed: int = 0  # number of failures of calls and of the tier's transfers (rule 4)
    tier: str = ""  # name of the tier to which blocks are copied (rule 1); empty: there was none, or no copy was needed


class StoreEvacuator:
    """Copies warm blocks by way of the store, for a worker that drains; made by `open_evacuator`."""

    def __init__(
        self,
        store: StoreThread,
        engine: BlockSaver | None,
        clock: Clock,
        *,
        leaving: bool,
        most_bytes: int,
    ) -> None:
        self.summary = EvacuationSummary()
        self._call = store.call
        self._client = store.client
        self._engine = engine
        self._clock = clock
        self._leaving = leaving
        self._budget = most_bytes // store.client.namespace.block_bytes  # number of blocks that may still be copied

    async def evacuate(self, prompts: Sequence[RecentPrompt], cached: Sequence[BlockHash], deadline: Nanos) -> None:
        if not self._client.joined:
            return  # no handshake with the node has succeeded, so it can neither take nor give blocks
        began = self._clock.now()
        names = await self._call(lambda: self._by_priority(prompts, cached))
        self.summary = EvacuationSummary(warm=len(names), left=len(names))
        try:
            if self._engine is not None:
                await self._save(self._engine, names[: self._budget], deadline)
            await self._move(names, deadline)
        finally:
            seconds = (self._clock.now() - began) / SECOND
            log.info("warm blocks evacuated", extra={**structs.asdict(self.summary), "seconds": round(seconds, 3)})

    async def _save(self, engine: BlockSaver, names: Sequence[BlockHash], deadline: Nanos) -> None:
        for start in range(0, len(names), BLOCKS_PER_SAVE):
            if (left := deadline - self._clock.now()) <= 0:
                return
            saved = await engine.save(names[start : start + BLOCKS_PER_SAVE], Nanos(min(left, SAVE_WITHIN)))
            self.summary = structs.replace(self.summary, saved=self.summary.saved + saved)

    async def _move(self, names: Sequence[BlockHash], deadline: Nanos) -> None:
        done, refused, failed_in_a_row, block_bytes = 0, 0, 0, self._client.namespace.block_bytes
        while (
            done < len(names) and self._clock.now() < deadline and self._budget > 0 and failed_in_a_row < MOST_FAILURES
        ):
            asked = names[done : done + min(BLOCKS_PER_CALL, self._budget)]
            failed_before = self._client.counters().failures
            answer = await self._call(partial(self._client.evacuate, asked, leaving=self._leaving))
            failed = self._client.counters().failures - failed_before + (answer.failed if answer is not None else 0)
            self.summary = structs.replace(self.summary, failed=self.summary.failed + failed)
            if answer is None:
                failed_in_a_row += failed
                await asyncio.sleep(TRY_AGAIN_SECONDS)
                continue
            failed_in_a_row = 0 if answer.moved else failed_in_a_row + failed
            done += answer.done
            refused += answer.refused
            self._budget -= answer.moved
            moved = self.summary.moved + answer.moved
            self.summary = structs.replace(
                self.summary,
                moved=moved,
                moved_bytes=moved * block_bytes,
                there=self.summary.there + answer.there,
                left=len(names) - done + refused,
                tier=answer.tier,
            )

    def _by_priority(self, prompts: Sequence[RecentPrompt], cached: Sequence[BlockHash]) -> list[BlockHash]:
        namespace = self._client.namespace
        return by_evacuation_priority(
            prompts, cached, block_tokens=namespace.block_tokens, algorithm=namespace.hash_algorithm
        )


@asynccontextmanager
async def open_evacuator(
    address: str,
    kv: Fingerprint,
    credentials: Credentials,
    engine: BlockSaver | None,
    clock: Clock,
    *,
    leaving: bool,
    most_bytes: int,
    wait_seconds: float | None = None,
) -> AsyncIterator[StoreEvacuator]:
    """Open an evacuator that copies blocks by way of the store node at `address`, as soon as this node answers.

    Args:
        address: Address of the node's control plane.
        kv: Fingerprint of the engine's blocks.
        credentials: Credentials for a node on another host.
        engine: The engine, if it can still write its blocks to the store; None: it cannot.
        clock: The clock of the deadlines that `evacuate` gets.
        leaving: True if the node ends with this process.
        most_bytes: The maximum number of bytes to copy, by the size of blocks in the store.
        wait_seconds: Maximum wait for the node in this call; None: long enough for a node that is starting.

    Raises:
        LayoutMismatch: The node answers, and has blocks of this model that differ from `kv`, or another format version.
        InvalidArgument: The node answers, and cannot store such blocks.
        BadCredentials: A file of the credentials cannot be used.
    """
    async with open_store_thread(address, kv, credentials, "evacuation", wait_seconds=wait_seconds) as store:
        yield StoreEvacuator(store, engine, clock, leaving=leaving, most_bytes=most_bytes)
