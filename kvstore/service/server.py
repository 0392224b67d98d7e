"""Node process: starts and stops all parts of a store node, and performs its periodic work.

The parts are the pool, the backing tiers, the gRPC control plane, the memory handout, the framed calls, the TCP data
plane, the NIXL agent, the metrics and the exporter of traces.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import threading
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from kvstore.clock import Clock
from kvstore.errors import BadCredentials, NamespaceUnknown, StoreNotStarted
from kvstore.eviction.hit_savings import HitSavings
from kvstore.eviction.policies import policy
from kvstore.hierarchy.machine import BATCH_BYTES, Hierarchy
from kvstore.messages import StoreEndpoints
from kvstore.net import unix_sockets as sockets
from kvstore.net.addresses import host_port, unix_path
from kvstore.net.host import host_id
from kvstore.net.reflection import V1 as REFLECTION_V1
from kvstore.net.reflection import v1_handler as reflection_v1_handler
from kvstore.net.socket_guard import SocketGuard
from kvstore.pool.machine import BlockMachine
from kvstore.pool.quotas import TenantQuotas
from kvstore.protocol.decoding import DecodingInterceptor
from kvstore.protocol.framed_call_server import FramedCallServer
from kvstore.protocol.wire import MAX_MESSAGE_BYTES
from kvstore.security.certificates import CertificateFiles, CertificateWatch
from kvstore.security.channels import LoadedCredentials, load
from kvstore.security.metrics_access import MetricsGuard
from kvstore.security.tls_diagnosis import fault_of_own
from kvstore.service.backing_tiers import BackingTiers
from kvstore.service.block_store import BlockStoreService, NodeIdentity
from kvstore.service.call_traces import CallTraces
from kvstore.service.metrics import NodeMetrics, NodeSnapshot
from kvstore.service.metrics_server import MetricsServer, metrics_certificates
from kvstore.service.settings import NixlUse, StoreSettings
from kvstore.service.transfer_executor import TransferExecutor
from kvstore.system_clock import MonotonicClock, unix_nanoseconds
from kvstore.tiers.shared_memory import SharedMemoryTier
from kvstore.tracing.exporter import TraceExporter, open_trace_exporter
from kvstore.tracing.metrics import ExportMetrics
from kvstore.tracing.spans import SpanIds
from kvstore.transports.nixl_node import NixlNode, has_fabric
from kvstore.transports.shared_memory import MemoryHandout
from kvstore.transports.tcp_server import DataPlaneServer
from kvstore.v1 import blocks_pb2
from kvstore.v1 import blocks_pb2_grpc as pb_grpc

TICK_SECONDS = 0.25  # seconds between two runs of the periodic work, such as ending leases whose deadline has passed
BATCHES_A_POOL = 16
"""A transfer copies at most the size of the pool divided by this number, or one block. So transfers leave most of a
small pool to clients."""
SNAPSHOT_SECONDS = (
    2.0  # A scrape, in its own thread, waits this long for the event loop to make the snapshot; then the scrape fails.
)
GRACE_SECONDS = 0.5  # time for calls in progress to end when the node stops; then they are cancelled
MIN_PING_MS = 1000
"""Minimum time between two pings of a quiet connection; the connection of a client that pings more often is closed.
Routers ping every 4.5 s to notice a hanging node, and on a busy machine two pings may be read shortly after each other.
gRPC's default limit is 5 minutes."""

HANDSHAKE_MS = 5000
"""Time after which a connection of the control plane is cut if its handshake has not ended. gRPC's default of 2 minutes
would let callers without credentials hold many file descriptors.
"""

SERVICE = blocks_pb2.DESCRIPTOR.services_by_name["BlockStore"].full_name

Result = TypeVar("Result")

log = logging.getLogger(__name__)


