"""The servers of production in virtual time, between a world's clients and its engines.

A `ProductionWorld` is a `fleet.sim.world.World` but for the way from a client to an engine and back, which it takes through what
`fleet serve` runs: `RouterServer` around the machine, `WorkerStreams`, frames of `fleet.v1`, the worker's end of the stream,
`Session`, `WorkerServer` around the worker's machine; and workers that register under leases, whom routers find by the registry.

Rules:

1. Three things are not production's. Connections are in memory (`fleet.sim.virtual_loop`). Engines are the simulation's (`fleet.app.agreement.hosted_engine`).
   A worker's process is a group of tasks; it is killed by cutting its connections and cancelling them.
2. Prompts go over the wire as token ids from which the keys of their blocks can be read (`tokens_from_keys`, `keys_from_tokens`), in place of
   hashes: the blocks of a trace have names and no tokens. Whether prompts are hashed alike everywhere is not a question of time.
3. Workers take a moment to join: begin before the first request (`JOIN_TIME`).
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import structs

from fleet.app.agreement.hosted_engine import HostedEngine
from fleet.backends.workers.streams import WorkerStreams
from fleet.core.clock import MILLISECOND, SECOND, Nanos
from fleet.core.errors import RequestRejected
from fleet.core.ids import Incarnation, RequestId, WorkerId
from fleet.core.requests import TOKEN_BYTES, TokenBytes
from fleet.core.work import LoadReport, WorkerDescription
from fleet.membership.messages import Deregister, NameOccupied, Register, RegistrationSuperseded
from fleet.membership.server import RegistryServer
from fleet.membership.settings import MembershipSettings
from fleet.net.grpc.options import MAX_MESSAGE_BYTES
from fleet.router.machine import RouterMachine
from fleet.router.messages import (
    Arrived,
    CacheAssumed,
    Complete,
    Emit,
    RequestCancelled,
    RouterEvent,
    StartedOver,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
    WorkerStepped,
)
from fleet.router.server import RouterServer
from fleet.sim.cluster.worker import SimulatedWorker
from fleet.sim.virtual_loop import VirtualLoop
from fleet.sim.world import World
from kvstore.net.frames import FrameConnection
from workers.connections.router_streams import routers_of
from workers.ports import NameHeld, WorkerSuperseded
from workers.registration import RegistryEntry
from workers.server import WorkerServer
from workers.settings import WorkerSettings

JOIN_TIME = SECOND
"""What workers need to join, amply."""

APART = 10_000
"""Nanoseconds between the starts of two workers that are there from the beginning: routers know workers in the order of joining."""

DRAIN = 3600 * SECOND
WORD = np.dtype("<u4")  # of a token id
KEY = np.dtype("<u8")


class ProductionWorld(World):
    """A world whose router and workers are processes of production; `close` it when nothing is to come any more."""

    def __init__(self, *arguments: Any, machine: RouterMachine, message_delay: Nanos, **named: Any):
        """As `World`, whose `record` says nothing here.

        Args:
            arguments: Of the world; the first is the kernel.
            machine: The router's, made with the hasher `keys_from_tokens`.
            message_delay: Between router and workers, one way.
            named: More of the world.
        """
        kernel, _, settings = arguments
        self._loop = VirtualLoop(kernel, message_delay)  # type: ignore[abstract]  # its rule 5
        self._registry = RegistryServer(MembershipSettings(), kernel)
        self._streams = WorkerStreams(settings, self._registry.membership(), reachability=self._registry.hear)
        self._router = RouterServer(machine, self._streams, kernel)
        self._processes: dict[WorkerId, _WorkerProcess] = {}
        self._asking: dict[RequestId, asyncio.Task[None]] = {}
        self._apart: int | None = 0  # from now to the next start; None: all are there that are there from the beginning
        self._closed = False
        super().__init__(*arguments, message_delay=Nanos(0), **named)  # messages take their time in the loop
        self._machine = machine
        self._cluster.cut = self._cut
        self._apart = None
        self._running: list[asyncio.Task[None]] = [
            self._loop.begin(each)
            for each in (self._registry.run(), self._router.run(), self._streams.run(self._router.hear))
        ]

    def close(self) -> None:
        """End all processes; who joins later does not start."""
        self._closed = True
        self._loop.cancel_all()

    def abandon(self) -> None:
        """End all processes in the middle of what they do; the world is of no use any more."""
        self._closed = True
        self._loop.abandon()

    def _hear(self, event: RouterEvent) -> None:
        """What the world tells its router comes about in production, or goes there."""
        match event:
            case Arrived():
                self._asking[event.request_id] = self._loop.begin(self._ask(_written_out(event)))
            case RequestCancelled():
                self._asking.pop(event.request_id).cancel()
            case WorkerStepped():
                self._processes[event.worker_id].engine.stepped(event)
            case CacheAssumed():
                self._processes[event.worker_id].engine.cache_changed(event)
            case WorkerJoined():
                self._begin(event.description)
            case WorkerDraining():
                self._running.append(self._loop.begin(self._processes[event.worker_id].drain()))
            case WorkerLeft():
                self._loop.turn()  # its last words
                self._processes.pop(event.worker_id).kill()
            case _:  # what reaches a router by other ways than its workers' streams
                self._loop.call_later(self._loop.delay / SECOND, self._router.hear, event)

    def _cut(self, worker: SimulatedWorker, lasting: Nanos) -> None:
        """Nothing passes between its process and the router; what that means is for these two to find out."""
        process = self._processes[worker.id]
        if process.hold():
            self._kernel.after(lasting, process.release)

    async def _ask(self, arrived: Arrived) -> None:
        """One client's request, from its arrival to its end."""
        request_id, now = arrived.request_id, self._kernel.now
        try:
            async with self._router.submit(arrived) as answer:
                async for item in answer:
                    if isinstance(item, Complete):
                        self._ended_at(request_id, now(), item.cached_tokens, "")
                    elif isinstance(item, StartedOver):
                        self._started_over(request_id)
                    else:
                        self._emitted(Emit(request_id=request_id, progress=item), now())
        except RequestRejected as refused:
            self._ended_at(request_id, now(), 0, refused.reason.value)

    def _ended_at(self, request_id: RequestId, now: Nanos, cached_tokens: int, refused: str) -> None:
        del self._asking[request_id]
        self._over(request_id, now, cached_tokens, refused)

    def _begin(self, description: WorkerDescription) -> None:
        worker = self._cluster.get(description.worker_id)
        assert worker is not None, description.worker_id

        def load() -> LoadReport:
            engine = worker.engine
            return LoadReport(
                running=engine.held - engine.waiting, waiting=engine.waiting, kv_blocks_used=engine.kv_blocks_used
            )

        engine = HostedEngine(description, worker.execute, load)
        process = _WorkerProcess(self._loop, description, engine, self._registry)
        self._processes[description.worker_id] = process
        if self._closed:
            return
        if self._apart is None:
            process.start()
        else:
            self._kernel.after(Nanos(self._apart), process.start)
            self._apart += APART


