"""Store thread: makes the calls of a store client in a thread, so that the worker's event loop never waits for them."""

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
    """Runs the calls of one store client in a thread; made by `open_store_thread`."""

    def __init__(self, client: StoreClient, thread: ThreadPoolExecutor) -> None:
        self.client = client
        """The client. Calls to the node must go through `call`. Any thread may read properties that need no call."""

        self._thread = thread

    async def call(self, call: Callable[[], Answer]) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)


@asynccontextmanager
async def open_store_thread(
    address: str, kv: Fingerprint, credentials: Credentials, name: str, *, wait_seconds: float | None = None
) -> AsyncIterator[StoreThread]:
    """Open a client of the node at `address`, for an engine whose blocks have the fingerprint `kv`.

    If the node does not answer yet, the client joins it as soon as it does.

    Leaving the context waits for the current call, because the thread also closes the client.

    Args:
        address: Address of the node's control plane.
        kv: Fingerprint of the engine's blocks.
        credentials: Credentials for a node on another host.
        name: Name of the thread.
        wait_seconds: Maximum wait for the node in this call; None: long enough for a node that is starting.

    Raises:
        LayoutMismatch: The node answers, and has blocks of this model that differ from `kv`, or another format version.
        InvalidArgument: The node answers, and cannot store such blocks.
        BadCredentials: A file of the credentials cannot be used.
    """
    with ThreadPoolExecutor(1, thread_name_prefix=name) as thread:
        patience = CONNECT_SECONDS if wait_seconds is None else wait_seconds
        run = partial(asyncio.get_running_loop().run_in_executor, thread)
        client = await run(
            lambda: StoreClient.join(
                address,
                kv.at_rest,
                wait_seconds=patience,
                credentials=credentials,
                credentials_field="store_credentials",
            )
        )
        try:
            yield StoreThread(client, thread)
        finally:
            await asyncio.shield(run(client.close))
