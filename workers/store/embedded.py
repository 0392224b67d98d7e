"""Embedded store: a KV store node inside the worker's process.

The node starts before the engine and ends after it. The engine connects to it as to any other node.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from msgspec import Struct, structs

from fleet.core.errors import ConfigurationRefused
from kvstore.errors import StoreNotStarted
from kvstore.messages import StoreEndpoints
from kvstore.system_clock import MonotonicClock
from workers.settings import WorkerSettings


class SettingsWithStore(Struct, frozen=True):
    """A worker's settings together with its running store node."""

    settings: WorkerSettings  # the worker's settings for the engine; with a node, `store` is the node's address
    node: StoreEndpoints | None  # addresses of the node in this process; None: this process has no node


@asynccontextmanager
async def open_embedded_store(
    settings: WorkerSettings, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> AsyncIterator[SettingsWithStore]:
    """Run the node of `settings.embedded_store` while the context is open.

    Args:
        settings: Settings of the worker.
        new_loop: Function that makes the node's event loop.

    Raises:
        ConfigurationRefused: The node's settings cannot be used here; the message names the field.
        NodeEnded: The node ended by itself.
    """
    node_settings = settings.embedded_store
    if node_settings is None:
        yield SettingsWithStore(settings, None)
        return
    from kvstore.service.embedded import open_embedded  # noqa: PLC0415 - slow to import, and most workers have no node

    async with AsyncExitStack() as held:
        try:
            node = await held.enter_async_context(open_embedded(node_settings, MonotonicClock(), new_loop=new_loop))
        except StoreNotStarted as error:
            raise ConfigurationRefused(f"embedded_store.{error}") from error
        yield SettingsWithStore(structs.replace(settings, store=settings.store_address, embedded_store=None), node)
