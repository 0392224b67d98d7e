"""Store client of the simulated engine: blocking calls in threads of their own.

Rules:

1. Threads never access the engine's memory: loads arrive in separate buffers, and writes get copies. A store that hangs
   therefore occupies a buffer, and never a block that another request needs.
2. Every wait has a deadline. A failure only means blocks that were not loaded or not kept, and a count.
3. If the node does not answer at the start, the client joins it later, in its own thread. Until then every call is a miss.
4. At most `MAX_WAITING` blocks wait for a background write. Further blocks are dropped and counted, because a store is only
   a cache.
5. The engine passes and gets blocks in its own layout. The threads convert loaded blocks after their verification, and
   blocks to write before their checksums are computed (`kvstore.layouts.conversion`).
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

MAX_WAITING = 1024  # most blocks that wait for a background write
BATCH = 64  # most blocks of one background write
LEASE_SECONDS = 10.0  # duration of a read lease, longer than the deadline of any load
CONNECT_SECONDS = 3.0  # longest wait for a node that starts together with the engine; a later node is joined later
THREADS = 4  # most loads and writes at a time; each mostly waits for the store

T = TypeVar("T")


class Loaded(Struct, frozen=True):
    """Result of a load."""

    blocks: list[bytes] = []
    tiers: dict[str, int] = {}  # number of blocks by tier of the node


class SimulatedStore:
    """Loads and publishes blocks; `run` writes offered blocks."""

    def __init__(self, client: StoreClient, conversion: Conversion, threads: ThreadPoolExecutor) -> None:
        self.dropped = 0  # number of offered blocks that were not written
        self._client = client
        self._conversion = conversion
        self._threads = threads
        self._waiting: dict[BlockHash, bytes] = {}
        self._wake = asyncio.Event()

    @property
    def store_id(self) -> StoreId | None:
        """Id of the store node; None until it has answered once."""
        return StoreId(self._client.store_id) if self._client.joined else None

    @classmethod
    async def open(cls, address: str, kv: Fingerprint, credentials: Credentials) -> Self:
        """Join a store node now or later, for an engine with blocks like `kv`.

        Raises:
            LayoutMismatch: The node has blocks of this model that differ from `kv`; the error names the field.
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
        max_wait_seconds = deadline / SECOND / 2  # the other half of the time is left for reading the blocks
        return await self._in_thread(lambda: self._load(names, max_wait_seconds), deadline, otherwise=Loaded())

    async def publish(self, blocks: Mapping[BlockHash, bytes], deadline: Nanos) -> int:
        """Write blocks now; return the number of blocks that the store did not have before."""
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
        """Close without waiting for threads that hang, because they use no memory of the engine."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def _load(self, names: Sequence[BlockHash], max_wait_seconds: float) -> Loaded:
        match = self._client.match_and_wait(names, lease_seconds=LEASE_SECONDS, max_wait_seconds=max_wait_seconds)
        if not len(match):
            return Loaded()
        buffers = [bytearray(self._conversion.stored_bytes) for _ in range(len(match))]
        whole = self._client.read(match, range(len(match)), buffers)
        # In another thread, because the load need not wait for it.
        self._threads.submit(self._client.release, match.lease_id)
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
