"""Production world: runs the servers of production in virtual time, between simulated clients and simulated engines.

A `ProductionWorld` is a `fleet.sim.world.World` whose requests go from client to engine and back through the code of
`fleet serve`: `RouterServer` around the machine, `WorkerStreams`, frames of `fleet.v1`, the worker's end of the stream,
`RouterSession`, and `WorkerServer` around the worker's machine. The workers register under leases, and the router finds
them by the registry.

Rules:

1. Three parts of production are replaced. Connections are in memory (`fleet.sim.virtual_loop`). Engines are the
   simulation's (`fleet.app.agreement.hosted_engine`). A worker's process is a group of asyncio tasks. To kill the
   process, its connections are cut and its tasks cancelled.
2. The blocks of a trace have names and no tokens. So prompts are sent as token ids that contain the block keys
   (`tokens_from_keys`, `keys_from_tokens`), and no hashes are computed from tokens. This run does not test whether all
   processes compute the same hashes.
3. Virtual time begins `JOIN_TIME` before the first request, because workers need some time to join.
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
from fleet.core.work import LoadReport, Progress, WorkerDescription
from fleet.membership.messages import Deregister, NameOccupied, Register, RegistrationSuperseded
from fleet.membership.ports import NameHeld, WorkerSuperseded
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
from workers.registration import RegistryEntry
from workers.server import WorkerServer
from workers.settings import WorkerSettings

JOIN_TIME = SECOND
"""Virtual time before the first request, in nanoseconds. All workers join in less time."""

APART = 10_000
"""Nanoseconds from the start of one worker to the start of the next worker, for workers that exist from the beginning. With
this distance, they join in a fixed order."""

DRAIN = 3600 * SECOND
WORD = np.dtype("<u4")  # a token id has 4 bytes
KEY = np.dtype("<u8")


class ProductionWorld(World):
    """A world whose router and workers run production's servers. The caller must call `close` after the last request."""

    def __init__(self, *arguments: Any, machine: RouterMachine, message_delay: Nanos, **named: Any):
        """Create a world with the arguments of `World`, but the argument `record` is ignored.

        `machine` is the router machine that the servers run. Its hasher must be `keys_from_tokens`.
        """
        kernel, _, settings = arguments
        self._loop = VirtualLoop(kernel, message_delay)  # type: ignore[abstract]  # rule 5 of `fleet.sim.virtual_loop`
        self._registry = RegistryServer(MembershipSettings(), kernel)
        self._streams = WorkerStreams(settings, self._registry.membership(), reachability=self._registry.hear)
        self._router = RouterServer(machine, self._streams, kernel)
        self._processes: dict[WorkerId, _WorkerProcess] = {}
        self._serving: dict[RequestId, asyncio.Task[None]] = {}
        # Nanoseconds until the next worker starts, while `World` adds the workers that exist from the beginning (`APART`).
        # None: all of these have been added, so a new worker starts at once.
        self._next_start: int | None = 0
        self._closed = False
        # The world itself must not delay messages, because the virtual loop already does.
        super().__init__(*arguments, message_delay=Nanos(0), **named)
        self._machine = machine
        self._cluster.cut = self._cut
        self._next_start = None
        self._running: list[asyncio.Task[None]] = [
            self._loop.begin(each)
            for each in (self._registry.run(), self._router.run(), self._streams.run(self._router.hear))
        ]

    def close(self) -> None:
        """End all processes at the next turn of the event loop. Workers that would join later do not start."""
        self._closed = True
        self._loop.cancel_all()

    def abandon(self) -> None:
        """Cancel all tasks and run their clean-up code now; the world cannot be used afterwards.

        In contrast, `close` lets the tasks end later, at the next turn of the event loop.
        """
        self._closed = True
        self._loop.abandon()

    def _handle(self, event: RouterEvent) -> None:
        """Pass an event of the simulated world on to production's servers."""
        match event:
            case Arrived():
                self._serving[event.request_id] = self._loop.begin(self._serve(_with_token_ids(event)))
            case RequestCancelled():
                self._serving.pop(event.request_id).cancel()
            case WorkerStepped():
                self._processes[event.worker_id].engine.stepped(event)
            case CacheAssumed():
                self._processes[event.worker_id].engine.cache_changed(event)
            case WorkerJoined():
                self._begin(event.description)
            case WorkerDraining():
                self._running.append(self._loop.begin(self._processes[event.worker_id].drain()))
            case WorkerLeft():
                self._loop.turn()  # let the process send what it wrote before it is killed
                self._processes.pop(event.worker_id).kill()
            case _:  # other events do not come from workers; the router gets them after the delay of one message
                self._loop.call_later(self._loop.delay / SECOND, self._router.hear, event)

    def _cut(self, worker: SimulatedWorker, lasting: Nanos) -> None:
        """Hold back all data between a worker's process and the router for the time `lasting`.

        Process and router notice only that nothing arrives. If the network of the process is cut already, do nothing.
        """
        process = self._processes[worker.id]
        if process.hold():
            self._kernel.after(lasting, process.release)

    async def _serve(self, arrived: Arrived) -> None:
        """Pass one request to the production router, and report its answer to the client until the request has ended."""
        request_id, now = arrived.request_id, self._kernel.now
        try:
            async with self._router.submit(arrived) as answer:
                async for item in answer:
                    if isinstance(item, Complete):
                        self._end(request_id, now(), item.cached_tokens, "")
                    elif isinstance(item, StartedOver):
                        self._started_over(request_id)
                    elif isinstance(item, Progress):
                        self._emitted(Emit(request_id=request_id, progress=item), now())
        except RequestRejected as refused:
            self._end(request_id, now(), 0, refused.reason.value)

    def _end(self, request_id: RequestId, now: Nanos, cached_tokens: int, refused: str) -> None:
        del self._serving[request_id]
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
        if self._next_start is None:
            process.start()
        else:
            self._kernel.after(Nanos(self._next_start), process.start)
            self._next_start += APART


