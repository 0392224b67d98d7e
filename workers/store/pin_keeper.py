"""Pin keeper: pins the chains of sessions in a KV store node, in a thread of its own.

Rules:

1. The pin keeper never delays the engine or a router. One thread makes the calls one after the other, with the client's
   deadlines. At most `MAX_QUEUED_PINS` pins and unpins are pending. Further pins and unpins are dropped. They are
   counted, together with the pins that the node did not answer.
2. An engine's last blocks reach the store shortly after the end of the answer. Therefore a chain that was not pinned
   completely is pinned again after each of the pauses `RETRY_PAUSES_SECONDS`. There are no further tries if its session
   has sent another request, or if the node has reached its limit for pins.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from itertools import count

from fleet.core.clock import SECOND
from kvstore.block import BlockHash, chain
from kvstore.layouts.fingerprint import Fingerprint
from kvstore.messages import SessionPinResult
from kvstore.security.credentials import Credentials
from workers.ports import PinChain, UnpinChain
from workers.store.client_thread import StoreThread, open_store_thread

log = logging.getLogger(__name__)

MAX_QUEUED_PINS = 256
RETRY_PAUSES_SECONDS = (0.05, 0.2, 1.0)


class StorePinKeeper:
    """Pins the chains of paused sessions in a store node, from a thread; made by `open_pin_keeper`."""

    def __init__(self, store: StoreThread, tasks: asyncio.TaskGroup) -> None:
        self.pinned = 0  # number of chains since the start that were pinned, completely or in part
        # Number of chains since the start that the node pinned only in part or not at all, because of its limit for pins.
        self.refused = 0
        # Number of pins and unpins since the start that were dropped or failed, and of pins that the node did not answer.
        self.dropped = 0
        self._store = store
        self._tasks = tasks
        self._numbers = count(1)
        self._wanted: dict[str, int] = {}  # number of the newest pin of each session; older pins are not tried again
        self.running: set[asyncio.Task[None]] = set()

    def keep(self, asked: Iterable[PinChain | UnpinChain]) -> None:
        """Queue these pins and unpins for the thread, in this order; drop those for which the queue is full (rule 1)."""
        for each in asked:
            self._wanted.pop(each.session, None)
            if len(self.running) >= MAX_QUEUED_PINS:
                self.dropped += 1
                continue
            if isinstance(each, PinChain):
                number = self._wanted[each.session] = next(self._numbers)
                task = self._tasks.create_task(self._supervised(partial(self._hold, each, number)))
            else:
                task = self._tasks.create_task(self._supervised(partial(self._release, each)))
            self.running.add(task)
            task.add_done_callback(self.running.discard)

    def close(self) -> None:
        """Cancel the calls that have not begun.

        Pins that exist stay until their deadline, because the session may go on at another worker.
        """
        for task in self.running:
            task.cancel()

    async def _supervised(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception:  # supervisor: any failure only means that blocks without a pin may have to be computed again
            log.exception("session pin failed")
            self.dropped += 1

    async def _hold(self, asked: PinChain, number: int) -> None:
        names = await self._store.call(lambda: self._chain(asked))
        held: SessionPinResult | None = None
        for pause in (0.0, *RETRY_PAUSES_SECONDS):
            await asyncio.sleep(pause)
            if self._wanted.get(asked.session) != number:
                return  # the session has sent another request, or has a newer pin
            held = await self._store.call(partial(self._ask, asked, names))
            if held is None or held.refused or held.blocks == len(names):
                break
        if self._wanted.get(asked.session) == number:
            del self._wanted[asked.session]
        if held is None:
            self.dropped += 1
            return
        self.pinned += held.blocks > 0
        self.refused += held.refused > 0

    async def _release(self, asked: UnpinChain) -> None:
        await self._store.call(lambda: self._store.client.release_hold(asked.session))

    def _ask(self, asked: PinChain, names: list[BlockHash]) -> SessionPinResult | None:
        return self._store.client.hold(asked.session, names, seconds=asked.lasting / SECOND)

    def _chain(self, asked: PinChain) -> list[BlockHash]:
        namespace = self._store.client.namespace
        return chain(asked.tokens, namespace.block_tokens, salt=asked.salt, algorithm=namespace.hash_algorithm)


@asynccontextmanager
async def open_pin_keeper(
    address: str, kv: Fingerprint, credentials: Credentials, *, wait_seconds: float | None = None
) -> AsyncIterator[StorePinKeeper]:
    """Open a pin keeper that uses the node at `address`, for an engine whose blocks have the fingerprint `kv`.

    Until the node answers for the first time, pins are not made, and are counted as dropped.

    Leaving the context waits for the current call.

    Raises:
        LayoutMismatch: The node answers, and has blocks of this model that differ from `kv`, or another format version.
        InvalidArgument: The node answers, and cannot store such blocks.
        BadCredentials: A file of the credentials cannot be used.
    """
    async with (
        open_store_thread(address, kv, credentials, "store-holds", wait_seconds=wait_seconds) as store,
        asyncio.TaskGroup() as tasks,
    ):
        keeper = StorePinKeeper(store, tasks)
        try:
            yield keeper
        finally:
            keeper.close()
