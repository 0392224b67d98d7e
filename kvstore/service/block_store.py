"""BlockStore service: answers the calls of clients by the pool machine, performs its commands, and informs watchers.

New blocks and look-ups are also reported to the tier hierarchy. It demotes blocks to the tiers, and promotes blocks that
clients do not find in the pool. Everything runs on one event loop, and nothing waits between a decision and its
execution. When a client gets a slot, the pool's memory is therefore already marked with the slot generation.
"""

# ruff: noqa: N802 - gRPC names the methods

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from msgspec import Struct
from msgspec.structs import replace

from kvstore.block import HASH_BYTES, BlockHash, split
from kvstore.buffers import crc32c
from kvstore.clock import MILLISECOND, Clock, Nanos, nanos, seconds
from kvstore.errors import IncompatibleVersion, LayoutMismatch, NamespaceInUse, Restarted, StoreError
from kvstore.eviction.ghost_cache import GhostCaches
from kvstore.eviction.hit_savings import HitSavings
from kvstore.hierarchy.machine import Hierarchy
from kvstore.messages import Claim, EvacuationResult, ReservationId, Slot, Stats
from kvstore.pool.machine import BlockMachine
from kvstore.ports import MemoryTier
from kvstore.protocol import wire
from kvstore.protocol.calls import Method
from kvstore.protocol.framed_call_server import CallHandler
from kvstore.protocol.range_messages import range_message
from kvstore.service.backing_tiers import BackingTiers
from kvstore.service.call_traces import CallTraces
from kvstore.service.evacuation import Evacuations
from kvstore.service.metrics import NodeSnapshot
from kvstore.service.settings import StoreSettings
from kvstore.service.transfer_executor import TransferExecutor
from kvstore.service.watchers import Watchers, WatcherTooSlow
from kvstore.transports.nixl import NixlOffer
from kvstore.v1 import blocks_pb2 as pb
from kvstore.v1 import blocks_pb2_grpc as pb_grpc

log = logging.getLogger(__name__)

Request = TypeVar("Request", bound=Message)
Answer = TypeVar("Answer")
Context = grpc.aio.ServicerContext[Any, Any]


CONDEMNED_BYTES = 8 << 20
"""Maximum number of bytes whose checksums are computed in one iteration of the event loop when a client condemns
blocks, unless one block is larger. This takes a millisecond."""

CONDEMNED_NAMES = 64  # maximum number of condemned blocks that are checked in one iteration of the event loop

USES_PER_TURN = 64  # maximum number of uses of chains that are counted in one iteration of the event loop

MAX_UNCOUNTED_USES = 4096
"""Maximum number of uses of chains that wait to be counted. If the node is overloaded and more uses wait, the oldest
ones are not counted. Uncounted uses only make the demotions and the ghost caches less exact."""


class NodeIdentity(Struct, frozen=True, kw_only=True):
    """The facts about a node that it sends to each client in the handshake (the call `Hello`)."""

    store_id: str
    incarnation: str
    host_id: str
    shm_socket: str
    data_address: str


class _ChainUse(Struct, frozen=True):
    """A use of a chain by a client: a look-up, which found `held` blocks, or a reservation of slots (`is_write`)."""

    digest: bytes
    hashes: bytes  # concatenated block hashes
    held: int = 0
    is_write: bool = False