async def serve(
    settings: StoreSettings, on_ready: Callable[[StoreEndpoints], None], *, clock: Clock | None = None
) -> None:
    """Run a node until the caller cancels it; then free its memory and remove its socket files.

    `on_ready` is called once, when the node listens at all addresses. Raise StoreNotStarted if the settings cannot be
    used on this machine.
    """
    async with open_node(settings, clock or MonotonicClock()) as endpoints:
        log.info("store node ready", extra={"store": settings.store_id, "listen": endpoints.listen})
        on_ready(endpoints)
        await asyncio.get_running_loop().create_future()


@contextlib.asynccontextmanager
async def open_node(settings: StoreSettings, clock: Clock) -> AsyncIterator[StoreEndpoints]:
    """Run a node while the context is open; yield its addresses. Raise StoreNotStarted as `serve` does."""
    incarnation = uuid.uuid4().hex
    access = load(settings.credentials)
    access.require(settings.listen, settings.data_listen)
    try:
        scraped = metrics_certificates(settings.metrics_tls)
    except BadCredentials as error:
        raise StoreNotStarted(str(error)) from error
    watch = CertificateWatch.of({"credentials": settings.credentials}, [] if scraped is None else [scraped])
    if fault := fault_of_own(settings.credentials):
        log.warning("clients will not accept this node's certificate", extra={"cause": fault})
    async with contextlib.AsyncExitStack() as stack:
        opened = stack.enter_context(contextlib.ExitStack())
        given_up = threading.Event()

        def take_memory() -> SharedMemoryTier:
            taken = SharedMemoryTier(settings.capacity_bytes, settings.huge_pages, clock, given_up)
            return opened.enter_context(contextlib.closing(taken))

        tier = await _in_thread(take_memory, given_up.set)
        savings = HitSavings(
            seconds_a_token=1 / settings.prefill_tokens_per_second,
            memory_bytes_a_second=settings.memory_bytes_per_second,
        )
        machine = BlockMachine(
            tier.capacity_bytes,
            policy(settings.eviction, savings.saving),
            epoch=1 + secrets.randbelow((1 << 31) - 1),
            table_key=(secrets.randbits(64), secrets.randbits(64)),
            max_leases=settings.max_leases,
            max_namespaces=settings.max_namespaces,
            max_held_bytes=int(tier.capacity_bytes * settings.max_held_share),
            quotas=TenantQuotas(
                lambda _: policy(settings.eviction, savings.saving),
                default_bytes=settings.tenant_quota_bytes,
                by_tenant={bytes.fromhex(salt): quota for salt, quota in settings.tenant_quotas.items()},
            ),
        )
        plane = DataPlaneServer(machine, tier, clock, access.data_key)
        stack.callback(plane.close)
        data_address = ""
        if settings.data_listen:
            data_address = await plane.listen(*host_port(settings.data_listen))
        listener, shm_socket = None, ""
        if settings.shm_socket:
            shm_socket = _absolute(settings.shm_socket)
            listener = sockets.listen("shm_socket", shm_socket)
            stack.callback(listener.close)
            # The path is removed before the listener is closed: while it listens, no other process puts its own socket
            # at the path.
            stack.callback(sockets.remove, shm_socket, sockets.identity(shm_socket))
        identity = NodeIdentity(
            store_id=settings.store_id,
            incarnation=incarnation,
            host_id=host_id(),
            shm_socket=shm_socket,
            data_address=data_address,
        )
        backing = await _in_thread(
            lambda: BackingTiers.open(settings.tiers, machine.namespace, settings.credentials, clock, opened)
        )
        hierarchy = Hierarchy(machine, backing.rules, min(BATCH_BYTES, tier.capacity_bytes // BATCHES_A_POOL))
        savings.attach(machine.namespace, hierarchy.promotion_seconds)
        nixl = NixlNode(tier)
        stack.push_async_callback(nixl.stop)
        offers_nixl = settings.nixl is NixlUse.REQUIRE or (settings.nixl is NixlUse.AUTO and has_fabric())
        if offers_nixl:
            await _start(nixl, settings.nixl)
        exporter = stack.enter_context(_trace_exporter(settings))
        traces = None if exporter is None else _call_traces(settings, exporter, clock)
        service = BlockStoreService(
            settings, identity, machine, tier, hierarchy, savings, backing, lambda: nixl.offer, clock, traces
        )
        callers, guard = FramedCallServer(service.framed_calls), DecodingInterceptor()
        stack.callback(callers.close)

        def look() -> NodeSnapshot:
            return replace(
                service.snapshot(),
                undecodable=guard.refused + callers.undecodable,
                unproven=plane.refused,
                crowded_out=plane.crowded_out,
            )

        tasks = await stack.enter_async_context(_tasks())
        metrics = NodeMetrics(CollectorRegistry(), _snapshots(look))
        executor = TransferExecutor(hierarchy, backing.tiers, tier, clock, tasks, service.settle, metrics.moved)
        stack.callback(executor.close)
        service.attach(executor)
        metrics.registry.register(watch)
        if exporter is not None:
            metrics.registry.register(ExportMetrics(exporter))
        stack.callback(tasks.create_task(watch.run()).cancel)
        if settings.metrics_listen:
            _serve_metrics(settings, metrics.registry, scraped, stack)
        listen = await stack.enter_async_context(_control_plane(settings.listen, service, access, guard, tasks))
        stack.callback(tasks.create_task(_tick_forever(service, plane, callers, clock)).cancel)
        if offers_nixl:
            stack.callback(tasks.create_task(nixl.run()).cancel)
        if listener is not None:
            handout = MemoryHandout(listener, tier, lambda digest: _knows(machine, digest), callers.take)
            stack.callback(tasks.create_task(handout.run()).cancel)
        yield StoreEndpoints(
            store_id=settings.store_id,
            incarnation=incarnation,
            listen=listen,
            shm_socket=shm_socket,
            data_address=data_address,
        )


def _trace_exporter(settings: StoreSettings) -> contextlib.AbstractContextManager[TraceExporter | None]:
    """Return a context that opens the exporter of this node's traces. It yields None if tracing is off."""
    if not settings.tracing.is_on:
        return contextlib.nullcontext()
    return open_trace_exporter(settings.tracing, "fleet-kvstore", settings.store_id, "")


def _call_traces(settings: StoreSettings, exporter: TraceExporter, clock: Clock) -> CallTraces:
    return CallTraces(settings.store_id, exporter, clock, unix_nanoseconds, SpanIds(secrets.randbits(128)))


async def _in_thread(act: Callable[[], Result], give_up: Callable[[], None] = lambda: None) -> Result:
    """Call `act` in a thread and return its result.

    If the caller is cancelled, call `give_up`, which may make `act` end earlier, and wait until `act` has ended. The
    caller can therefore close everything that `act` has opened.
    """
    calling = asyncio.get_running_loop().run_in_executor(None, act)
    try:
        return await asyncio.shield(calling)
    except asyncio.CancelledError:
        give_up()
        await asyncio.wait([calling])
        calling.exception()  # marks the exception as retrieved, because the cancelled caller cannot get it
        raise


def _snapshots(look: Callable[[], NodeSnapshot]) -> Callable[[], NodeSnapshot]:
    """Return a function for other threads. It calls `look` on the event loop and returns the snapshot.

    The function raises TimeoutError if the event loop does not answer within `SNAPSHOT_SECONDS`.
    """
    loop = asyncio.get_running_loop()

    async def take() -> NodeSnapshot:
        return look()

    return lambda: asyncio.run_coroutine_threadsafe(take(), loop).result(SNAPSHOT_SECONDS)


def _serve_metrics(
    settings: StoreSettings,
    registry: CollectorRegistry,
    certificates: CertificateFiles | None,
    stack: contextlib.AsyncExitStack,
) -> None:
    address = settings.metrics_listen
    host, port = host_port(address)
    try:
        server = MetricsServer.open(
            host, port, registry, MetricsGuard.of(settings.metrics_access, address), certificates
        )
    except OSError as error:
        raise StoreNotStarted(f"metrics_listen: {address} cannot be bound: {error.strerror or error}") from error
    stack.push_async_callback(asyncio.to_thread, server.close)


@contextlib.asynccontextmanager
async def _tasks() -> AsyncIterator[asyncio.TaskGroup]:
    """Open a task group. If exactly one task fails, raise its exception instead of an exception group.

    Callers can therefore see from the type of the exception why a node did not start.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        if len(group.exceptions) > 1:
            raise
        raise group.exceptions[0] from None


@contextlib.asynccontextmanager
async def _control_plane(
    addresses: tuple[str, ...],
    service: BlockStoreService,
    access: LoadedCredentials,
    guard: DecodingInterceptor,
    tasks: asyncio.TaskGroup,
) -> AsyncIterator[tuple[str, ...]]:
    sockets_guard = SocketGuard()
    server = grpc.aio.server(
        interceptors=[*access.interceptors(), guard, sockets_guard],
        options=[
            # Without this option, two nodes could listen on one port, and each would get half of the calls.
            ("grpc.so_reuseport", 0),
            ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_MS),
            ("grpc.keepalive_permit_without_calls", 1),  # without this, the third ping without a call ends a connection
            ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ],
    )
    pb_grpc.add_BlockStoreServicer_to_server(service, server)
    healthy = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME, REFLECTION_V1)
    reflection.enable_server_reflection(names, server)
    server.add_generic_rpc_handlers((reflection_v1_handler(names),))
    async with contextlib.AsyncExitStack() as stack:
        bound = []
        for index, address in enumerate(addresses):
            bound.append(_bind(server, f"listen[{index}]", address, access))
            if path := unix_path(address):
                os.chmod(path, 0o600)  # noqa: PTH101 - this call does not block
                # gRPC usually removes the socket file itself. A file that still exists may belong to the next process,
                # so `remove` first compares its identity.
                stack.callback(sockets.remove, path, sockets.identity(path))
        await server.start()
        stack.push_async_callback(server.stop, GRACE_SECONDS)
        for address in bound:
            if not unix_path(address):
                stack.callback(tasks.create_task(sockets_guard.run(host_port(address)[1])).cancel)
        stack.push_async_callback(healthy.enter_graceful_shutdown)
        for name in ("", SERVICE):
            await healthy.set(name, health_pb2.HealthCheckResponse.SERVING)
        yield tuple(bound)


async def _start(nixl: NixlNode, use: NixlUse) -> None:
    try:
        await nixl.start()
    except StoreNotStarted as error:
        if use is NixlUse.REQUIRE:
            raise
        log.warning("nixl not started", extra={"reason": str(error)})  # the start is tried again periodically


def _bind(server: grpc.aio.Server, field: str, address: str, access: LoadedCredentials) -> str:
    path = unix_path(address)
    with sockets.folder_lock(field, path) if path else contextlib.nullcontext():
        if path:
            sockets.clear_path(field, path)  # without this check, gRPC would replace even a socket in use
        try:
            port = access.bind(server, address)
        except RuntimeError as error:
            raise StoreNotStarted(f"{field}: {address} cannot be bound; is it in use?") from error
    if path:
        return address
    return f"{address.rpartition(':')[0]}:{port}"


async def _tick_forever(
    service: BlockStoreService, plane: DataPlaneServer, callers: FramedCallServer, clock: Clock
) -> None:
    while True:
        await asyncio.sleep(TICK_SECONDS)
        service.tick()
        plane.cut_stalled(clock.now())
        callers.cut_stalled(clock.now())


def _absolute(path: str) -> str:
    """Return an absolute path, because clients may run in another folder."""
    return str(Path(path).absolute())


def _knows(machine: BlockMachine, digest: bytes) -> bool:
    try:
        machine.namespace(digest)
    except NamespaceUnknown:
        return False
    return True
