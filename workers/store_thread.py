"""A client of a store node, and the one thread that makes its calls: they go out one after the other, and the worker's loop waits for none."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

from kvstore.client import StoreClient
from kvstore.credentials import Credentials
from kvstore.errors import StoreUnreachable
from kvstore.fingerprint import Fingerprint

log = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0

Answer = TypeVar("Answer")


class StoreThread:
    """Made by `open_store_thread`."""

    def __init__(self, client: StoreClient, thread: ThreadPoolExecutor) -> None:
        self.client = client
        """For use in `call`; what it knows of itself may be read anywhere."""

        self._thread = thread

    async def call(self, call: Callable[[], Answer]) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)


@asynccontextmanager
async def open_store_thread(
    address: str, kv: Fingerprint, credentials: Credentials, name: str
) -> AsyncIterator[StoreThread | None]:
    """A client of the node at `address`, for an engine with blocks like `kv`; None when it does not answer any more.

    Leaving takes as long as a call that is under way: the client is of one thread, which closes it.

    Args:
        address: Of the node's control plane.
        kv: What the engine's blocks are.
        credentials: For a node on another host.
        name: Of the thread, and of what will not be done when the node does not answer, in the log.

    Raises:
        LayoutMismatch: The node holds blocks of this model that are not like these.
    """
    with ThreadPoolExecutor(1, thread_name_prefix=name) as thread:
        run = partial(asyncio.get_running_loop().run_in_executor, thread)
        try:
            client = await run(
                lambda: StoreClient.connect(
                    address, kv.at_rest, timeout_seconds=CONNECT_SECONDS, credentials=credentials
                )
            )
        except StoreUnreachable as error:
            log.warning(
                "the store does not answer, so something is done without it",
                extra={"without": name, "cause": str(error)},
            )
            yield None
            return
        try:
            yield StoreThread(client, thread)
        finally:
            await asyncio.shield(run(client.close))
