"""Bringing a worker's warm blocks to where others read them, beside its loop, when it drains.

Rules:

1. What dies hands over to what outlives it. Blocks of the engine's memory go to the store, where the engine can still write them; from
   the store they go to a tier that other nodes read (`kvstore.service.evacuation`), and where the store ends with this process, to its peers
   or its disk too.
2. In the order of `workers.store.evacuation_priority`, so that a drain that is short of time or of `most_bytes` takes the hottest prefixes along.
3. Calls go out one after the other from one thread, each with the client's deadline, and none is begun after the drain's. The
   engine and the routers never wait for any of it.
4. A call that the node does not answer in time, and a batch that its tier does not take, is one failure: what was in it goes once
   more. It goes on while there is time, also past a pause of a breaker, and ends after `MOST_FAILURES` in a row.
5. What it came to is in the log, once: blocks and bytes that were brought, blocks that were there already, those that were left, and
   failures. Where requests still ran, a second time, with what these have added.
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
from workers.ports import BlockSaver
from workers.store.client_thread import StoreThread, open_store_thread
from workers.store.evacuation_priority import RecentPrompt, by_evacuation_priority

log = logging.getLogger(__name__)

BLOCKS_PER_CALL = 1024
"""Blocks a call: the node looks each up before it does anything else, in a few milliseconds."""

MOST_FAILURES = 5  # in a row: a tier or node that is away for good has been tried for some seconds by then
TRY_AGAIN_SECONDS = 0.05  # while the client leaves a node alone that has not answered

BLOCKS_PER_SAVE = 64  # blocks that the engine copies in one turn of the loop
SAVE_WITHIN = Nanos(2 * SECOND)


class EvacuationSummary(Struct, frozen=True, kw_only=True):
    """What an evacuation came to."""

    warm: int = 0  # blocks that there may have been
    saved: int = 0  # from the engine's memory to the store
    moved: int = 0  # from the store to where others find them
    moved_bytes: int = 0  # as they are in the store
    there: int = 0  # blocks that were there before
    left: int = 0  # for want of time, of bytes, or because the tier fails
    failed: int = 0  # calls and batches
    tier: str = ""  # where to; empty: nowhere, or no need


class StoreEvacuator:
    """Implements `workers.ports.Evacuator`; made by `open_evacuator`."""

    def __init__(
        self,
        store: StoreThread,
        engine: BlockSaver | None,
        clock: Clock,
        *,
        leaving: bool,
        most_bytes: int,
    ) -> None:
        self.brought = EvacuationSummary()
        self._call = store.call
        self._client = store.client
        self._engine = engine
        self._clock = clock
        self._leaving = leaving
        self._room = most_bytes // store.client.namespace.block_bytes  # blocks that may still be moved

    async def evacuate(self, prompts: Sequence[RecentPrompt], cached: Sequence[BlockHash], deadline: Nanos) -> None:
        if not self._client.joined:
            return  # the node has never answered: nothing of this worker is there, and nothing can be brought there
        began = self._clock.now()
        names = await self._call(lambda: self._by_worth(prompts, cached))
        self.brought = EvacuationSummary(warm=len(names), left=len(names))
        try:
            if self._engine is not None:
                await self._save(self._engine, names[: self._room], deadline)
            await self._move(names, deadline)
        finally:
            seconds = (self._clock.now() - began) / SECOND
            log.info("warm blocks brought away", extra={**structs.asdict(self.brought), "seconds": round(seconds, 3)})

    async def _save(self, engine: BlockSaver, names: Sequence[BlockHash], deadline: Nanos) -> None:
        for start in range(0, len(names), BLOCKS_PER_SAVE):
            if (left := deadline - self._clock.now()) <= 0:
                return
            saved = await engine.save(names[start : start + BLOCKS_PER_SAVE], Nanos(min(left, SAVE_WITHIN)))
            self.brought = structs.replace(self.brought, saved=self.brought.saved + saved)

    async def _move(self, names: Sequence[BlockHash], deadline: Nanos) -> None:
        done, refused, failed_in_a_row, block_bytes = 0, 0, 0, self._client.namespace.block_bytes
        while done < len(names) and self._clock.now() < deadline and self._room > 0 and failed_in_a_row < MOST_FAILURES:
            asked = names[done : done + min(BLOCKS_PER_CALL, self._room)]
            failed_before = self._client.counters().failures
            answer = await self._call(partial(self._client.evacuate, asked, leaving=self._leaving))
            failed = self._client.counters().failures - failed_before + (answer.failed if answer is not None else 0)
            self.brought = structs.replace(self.brought, failed=self.brought.failed + failed)
            if answer is None:
                failed_in_a_row += failed
                await asyncio.sleep(TRY_AGAIN_SECONDS)
                continue
            failed_in_a_row = 0 if answer.moved else failed_in_a_row + failed
            done += answer.done
            refused += answer.refused
            self._room -= answer.moved
            moved = self.brought.moved + answer.moved
            self.brought = structs.replace(
                self.brought,
                moved=moved,
                moved_bytes=moved * block_bytes,
                there=self.brought.there + answer.there,
                left=len(names) - done + refused,
                tier=answer.tier,
            )

    def _by_worth(self, prompts: Sequence[RecentPrompt], cached: Sequence[BlockHash]) -> list[BlockHash]:
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
    """Bring blocks like `kv` away from the node at `address`, from when that answers.

    Args:
        address: Of the node's control plane.
        kv: What the engine's blocks are.
        credentials: For a node on another host.
        engine: That can still write its own blocks there; None: it cannot.
        clock: Of the deadlines.
        leaving: Whether the node ends with this process.
        most_bytes: To be moved, as blocks are in the store.
        wait_seconds: How long to wait for the node here; None: as long as one that is starting takes.

    Raises:
        LayoutMismatch: The node holds blocks of this model that are not like these.
    """
    async with open_store_thread(address, kv, credentials, "evacuation", wait_seconds=wait_seconds) as store:
        yield StoreEvacuator(store, engine, clock, leaving=leaving, most_bytes=most_bytes)
