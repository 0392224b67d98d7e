"""A client of a store node, and the one thread that makes its calls: they go out one after the other, and the worker's loop waits for none."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

from kvstore.client.store_client import StoreClient
from kvstore.layouts.fingerprint import Fingerprint
from kvstore.security.credentials import Credentials

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
    address: str, kv: Fingerprint, credentials: Credentials, name: str, *, wait_seconds: float | None = None
) -> AsyncIterator[StoreThread]:
    """Open a client of the node at `address`, for an engine with blocks like `kv`; it joins the node as soon as that answers.

    Leaving takes as long as a call that is under way: the client is of one thread, which closes it.

    Args:
        address: Of the node's control plane.
        kv: What the engine's blocks are.
        credentials: For a node on another host.
        name: Of the thread.
        wait_seconds: How long to wait for the node here; None: as long as one that is starting takes.

    Raises:
        LayoutMismatch: The node answers, and holds blocks of this model that are not like these.
        BadCredentials: A file of the credentials cannot be used.
    """
    with ThreadPoolExecutor(1, thread_name_prefix=name) as thread:
        patience = CONNECT_SECONDS if wait_seconds is None else wait_seconds
        run = partial(asyncio.get_running_loop().run_in_executor, thread)
        client = await run(
            lambda: StoreClient.join(address, kv.at_rest, wait_seconds=patience, credentials=credentials)
        )
        try:
            yield StoreThread(client, thread)
        finally:
            await asyncio.shield(run(client.close))
