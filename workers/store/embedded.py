"""The KV store node that a worker has in its own process, where its settings say so: the smallest set-up.

The node is there before the engine, which connects to it as to any other, and goes after it.
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
    """A worker's settings with a store that is there."""

    settings: WorkerSettings  # as the engine is to have them: they name the node's address
    node: StoreEndpoints | None  # of the node in this process; None: there is none


@asynccontextmanager
async def open_embedded_store(
    settings: WorkerSettings, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> AsyncIterator[SettingsWithStore]:
    """Run the node of `settings.embedded_store` while the context is open.

    Args:
        settings: Of the worker.
        new_loop: Makes the node's event loop.

    Raises:
        ConfigurationRefused: The node's settings cannot be obeyed here; names the field.
        NodeEnded: The node ended by itself.
    """
    told = settings.embedded_store
    if told is None:
        yield SettingsWithStore(settings, None)
        return
    from kvstore.service.embedded import open_embedded  # noqa: PLC0415 - most workers have no node, and it takes a while

    async with AsyncExitStack() as held:
        try:
            node = await held.enter_async_context(open_embedded(told, MonotonicClock(), new_loop=new_loop))
        except StoreNotStarted as error:
            raise ConfigurationRefused(f"embedded_store.{error}") from error
        yield SettingsWithStore(structs.replace(settings, store=settings.store_address, embedded_store=None), node)