class _WorkerProcess:
    """Represents the process of one worker: asyncio tasks that run production's worker server and its registration."""

    def __init__(
        self, loop: VirtualLoop, description: WorkerDescription, engine: HostedEngine, registry: RegistryServer
    ):
        """Create the process without starting it."""
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
        self._held = False  # True while the network of the process is cut

    def start(self) -> None:
        loop, server = self._loop, self._server
        loop.listen(self._path, lambda: FrameConnection(routers_of(server), limit=MAX_MESSAGE_BYTES))
        self._tasks = [loop.begin(server.run()), loop.begin(self._register())]

    async def _register(self) -> None:
        await self._registration.run()

    async def drain(self) -> None:
        """Deregister the worker, and then let it drain.

        As in `workers.registration`, the worker deregisters first, so that another process can use its name at once.
        """
        _, registering = self._tasks
        registering.cancel()
        await self._registration.leave()
        await self._server.drain(Nanos(DRAIN))

    def hold(self) -> bool:
        """Cut the network of the process. Return False if the network is cut already, or the process has not started."""
        if self._held or not self._loop.hold(self._path):
            return False
        self._held = True
        return True

    def release(self) -> None:
        """End the cut of the process's network; do nothing if the process was killed meanwhile."""
        if self._held:
            self._held = False
            self._loop.release(self._path)

    def kill(self) -> None:
        """Kill the process. Routers notice only that their connections end."""
        self._held = False
        if self._tasks:
            self._loop.cut(self._path)
        for task in self._tasks:
            task.cancel()


class _InMemoryRegistry:
    """Registers workers at the router's registry without a network. Implements `fleet.membership.ports.Registry`.

    A registration takes two message delays: one for the call, and one until routers are notified. So the last events
    of an incarnation reach routers before its successor registers.
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


def _with_token_ids(arrived: Arrived) -> Arrived:
    """Return the arrival of a request with token ids that contain its block keys."""
    ((block_tokens, keys),) = arrived.keys.items()
    tokens = tokens_from_keys(keys, block_tokens, len(arrived.tokens) // TOKEN_BYTES)
    return structs.replace(arrived, tokens=tokens, keys={})


def tokens_from_keys(keys: Sequence[int], block_tokens: int, num_tokens: int) -> TokenBytes:
    """Return token ids that contain block keys.

    The first two tokens of each block hold its key plus one, so that a zero there means "no key". All other tokens are zero.
    """
    assert block_tokens * WORD.itemsize >= KEY.itemsize, block_tokens
    tokens = np.zeros(num_tokens, WORD)
    words = np.array([key + 1 for key in keys], KEY).view(WORD).reshape(-1, 2)
    tokens[: len(keys) * block_tokens].reshape(-1, block_tokens)[:, :2] = words
    return tokens.tobytes()


def keys_from_tokens(tokens: TokenBytes, block_tokens: int, salt: bytes) -> tuple[int, ...]:  # noqa: ARG001 - type `Hasher`
    """Return the block keys that `tokens_from_keys` has written into token ids. Blocks of generated tokens have no keys."""
    words = np.frombuffer(tokens, WORD)
    blocks = words[: len(words) // block_tokens * block_tokens].reshape(-1, block_tokens)
    said = np.ascontiguousarray(blocks[:, :2]).view(KEY).ravel().tolist()
    full = said.index(0) if 0 in said else len(said)
    return tuple([key - 1 for key in said[:full]])
