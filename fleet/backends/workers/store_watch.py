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
from fleet.membership.compatibility import IncompatiblePeers, Link
from fleet.net.grpc.options import SEPARATE_CHANNEL_OPTIONS
from fleet.router.messages import StoreChanged
from fleet.router.settings.router import RouterSettings
from kvstore.block import split
from kvstore.errors import IncompatibleVersion
from kvstore.messages import POOL_TIER
from kvstore.protocol.range_messages import range_message
from kvstore.protocol.wire import agree_with_node
from kvstore.security import channels as access
from kvstore.v1 import blocks_pb2 as pb
from kvstore.v1 import blocks_pb2_grpc as pb_grpc

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.05

Tell = Callable[[StoreChanged], Awaitable[None]]


class WatchBroken(Exception):
    """Error: the stream from the store node cannot be used any more. The message states the reason."""


class GrpcStoreWatch:
    """Follows one store node over gRPC, and reports which blocks the node has.

    A hung node is noticed within eight seconds, by the connection's keepalive.
    """

    def __init__(self, address: str, settings: RouterSettings, incompatible: IncompatiblePeers):
        """Create the watch; `run` opens the connection.

        Args:
            address: Address of the node's control plane.
            settings: Settings of the router.
            incompatible: Collects nodes and workers without a common protocol version.

        Raises:
            BadCredentials: A credentials file cannot be used.
        """
        self._address = address
        self._access = access.load(settings.store_credentials, field="store_credentials")
        self._settings = settings
        self._incompatible = incompatible
        # Namespaces whose blocks were reported, so that the prefix index may still contain blocks of them.
        self._reported: set[tuple[StoreId, str]] = set()

    async def run(self, tell: Tell) -> Never:
        """Report every change of the node's blocks to `tell` until cancelled.

        After a failure, report that the node has no blocks, and connect again with growing pauses.
        """
        pause = FIRST_PAUSE_SECONDS
        cause = ""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                await self._watch(tell)
            except (grpc.aio.AioRpcError, WatchBroken) as error:
                if isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.OUT_OF_RANGE:
                    self._incompatible.refused(Link.STORE, self._address, error.details() or "")
                was_up = loop.time() - began > self._settings.max_reconnect_seconds
                if was_up or _cause(error) != cause:  # log the same cause only once in a row
                    cause = _cause(error)
                    tls = await asyncio.to_thread(self._access.diagnose, self._address) if _is_cut(error) else ""
                    log.warning("store watch ended", extra={"address": self._address, "cause": tls or cause})
                if was_up:
                    pause = FIRST_PAUSE_SECONDS
            for store_id, fingerprint in sorted(self._reported):
                await tell(StoreChanged(store_id=store_id, fingerprint=fingerprint, reset=True))
            self._reported.clear()
            await asyncio.sleep(pause)
            pause = min(2 * pause, self._settings.max_reconnect_seconds)

    async def _watch(self, tell: Tell) -> Never:
        async with self._access.aio_channel(self._address, SEPARATE_CHANNEL_OPTIONS) as channel:
            stub = pb_grpc.BlockStoreStub(channel)
            stats = await stub.Stats(pb.StatsRequest(), timeout=self._settings.connect_timeout_seconds)
            store_id = StoreId(stats.store_id)
            if not store_id:
                raise WatchBroken("the node does not say its name")
            try:
                agree_with_node(self._address, stats)
            except IncompatibleVersion as error:
                self._incompatible.refused(Link.STORE, self._address, str(error))
                raise WatchBroken(str(error)) from error
            self._incompatible.accepted(Link.STORE, self._address)
            sequence: int | None = None
            async for changes in stub.Watch(pb.WatchRequest(protocols=range_message())):
                if sequence is not None and changes.sequence != sequence + 1:
                    raise WatchBroken(f"changes {sequence + 1} to {changes.sequence - 1} are missing")
                sequence = changes.sequence
                await tell(self._changed(store_id, changes))
            raise WatchBroken("the node ended the stream")

    def _changed(self, store_id: StoreId, changes: pb.BlockChanges) -> StoreChanged:
        namespace = (store_id, changes.digest.hex())
        first = namespace not in self._reported
        self._reported.add(namespace)
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
    """Return True if the connection itself failed; then a TLS error may be the cause."""
    return isinstance(error, grpc.aio.AioRpcError) and error.code() in (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    )


def _cause(error: grpc.aio.AioRpcError | WatchBroken) -> str:
    return f"{error.code().name}: {error.details()}" if isinstance(error, grpc.aio.AioRpcError) else str(error)