class BlockStoreService(pb_grpc.BlockStoreServicer):
    """Serves the gRPC calls of one node: handshakes, look-ups, leases, session pins, reservations, publications, evacuations, watches and others."""

    def __init__(
        self,
        settings: StoreSettings,
        identity: NodeIdentity,
        machine: BlockMachine,
        tier: MemoryTier,
        hierarchy: Hierarchy,
        savings: HitSavings,
        backing: BackingTiers,
        nixl_offer: Callable[[], NixlOffer | None],
        clock: Clock,
        traces: CallTraces | None = None,
    ):
        """Prepare the service. It can serve calls after `attach` was called. Without `traces`, calls are not traced."""
        self._identity = identity
        self._machine = machine
        self._tier = tier
        self._hierarchy = hierarchy
        self._savings = savings
        self._open_in_tiers = backing.open_namespace
        self.evacuations = Evacuations(machine, hierarchy, backing, self.settle, clock)
        self._nixl_offer = nixl_offer
        self._clock = clock
        self._ghost_caches = GhostCaches(tier.capacity_bytes, settings.eviction)
        self._uncounted_uses: deque[_ChainUse] = deque(maxlen=MAX_UNCOUNTED_USES)
        self._max_lease = nanos(settings.max_lease_seconds)
        self._max_reservation = nanos(settings.reservation_seconds)
        self._max_hold = nanos(settings.max_hold_seconds)
        self._watchers = Watchers(settings.watch_queue)
        # Blocks of one client at a time are checked, because the checks of condemned blocks occupy the event loop.
        self._condemning = asyncio.Lock()
        self._mismatches = 0
        self._traces = traces

    def attach(self, executor: TransferExecutor) -> None:
        """Set the transfer executor, which performs the transfers of the hierarchy."""
        self._executor = executor

    def tick(self) -> None:
        """End leases and reservations whose time has passed, and begin demotions that waited for a circuit breaker.

        The server calls this periodically.
        """
        now = self._clock.now()
        self._machine.expire(now)
        self._hierarchy.tick(now)
        self.settle()

    def settle(self) -> None:
        """Perform the commands of the pool machine, and begin the transfers that the hierarchy has decided."""
        self._perform()
        self._executor.settle()
        # A tier with an index in memory answers at once, and its answer may cause new commands of the pool machine.
        self._perform()

    def stats(self) -> Stats:
        """Return the current state and the counters of the node."""
        self._machine.expire(self._clock.now())
        return replace(self._machine.stats(), tiers=self._executor.status())

    def snapshot(self) -> NodeSnapshot:
        """Return the state of the node from which its metrics are made."""
        stats = self.stats()
        return NodeSnapshot(
            stats=stats,
            transfers=tuple(self._hierarchy.counters(index) for index in range(len(stats.tiers))),
            refused_loads=self._hierarchy.refused,
            ghost_caches=self._ghost_caches.estimates(),
            mismatches=self._mismatches,
        )

    @property
    def framed_calls(self) -> Mapping[Method, CallHandler]:
        """The handlers of the frequent calls by method, for clients on this host (`kvstore.protocol.calls`)."""

        def framed(kind: type[Request], act: Callable[[Request, Nanos], Message]) -> CallHandler:
            return lambda message: self._act_and_settle(partial(act, kind.FromString(message)))

        return {
            Method.MATCH: framed(pb.MatchRequest, self._match),
            Method.RELEASE: framed(pb.ReleaseRequest, self._release),
            Method.RESERVE: framed(pb.ReserveRequest, self._reserve),
            Method.PUBLISH: framed(pb.PublishRequest, self._publish),
        }

    async def Hello(self, request: pb.HelloRequest, context: Context) -> pb.HelloResponse:
        return await self._answer(context, lambda now: self._hello(request, now))

    async def Match(self, request: pb.MatchRequest, context: Context) -> pb.MatchResponse:
        return await self._answer(context, lambda now: self._match(request, now))

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        return await self._answer(context, lambda now: self._release(request, now))

    async def Reserve(self, request: pb.ReserveRequest, context: Context) -> pb.ReserveResponse:
        return await self._answer(context, lambda now: self._reserve(request, now))

    async def Publish(self, request: pb.PublishRequest, context: Context) -> pb.PublishResponse:
        return await self._answer(context, lambda now: self._publish(request, now))

    async def Hold(self, request: pb.HoldRequest, context: Context) -> pb.HoldResponse:
        return await self._answer(context, lambda now: self._hold(request, now))

    async def ReleaseHold(self, request: pb.ReleaseHoldRequest, context: Context) -> pb.ReleaseHoldResponse:
        return await self._answer(context, lambda now: self._release_hold(request, now))

    async def Evacuate(self, request: pb.EvacuateRequest, context: Context) -> pb.EvacuateResponse:
        begin = await self._answer(context, lambda now: self._evacuation(request, now))
        return wire.evacuation_message(await begin)

    async def Condemn(self, request: pb.CondemnRequest, context: Context) -> pb.CondemnResponse:
        dropped = 0
        async with self._condemning:
            for batch in await self._answer(context, lambda _: self._condemned_batches(request)):
                dropped += await self._answer(context, partial(self._condemn, request.digest, batch))
                await asyncio.sleep(0)  # serve other clients between two batches
        return pb.CondemnResponse(dropped=dropped)

    async def Stats(self, request: pb.StatsRequest, context: Context) -> pb.StatsResponse:  # noqa: ARG002 - gRPC passes it
        return await self._answer(context, self._stats)

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.BlockChanges]:
        await self._answer(context, lambda _: wire.agree_with_client(self._identity.store_id, request))
        # The metadata tells the client that the stream is open, because an empty store may send no message for long.
        await context.send_initial_metadata(())
        sequence = 0
        try:
            async with aclosing(self._watchers.watch([*self._machine.held(), *self._executor.held()])) as stream:
                async for changes in stream:
                    sequence += 1
                    yield wire.changes_message(sequence, changes)
        except WatcherTooSlow:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too slow for the changes; watch again")

    def _hello(self, request: pb.HelloRequest, now: Nanos) -> pb.HelloResponse:
        wire.agree_with_client(self._identity.store_id, request)
        namespace = wire.parse_hello(request)
        # Open the namespace in the tiers first: if a tier refuses the namespace, the pool must not open it.
        self._open_in_tiers(namespace)
        self._machine.open(namespace, now)
        self._ghost_caches.open(namespace)
        return pb.HelloResponse(
            store_id=self._identity.store_id,
            incarnation=self._identity.incarnation,
            host_id=self._identity.host_id,
            shm_socket=self._identity.shm_socket,
            tcp_address=self._identity.data_address,
            max_lease_ms=self._max_lease // MILLISECOND,
            max_reservation_ms=self._max_reservation // MILLISECOND,
            max_hold_ms=self._max_hold // MILLISECOND,
            nixl=wire.nixl_message(self._nixl_offer()),
            protocols=range_message(),
        )

    def _match(self, request: pb.MatchRequest, now: Nanos) -> pb.MatchResponse:
        self._require_incarnation(request.incarnation)
        digest, hashes = wire.parse_digest(request.digest), wire.check_hashes(request.hashes)
        tenant = wire.parse_tenant(request.tenant)
        lease = wire.parse_lease(request.lease_ms, 0, self._max_lease)
        leased = self._machine.match(digest, hashes, lease=lease, now=now, tenant=tenant)
        held = len(leased.slots)
        if lease:
            self._queue_use(_ChainUse(digest, hashes, held))
        if max_wait := wire.parse_max_wait(request.patience_ms):
            names = split(hashes)
            self._savings.report(digest, len(names), seconds(max_wait))
            self._hierarchy.prefetch(digest, names, held, max_wait, now, tenant)
            self.settle()  # a tier with an index in memory answers at once, so that `loading` below is already right
        loading = self._hierarchy.loading(digest, split(hashes[held * HASH_BYTES :]))
        tell = lease and self._hierarchy.has_promoted
        promoted = (
            self._hierarchy.promoted(digest, split(hashes[: held * HASH_BYTES])) if tell else wire.NOTHING_PROMOTED
        )
        if request.trace and self._traces is not None:
            attributes = {
                "fleet.blocks.asked": len(hashes) // HASH_BYTES,
                "fleet.blocks.held": held,
                "fleet.blocks.loading": loading,
            }
            self._traces.called("store match", request.trace, now, attributes)
        return wire.match_message(leased, loading, promoted)

    def _release(self, request: pb.ReleaseRequest, now: Nanos) -> pb.ReleaseResponse:
        self._machine.release(wire.parse_leases(request.lease_ids), now)
        return pb.ReleaseResponse()

    def _reserve(self, request: pb.ReserveRequest, now: Nanos) -> pb.ReserveResponse:
        self._require_incarnation(request.incarnation)
        digest, names = wire.parse_digest(request.digest), wire.parse_hashes(request.hashes)
        reservation = self._machine.reserve(
            digest,
            names,
            owner=wire.parse_owner(request.owner),
            lease=wire.parse_lease(request.lease_ms, 1, self._max_reservation),
            now=now,
            tenant=wire.parse_tenant(request.tenant),
        )
        self._queue_use(_ChainUse(digest, request.hashes, is_write=True))
        if request.trace and self._traces is not None:
            attributes = {"fleet.blocks.asked": len(names), "fleet.blocks.reserved": len(reservation.reserved)}
            self._traces.called("store reserve", request.trace, now, attributes)
        return wire.reservation_message(reservation)

    def _publish(self, request: pb.PublishRequest, now: Nanos) -> pb.PublishResponse:
        checksums = wire.parse_checksums(request)
        published = self._machine.publish(
            ReservationId(request.reservation_id), checksums, owner=wire.parse_owner(request.owner), now=now
        )
        if request.trace and self._traces is not None:
            self._traces.called("store publish", request.trace, now, {"fleet.blocks.published": published})
        return pb.PublishResponse(published=published)

    def _hold(self, request: pb.HoldRequest, now: Nanos) -> pb.HoldResponse:
        self._require_incarnation(request.incarnation)
        held = self._machine.hold(
            wire.parse_digest(request.digest),
            wire.parse_hashes(request.hashes),
            session=wire.parse_session(request.session),
            span=wire.parse_lease(request.hold_ms, 1, self._max_hold, "hold_ms"),
            now=now,
        )
        return wire.hold_message(held)

    def _release_hold(self, request: pb.ReleaseHoldRequest, now: Nanos) -> pb.ReleaseHoldResponse:
        digest, session = wire.parse_digest(request.digest), wire.parse_session(request.session)
        return pb.ReleaseHoldResponse(released=self._machine.release_hold(digest, session, now))

    def _evacuation(self, request: pb.EvacuateRequest, now: Nanos) -> Coroutine[Any, Any, EvacuationResult]:
        """Check the request of an evacuation, and return a coroutine that performs it when it is awaited."""
        self._require_incarnation(request.incarnation)
        digest, names = wire.parse_digest(request.digest), wire.parse_evacuated(request.hashes)
        deadline = Nanos(now + wire.parse_max_wait(request.timeout_ms))
        self._machine.block_bytes(digest)  # raises NamespaceUnknown before the evacuation begins
        return self.evacuations.evacuate(digest, names, leaving=request.leaving, deadline=deadline)

    def _condemned_batches(self, request: pb.CondemnRequest) -> list[list[tuple[BlockHash, int]]]:
        """Return the blocks that a client condemns, each only once, in batches.

        Each batch is small enough to be checked in one iteration of the event loop.
        """
        block_bytes = self._machine.block_bytes(wire.parse_digest(request.digest))
        blocks = list(dict.fromkeys(wire.parse_condemned(request)))
        step = max(1, min(CONDEMNED_NAMES, CONDEMNED_BYTES // block_bytes))
        return [blocks[start : start + step] for start in range(0, len(blocks), step)]

    def _condemn(self, digest: bytes, blocks: Sequence[tuple[BlockHash, int]], now: Nanos) -> int:
        """Remove the blocks of a batch whose bytes in the pool are wrong (`_is_corrupt`); return their number."""
        return sum(
            self._machine.condemn(digest, name, generation, now)
            for name, generation in blocks
            if self._is_corrupt(digest, name, generation)
        )

    def _stats(self, now: Nanos) -> pb.StatsResponse:  # noqa: ARG002 - the signature of all answers
        message = wire.stats_message(self.stats(), self._identity.store_id)
        message.protocols.CopyFrom(range_message())
        return message

    def _is_corrupt(self, digest: bytes, name: BlockHash, generation: int) -> bool:
        """Return whether the block's bytes in the pool do not match its published checksum.

        The client may have received wrong bytes although the block in the pool is intact. Removing an intact block
        would harm other clients.
        """
        slot = self._machine.find(digest, name)
        if slot is None or slot.generation != generation:
            return False
        address = self._machine.readable(digest, Slot(slot.offset, slot.generation))
        assert address is not None
        return crc32c([self._tier.view(address)]) != slot.crc32c

    def _require_incarnation(self, incarnation: str) -> None:
        if incarnation != self._identity.incarnation:
            raise Restarted(f"incarnation: this is {self._identity.incarnation!r}, not {incarnation!r}")

    async def _answer(self, context: Context, act: Callable[[Nanos], Answer]) -> Answer:
        try:
            return self._act_and_settle(act)
        except StoreError as error:
            if isinstance(error, LayoutMismatch | NamespaceInUse):
                self._mismatches += 1
                log.warning("client refused: incompatible blocks", extra={"reason": str(error)})
            elif isinstance(error, IncompatibleVersion):
                self._mismatches += 1
                log.warning("client refused: no common protocol version", extra={"reason": str(error)})
            code, field = wire.status_of(error)
            await context.abort(code, str(error), ((wire.FIELD_KEY, field),) if field else ())

    def _act_and_settle(self, act: Callable[[Nanos], Answer]) -> Answer:
        """Call `act`, perform all decisions that it causes (`settle`), and return its result."""
        try:
            return act(self._clock.now())
        finally:
            self.settle()

    def _queue_use(self, use: "_ChainUse") -> None:
        """Queue a use of a chain; the hierarchy and the ghost caches count it after the client has its answer."""
        if not self._uncounted_uses:
            asyncio.get_running_loop().call_soon(self._count_uses)
        self._uncounted_uses.append(use)

    def _count_uses(self) -> None:
        now = self._clock.now()
        try:
            for _ in range(min(len(self._uncounted_uses), USES_PER_TURN)):
                use = self._uncounted_uses.popleft()
                names = split(use.hashes)
                if use.is_write:
                    self._ghost_caches.stored(use.digest, names, now)
                else:
                    self._ghost_caches.looked_up(use.digest, names, now)
                    self._hierarchy.offer(use.digest, names[: use.held], now)
        finally:
            if self._uncounted_uses:
                asyncio.get_running_loop().call_soon(self._count_uses)
        self.settle()

    def _perform(self) -> None:
        claim, discard = self._tier.claim, self._tier.discard
        for command in self._machine.commands():
            (claim if isinstance(command, Claim) else discard)(command.address)
        changes = self._machine.changes()
        for each in changes:
            self._hierarchy.forget_origins(each.digest, each.removed)
            self._hierarchy.offer(each.digest, each.stored, self._clock.now())
        self._watchers.tell([*changes, *self._hierarchy.changes()])
