"""Store watch: follows the blocks of a KV store node over gRPC, for the router's prefix index.

Each stream begins with a dump of all blocks, which replaces what was known before. While there is no stream, the router
assumes that the node has no blocks, because nobody can load a block from an unreachable node.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Never

import grpc

from fleet.core.ids import StoreId
from fleet.net.grpc.options import SEPARATE_CHANNEL_OPTIONS
from fleet.router.messages import StoreChanged
from fleet.router.settings.router import RouterSettings
from kvstore.block import split
from kvstore.messages import POOL_TIER
from kvstore.security import channels as access
from kvstore.v1 import blocks_pb2 as pb
from kvstore.v1 import blocks_pb2_grpc as pb_grpc

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.05

Tell = Callable[[StoreChanged], Awaitable[None]]


class WatchBroken(Exception):
    """The stream cannot be used any more; the message says why."""


class GrpcStoreWatch:
    """Follows the blocks of one store node. The connection's keepalive detects a hung node within eight seconds."""

    def __init__(self, address: str, settings: RouterSettings):
        """Prepare the watch; the connection is opened in `run`.

        Args:
            address: Address of the node's control plane.
            settings: Settings of the router.

        Raises:
            BadCredentials: A credentials file cannot be used.
        """
        self._address = address
        self._access = access.load(settings.store_credentials)
        self._settings = settings
        self._told: set[tuple[StoreId, str]] = set()  # namespaces of which the prefix index may contain blocks

    async def run(self, tell: Tell) -> Never:
        """Report every change until cancelled; reconnect with growing pauses."""
        pause = FIRST_PAUSE_SECONDS
        cause = ""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                await self._watch(tell)
            except (grpc.aio.AioRpcError, WatchBroken) as error:
                was_up = loop.time() - began > self._settings.max_reconnect_seconds
                if was_up or _cause(error) != cause:  # log the same cause only once in a row
                    cause = _cause(error)
                    tls = await asyncio.to_thread(self._access.diagnose, self._address) if _is_cut(error) else ""
                    log.warning("store watch ended", extra={"address": self._address, "cause": tls or cause})
                if was_up:
                    pause = FIRST_PAUSE_SECONDS
            for store_id, fingerprint in sorted(self._told):
                await tell(StoreChanged(store_id=store_id, fingerprint=fingerprint, reset=True))
            self._told.clear()
            await asyncio.sleep(pause)
            pause = min(2 * pause, self._settings.max_reconnect_seconds)

    async def _watch(self, tell: Tell) -> Never:
        async with self._access.aio_channel(self._address, SEPARATE_CHANNEL_OPTIONS) as channel:
            stub = pb_grpc.BlockStoreStub(channel)
            stats = await stub.Stats(pb.StatsRequest(), timeout=self._settings.connect_timeout_seconds)
            store_id = StoreId(stats.store_id)
            if not store_id:
                raise WatchBroken("the node does not say its name")
            sequence: int | None = None
            async for changes in stub.Watch(pb.WatchRequest()):
                if sequence is not None and changes.sequence != sequence + 1:
                    raise WatchBroken(f"changes {sequence + 1} to {changes.sequence - 1} are missing")
                sequence = changes.sequence
                await tell(self._changed(store_id, changes))
            raise WatchBroken("the node ended the stream")

    def _changed(self, store_id: StoreId, changes: pb.BlockChanges) -> StoreChanged:
        namespace = (store_id, changes.digest.hex())
        first = namespace not in self._told
        self._told.add(namespace)
        try:
            stored, removed = split(changes.stored), split(changes.removed)
        except ValueError as error:
            raise WatchBroken(str(error)) from error
        return StoreChanged(
            store_id=store_id,
            fingerprint=namespace[1],
            tier=changes.tier or POOL_TIER,
            stored=tuple(stored),
            removed=tuple(removed),
            reset=first,
        )


def _is_cut(error: grpc.aio.AioRpcError | WatchBroken) -> bool:
    """Return True if the connection failed, for which TLS may be the reason."""
    return isinstance(error, grpc.aio.AioRpcError) and error.code() in (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    )


def _cause(error: grpc.aio.AioRpcError | WatchBroken) -> str:
    return f"{error.code().name}: {error.details()}" if isinstance(error, grpc.aio.AioRpcError) else str(error)
