"""Store access of the simulated engine: makes the blocking calls of a store client in separate threads.

Rules:

1. Threads never access the engine's memory: loads arrive in separate buffers, and writes get copies. A store that hangs
   therefore occupies a buffer, and never a block that another request needs.
2. Every wait has a deadline. After a failure, blocks that were to be loaded are computed, and blocks that were to be
   written are not kept.
3. If the node does not answer at the start, the client joins it later, in a thread of the client. Until then no blocks
   are loaded or written.
4. At most `MAX_WAITING` blocks wait for a background write. Further blocks are dropped and counted, because they can be
   computed again.
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

MAX_WAITING = 1024  # maximum number of blocks that wait for a background write; more are dropped (rule 4)
BATCH = 64  # maximum number of blocks in one background write, which is one call of the store client
LEASE_SECONDS = 10.0  # duration of a read lease; by default, a load ends after 2 s (`simulated.load_timeout_ms`)
# Maximum wait at the start of the engine for a node that is starting too. If the node answers later, the client joins
# it in the background.
CONNECT_SECONDS = 3.0
THREADS = 4  # maximum number of loads and writes at the same time; each of them mostly waits for the store

T = TypeVar("T")


class Loaded(Struct, frozen=True):
    """Holds the result of one load: the leading blocks that arrived correctly, in the engine's layout."""

    blocks: list[bytes] = []
    tiers: dict[str, int] = {}  # number of loaded blocks, by the node's tier that they came from


class SimulatedStore:
    """Loads blocks from a store node and writes blocks to it; `run` writes the blocks that `offer` has queued."""

    def __init__(self, client: StoreClient, conversion: Conversion, threads: ThreadPoolExecutor) -> None:
        self.dropped = 0  # number of blocks since the start that `offer` has dropped (rule 4)
        self._client = client
        self._conversion = conversion
        self._threads = threads
        self._waiting: dict[BlockHash, bytes] = {}
        self._wake = asyncio.Event()

    @property
    def store_id(self) -> StoreId | None:
        """Id of the store node; None until the node has answered once."""
        return StoreId(self._client.store_id) if self._client.joined else None

    @classmethod
    async def open(cls, address: str, kv: Fingerprint, credentials: Credentials) -> Self:
        """Join a store node, now or as soon as it answers. `kv` describes the blocks of the engine.

        Raises:
            LayoutMismatch: The node has blocks of this model that differ from `kv`, or another format version; the error names the field.
            InvalidArgument: The node cannot store such blocks; the error names the field.
            BadCredentials: A file of the credentials cannot be used.
        """
        conversion = Conversion(kv)
        threads = ThreadPoolExecutor(THREADS, thread_name_prefix="simulated-store")
        try:
            client = await asyncio.get_running_loop().run_in_executor(
                threads,
                lambda: StoreClient.join(
                    address,
                    kv.at_rest,
                    wait_seconds=CONNECT_SECONDS,
                    credentials=credentials,
                    credentials_field="store_credentials",
                ),
            )
        except BaseException:
            threads.shutdown(wait=False)
            raise
        return cls(client, conversion, threads)

    async def load(self, names: Sequence[BlockHash], deadline: Nanos, trace: bytes = b"") -> Loaded:
        """Load the longest prefix of `names` that the store has. Return no blocks if this takes longer than `deadline`.

        `trace` is the trace context of the request, which the node gets with the call
        (`kvstore.tracing.context.call_trace`).
        """
        if not names:
            return Loaded()
        # The promotion gets half of the time, so that the other half is left for reading the blocks.
        max_wait_seconds = deadline / SECOND / 2
        return await self._in_thread(lambda: self._load(names, max_wait_seconds, trace), deadline, otherwise=Loaded())

    async def publish(self, blocks: Mapping[BlockHash, bytes], deadline: Nanos, trace: bytes = b"") -> int:
        """Write blocks now, and return how many of them the store did not have; return 0 if this takes longer than `deadline`."""
        if not blocks:
            return 0
        held = list(blocks.values())
        return await self._in_thread(
            lambda: self._client.write(list(blocks), lambda index: self._conversion.write(held[index]), trace=trace),
            deadline,
            otherwise=0,
        )

    def offer(self, name: BlockHash, content: bytes) -> None:
        """Queue a block that `run` writes in the background; drop the block if too many wait (rule 4)."""
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
        """Close the client without waiting for calls that hang. Such calls use no memory of the engine, so they can do no harm."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def _load(self, names: Sequence[BlockHash], max_wait_seconds: float, trace: bytes) -> Loaded:
        match = self._client.match_and_wait(
            names, lease_seconds=LEASE_SECONDS, max_wait_seconds=max_wait_seconds, trace=trace
        )
        if not len(match):
            return Loaded()
        buffers = [bytearray(self._conversion.stored_bytes) for _ in range(len(match))]
        whole = self._client.read(match, range(len(match)), buffers)
        # Another thread makes this call, so that the load does not wait for it.
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