class _WorkerProcess:
    """A worker's process."""

    def __init__(
        self, loop: VirtualLoop, description: WorkerDescription, engine: HostedEngine, registry: RegistryServer
    ):
        """Not started yet."""
        self.engine = engine
        self._loop = loop
        self._path = f"/{description.worker_id}"
        settings = WorkerSettings(
            worker_id=description.worker_id,
            role=description.role,
            model=description.model,
            listen=f"unix:{self._path}",
            kv_paths=description.kv_paths,
            store="" if description.store_id is None else f"unix:/{description.store_id}",
            prefill_speed=description.prefill_speed,
            decode_speed=description.decode_speed,
            labels=description.labels,
        )
        self._server = WorkerServer(settings, engine, loop.kernel, description.incarnation)
        self._registration = RegistryEntry(
            registry=_InMemoryRegistry(registry, loop.delay),
            worker_id=description.worker_id,
            incarnation=description.incarnation,
            address=settings.listen,
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._held = False  # nothing passes to or from it

    def start(self) -> None:
        loop, server = self._loop, self._server
        loop.listen(self._path, lambda: FrameConnection(routers_of(server), limit=MAX_MESSAGE_BYTES))
        self._tasks = [loop.begin(server.run()), loop.begin(self._register())]

    async def _register(self) -> None:
        await self._registration.run()

    async def drain(self) -> None:
        """Take no more work, and end when there is none; it says at once that others may have its name, as `workers.registration` does."""
        _, registering = self._tasks
        registering.cancel()
        await self._registration.leave()
        await self._server.drain(Nanos(DRAIN))

    def hold(self) -> bool:
        """Cut it off; whether it was there, and was not cut off already."""
        if self._held or not self._loop.hold(self._path):
            return False
        self._held = True
        return True

    def release(self) -> None:
        """End a cut, if it has not ended with the process."""
        if self._held:
            self._held = False
            self._loop.release(self._path)

    def kill(self) -> None:
        """Nobody is told; routers notice that their connections have ended."""
        self._held = False
        if self._tasks:
            self._loop.cut(self._path)
        for task in self._tasks:
            task.cancel()


class _InMemoryRegistry:
    """Implements `workers.ports.Registry` without a wire.

    What a worker says to it and what it then tells routers take a message's time each: so the last words of one incarnation
    reach them before the next one takes its place.
    """

    def __init__(self, registry: RegistryServer, delay: Nanos):
        self._registry = registry
        self._delay = delay

    async def register(self, worker_id: WorkerId, incarnation: Incarnation, address: str) -> Nanos:
        await asyncio.sleep(2 * self._delay / SECOND)
        match self._registry.register(Register(worker_id=worker_id, incarnation=incarnation, address=address)):
            case RegistrationSuperseded():
                raise WorkerSuperseded(worker_id)
            case NameOccupied():
                raise NameHeld(worker_id)
            case None:
                pass
        return Nanos(self._registry.lease_ms * MILLISECOND)

    async def deregister(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        self._registry.deregister(Deregister(worker_id=worker_id, incarnation=incarnation))


def _written_out(arrived: Arrived) -> Arrived:
    """With token ids in place of keys."""
    ((block_tokens, keys),) = arrived.keys.items()
    tokens = tokens_from_keys(keys, block_tokens, len(arrived.tokens) // TOKEN_BYTES)
    return structs.replace(arrived, tokens=tokens, keys={})


def tokens_from_keys(keys: Sequence[int], block_tokens: int, num_tokens: int) -> TokenBytes:
    """A prompt whose full blocks say their keys: 64 bits less one in the first two tokens of each, and zeros elsewhere."""
    assert block_tokens * WORD.itemsize >= KEY.itemsize, block_tokens
    tokens = np.zeros(num_tokens, WORD)
    words = np.array([key + 1 for key in keys], KEY).view(WORD).reshape(-1, 2)
    tokens[: len(keys) * block_tokens].reshape(-1, block_tokens)[:, :2] = words
    return tokens.tobytes()


def keys_from_tokens(tokens: TokenBytes, block_tokens: int, salt: bytes) -> tuple[int, ...]:  # noqa: ARG001 - a `Hasher`
    """The keys of such a prompt; blocks of zeros, which an answer may have filled, have none."""
    words = np.frombuffer(tokens, WORD)
    blocks = words[: len(words) // block_tokens * block_tokens].reshape(-1, block_tokens)
    said = np.ascontiguousarray(blocks[:, :2]).view(KEY).ravel().tolist()
    full = said.index(0) if 0 in said else len(said)
    return tuple([key - 1 for key in said[:full]])
