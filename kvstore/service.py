"""The BlockStore service: asks the machine, has the tier do what it says, tells the watchers, answers.

Everything runs on one event loop and nothing waits between a decision and its performance, so a client never learns of
a slot before the slot is stamped.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, TypeVar

import grpc
from msgspec import Struct

from kvstore import wire
from kvstore.block import ChainHash
from kvstore.buffers import crc32c
from kvstore.clock import MILLISECOND, Clock, Nanos, nanos
from kvstore.errors import Restarted, StoreError
from kvstore.machine import BlockMachine
from kvstore.messages import Claim, Discard, LeaseId, ReservationId, Slot
from kvstore.ports import MemoryTier
from kvstore.settings import StoreSettings
from kvstore.v1 import blocks_pb2 as pb
from kvstore.v1 import blocks_pb2_grpc as pb_grpc
from kvstore.watchers import TooSlow, Watchers

Answer = TypeVar("Answer")
Context = grpc.aio.ServicerContext[Any, Any]


class Identity(Struct, frozen=True, kw_only=True):
    """What a node says of itself in the handshake."""

    store_id: str
    incarnation: str
    host_id: str
    shm_socket: str
    data_address: str


class BlockStoreService(pb_grpc.BlockStoreServicer):
    """One node's control plane."""

    def __init__(
        self, settings: StoreSettings, identity: Identity, machine: BlockMachine, tier: MemoryTier, clock: Clock
    ):
        self._identity = identity
        self._machine = machine
        self._tier = tier
        self._clock = clock
        self._max_lease = nanos(settings.max_lease_seconds)
        self._max_reservation = nanos(settings.reservation_seconds)
        self._watchers = Watchers(settings.watch_queue)

    def tick(self) -> None:
        """Time has passed: reclaim what has ended."""
        self._machine.expire(self._clock.now())
        self._settle()

    async def Hello(self, request: pb.HelloRequest, context: Context) -> pb.HelloResponse:  # noqa: N802 - named by the protocol
        return await self._answer(context, lambda now: self._hello(request, now))

    async def Match(self, request: pb.MatchRequest, context: Context) -> pb.MatchResponse:  # noqa: N802 - named by the protocol
        return await self._answer(context, lambda now: self._match(request, now))

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:  # noqa: N802 - named by the protocol
        return await self._answer(context, lambda now: self._release(request, now))

    async def Reserve(self, request: pb.ReserveRequest, context: Context) -> pb.ReserveResponse:  # noqa: N802 - named by the protocol
        return await self._answer(context, lambda now: self._reserve(request, now))

    async def Publish(self, request: pb.PublishRequest, context: Context) -> pb.PublishResponse:  # noqa: N802 - named by the protocol
        return await self._answer(context, lambda now: self._publish(request, now))

    async def Condemn(self, request: pb.CondemnRequest, context: Context) -> pb.CondemnResponse:  # noqa: N802 - named by the protocol
        return await self._answer(context, lambda now: self._condemn(request, now))

    async def Stats(self, request: pb.StatsRequest, context: Context) -> pb.StatsResponse:  # noqa: ARG002, N802 - the protocol
        return await self._answer(context, self._stats)

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.BlockChanges]:  # noqa: ARG002, N802 - the protocol
        await context.send_initial_metadata(())  # an empty store says nothing else for a while
        sequence = 0
        try:
            async with aclosing(self._watchers.watch(self._machine.held())) as stream:
                async for changes in stream:
                    sequence += 1
                    yield wire.changes_message(sequence, changes)
        except TooSlow:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too slow for the changes; watch again")

    def _hello(self, request: pb.HelloRequest, now: Nanos) -> pb.HelloResponse:
        self._machine.open(wire.parse_hello(request), now)
        return pb.HelloResponse(
            store_id=self._identity.store_id,
            incarnation=self._identity.incarnation,
            host_id=self._identity.host_id,
            shm_socket=self._identity.shm_socket,
            pool_bytes=self._tier.capacity_bytes,
            tcp_address=self._identity.data_address,
            max_lease_ms=self._max_lease // MILLISECOND,
            max_reservation_ms=self._max_reservation // MILLISECOND,
        )

    def _match(self, request: pb.MatchRequest, now: Nanos) -> pb.MatchResponse:
        self._require_incarnation(request.incarnation)
        leased = self._machine.match(
            wire.parse_digest(request.digest),
            wire.parse_hashes(request.hashes),
            owner=request.owner,
            lease=wire.parse_lease(request.lease_ms, 0, self._max_lease),
            now=now,
        )
        return wire.match_message(leased)

    def _release(self, request: pb.ReleaseRequest, now: Nanos) -> pb.ReleaseResponse:
        self._machine.release([LeaseId(lease_id) for lease_id in request.lease_ids], now)
        return pb.ReleaseResponse()

    def _reserve(self, request: pb.ReserveRequest, now: Nanos) -> pb.ReserveResponse:
        self._require_incarnation(request.incarnation)
        reservation = self._machine.reserve(
            wire.parse_digest(request.digest),
            wire.parse_hashes(request.hashes),
            owner=request.owner,
            lease=wire.parse_lease(request.lease_ms, 1, self._max_reservation),
            now=now,
        )
        return wire.reservation_message(reservation)

    def _publish(self, request: pb.PublishRequest, now: Nanos) -> pb.PublishResponse:
        checksums = wire.parse_checksums(request)
        published = self._machine.publish(
            ReservationId(request.reservation_id), checksums, owner=request.owner, now=now
        )
        return pb.PublishResponse(published=published)

    def _condemn(self, request: pb.CondemnRequest, now: Nanos) -> pb.CondemnResponse:
        digest = wire.parse_digest(request.digest)
        dropped = 0
        for name, generation in wire.parse_condemned(request):
            if self._is_bad(digest, name):
                dropped += self._machine.condemn(digest, name, generation, now)
        return pb.CondemnResponse(dropped=dropped)

    def _stats(self, now: Nanos) -> pb.StatsResponse:
        self._machine.expire(now)
        return wire.stats_message(self._machine.stats(), self._identity.store_id)

    def _is_bad(self, digest: bytes, name: ChainHash) -> bool:
        """A client that read badly, or lies, costs nobody a good block."""
        slot = self._machine.find(digest, name)
        if slot is None:
            return False
        address = self._machine.readable(digest, Slot(slot.offset, slot.generation))
        assert address is not None
        return crc32c([self._tier.view(address)]) != slot.crc32c

    def _require_incarnation(self, incarnation: str) -> None:
        if incarnation != self._identity.incarnation:
            raise Restarted(f"incarnation: this is {self._identity.incarnation!r}, not {incarnation!r}")

    async def _answer(self, context: Context, act: Callable[[Nanos], Answer]) -> Answer:
        try:
            answer = act(self._clock.now())
        except StoreError as error:
            self._settle()
            code, field = wire.status_of(error)
            await context.abort(code, str(error), ((wire.FIELD_KEY, field),) if field else ())
        self._settle()
        return answer

    def _settle(self) -> None:
        for command in self._machine.commands():
            match command:
                case Claim(address=address):
                    self._tier.claim(address)
                case Discard(address=address):
                    self._tier.discard(address)
        self._watchers.tell(self._machine.changes())
