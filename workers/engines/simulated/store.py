"""Store client of the simulated engine: blocking calls in threads of their own.

Rules:

1. Threads never touch the engine's memory: loads arrive in separate buffers, and writes get copies. So a store that
   hangs costs a buffer, never a block that another request needs.
2. Every wait has a deadline. A failure only means blocks that were not loaded or not kept, and a count.
3. The client joins a node that does not answer at the start later, in its own thread; until then every call is a
   miss.
4. Background writes queue up to `MAX_WAITING` blocks; more are dropped and counted, because a store is only a cache.
5. Blocks come and go in the engine's layout. The threads convert them after verification, and before their checksums
   are computed (`kvstore.layouts.conversion`).
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from operator import itemgetter
from typing import Never, Self, TypeVar

from msgspec import Struct

from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import StoreId
from kvstore.block import BlockHash
from kvstore.client.store_client import StoreClient
from kvstore.layouts.conversion import Conversion
from kvstore.layouts.fingerprint import Fingerprint
from kvstore.messages import blocks_by_tier
from kvstore.security.credentials import Credentials

log = logging.getLogger(__name__)

MAX_WAITING = 1024  # blocks
BATCH = 64  # blocks a background write
LEASE_SECONDS = 10.0  # longer than any deadline of a load
CONNECT_SECONDS = 3.0  # a node that starts together with the engine answers by then; others are joined later
THREADS = 4  # loads and writes at a time; each mostly waits for the store

T = TypeVar("T")


class Loaded(Struct, frozen=True):
    """The result of a load."""

    blocks: list[bytes] = []
    tiers: dict[str, int] = {}  # the number of blocks by tier of the node


class SimulatedStore:
    """Loads and publishes blocks; `run` writes offered blocks."""

    def __init__(self, client: StoreClient, conversion: Conversion, threads: ThreadPoolExecutor) -> None:
        self.dropped = 0  # offered blocks that were not kept
        self._client = client
        self._conversion = conversion
        self._threads = threads
        self._waiting: dict[BlockHash, bytes] = {}
        self._wake = asyncio.Event()

    @property
    def store_id(self) -> StoreId | None:
        """The store node's id; None until it has answered once."""
        return StoreId(self._client.store_id) if self._client.joined else None

    @classmethod
    async def open(cls, address: str, kv: Fingerprint, credentials: Credentials) -> Self:
        """Join a store node now or later, for an engine with blocks like `kv`.

        Raises:
            LayoutMismatch: The node's blocks of this model are not like these; names the field.
        """
        conversion = Conversion(kv)
        threads = ThreadPoolExecutor(THREADS, thread_name_prefix="simulated-store")
        try:
            client = await asyncio.get_running_loop().run_in_executor(
                threads,
                lambda: StoreClient.join(address, kv.at_rest, wait_seconds=CONNECT_SECONDS, credentials=credentials),
            )
        except BaseException:
            threads.shutdown(wait=False)
            raise
        return cls(client, conversion, threads)

    async def load(self, names: Sequence[BlockHash], deadline: Nanos) -> Loaded:
        """Load the longest prefix of `names` that the store has and that arrives within `deadline` from now."""
        if not names:
            return Loaded()
        max_wait_seconds = deadline / SECOND / 2  # the other half is for the blocks to be read
        return await self._in_thread(lambda: self._load(names, max_wait_seconds), deadline, otherwise=Loaded())

    async def publish(self, blocks: Mapping[BlockHash, bytes], deadline: Nanos) -> int:
        """Write blocks now; return how many the store did not have before."""
        if not blocks:
            return 0
        held = list(blocks.values())
        return await self._in_thread(
            lambda: self._client.write(list(blocks), lambda index: self._conversion.write(held[index])),
            deadline,
            otherwise=0,
        )

    def offer(self, name: BlockHash, content: bytes) -> None:
        """Write a block in the background."""
        if len(self._waiting) >= MAX_WAITING:
            self.dropped += 1
            return
        self._waiting[name] = content
        self._wake.set()

    async def run(self, deadline: Nanos) -> Never:
        """Write offered blocks in batches until cancelled, each batch within `deadline`."""
        while True:
            while not self._waiting:
                self._wake.clear()
                await self._wake.wait()
            batch = {name: self._waiting.pop(name) for name in list(self._waiting)[:BATCH]}
            await self.publish(batch, deadline)

    def close(self) -> None:
        """Close without waiting for threads that hang; they hold nothing of the engine."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def _load(self, names: Sequence[BlockHash], max_wait_seconds: float) -> Loaded:
        match = self._client.match_and_wait(names, lease_seconds=LEASE_SECONDS, max_wait_seconds=max_wait_seconds)
        if not len(match):
            return Loaded()
        buffers = [bytearray(self._conversion.stored_bytes) for _ in range(len(match))]
        whole = self._client.read(match, range(len(match)), buffers)
        self._threads.submit(self._client.release, match.lease_id)  # no need to wait for it
        blocks = [
            self._conversion.read(buffer).tobytes()
            for buffer, _ in takewhile(itemgetter(1), zip(buffers, whole, strict=True))
        ]
        return Loaded(blocks, blocks_by_tier(len(blocks), len(match), match.promoted))

    async def _in_thread(self, call: Callable[[], T], deadline: Nanos, *, otherwise: T) -> T:
        try:
            async with asyncio.timeout(deadline / SECOND):
                return await asyncio.get_running_loop().run_in_executor(self._threads, call)
        except TimeoutError:
            log.warning("store too slow", extra={"store": self.store_id})
            return otherwise
