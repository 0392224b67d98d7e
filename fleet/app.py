"""Composition roots: one function for each process, the only place that knows everything.

Each announces its endpoints when it is ready, serves until it is asked to stop (SIGTERM, SIGINT), drains, and returns.
"""

import asyncio
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import uvloop

from fleet.adapters.clock import SystemClock
from fleet.clock import MILLISECOND, SECOND, Nanos
from fleet.config import load
from fleet.errors import ConfigurationRefused
from fleet.ids import Incarnation, ModelName
from fleet.router.settings import OpenAiWorkerSettings, RouterSettings
from fleet.telemetry import configure_logging
from kvstore.errors import LayoutMismatch, StoreUnreachable
from kvstore.settings import StoreSettings
from workers.ports import Engine, EngineDied, EngineFacts
from workers.settings import WorkerSettings

if TYPE_CHECKING:
    from grpc.aio import Server
    from prometheus_client import CollectorRegistry

    from fleet.adapters.kserve_frontend import KserveFrontend
    from fleet.adapters.openai_workers import OpenAiWorkers
    from fleet.adapters.redis_tenants import RedisTenants
    from fleet.adapters.relay import Relay
    from fleet.router.generation import Generation
    from fleet.router.ports import TextCodec
    from fleet.router.server import RouterServer
    from fleet.router.tenants import Tenants
    from workers.registration import Registration
    from workers.store_holds import StoreHolds

Announce = Callable[[Mapping[str, str]], None]
"""Told the endpoints by protocol, once, when everything is ready."""

Part = str
"""router, worker or kvstore"""

DRAIN_WITHIN = Nanos(10 * SECOND)  # for answers that are being streamed when the router is asked to stop


def serve(part: Part, config: Path, announce: Announce) -> None:
    """Run one process of a cluster until it is asked to stop.

    Raises:
        ConfigurationRefused: The settings cannot be obeyed; nothing is left running.
        EngineDied: The engine of a worker ended by itself.
        StoreUnreachable: A worker's store node does not answer.
    """
    running = _PARTS[part](config, announce)
    configure_logging()
    try:
        uvloop.run(running)
    except BaseExceptionGroup as group:
        raise _foremost(group) from group


def _foremost(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What a task group wrapped, where it is one of the expected ends of a process; else the group."""
    expected = group.subgroup((ConfigurationRefused, EngineDied, StoreUnreachable))
    while expected is not None:
        first = expected.exceptions[0]
        if not isinstance(first, BaseExceptionGroup):
            return first
        expected = first
    return group


async def run_router(settings: RouterSettings, announce: Announce) -> None:
    """The fronts, the router behind them, and the registry where workers announce themselves.

    Raises:
        ConfigurationRefused: An address is in use, or a model folder is not one.
    """
    from prometheus_client import CollectorRegistry  # noqa: PLC0415 - each process loads its own part only

    from fleet.adapters.grpc_frontend import open_grpc_frontend  # noqa: PLC0415
    from fleet.adapters.grpc_registry import SERVICE, GrpcRegistry  # noqa: PLC0415
    from fleet.adapters.grpc_selection import SERVICE as SELECTION  # noqa: PLC0415
    from fleet.adapters.grpc_selection import SelectingWorkers, SelectionService  # noqa: PLC0415
    from fleet.adapters.http_frontend import open_http_frontend  # noqa: PLC0415
    from fleet.adapters.http_messages import HttpSettings  # noqa: PLC0415
    from fleet.adapters.openai_workers import MixedWorkers, OpenAiWorkers  # noqa: PLC0415
    from fleet.adapters.replicas import Replicas  # noqa: PLC0415
    from fleet.adapters.router_metrics import RouterMetrics  # noqa: PLC0415
    from fleet.adapters.router_policies import open_policy  # noqa: PLC0415
    from fleet.adapters.text_codec import load_codec  # noqa: PLC0415
    from fleet.adapters.worker_streams import WorkerStreams  # noqa: PLC0415
    from fleet.control.server import RegistryServer  # noqa: PLC0415
    from fleet.control.settings import ControlSettings  # noqa: PLC0415
    from fleet.router.generation import Generation  # noqa: PLC0415
    from fleet.router.machine import RouterMachine  # noqa: PLC0415
    from fleet.router.server import RouterServer  # noqa: PLC0415
    from fleet.router.tenants import Tenants  # noqa: PLC0415
    from fleet.telemetry import Metrics  # noqa: PLC0415
    from fleet.v1.control_pb2_grpc import add_RegistryServicer_to_server  # noqa: PLC0415

    clock = SystemClock()
    metrics = Metrics(CollectorRegistry())
    members = RegistryServer(ControlSettings(), clock)
    codecs = {model: load_codec(folder) for model, folder in settings.models.items()}
    own_workers = WorkerStreams(settings, members.membership())
    foreign = OpenAiWorkers(settings.openai_workers, settings.connect_timeout_seconds, clock)
    workers = MixedWorkers(own_workers, foreign)
    selecting = SelectingWorkers(workers)
    machine = RouterMachine(settings, Random(secrets.randbits(64)), open_policy(settings))
    router = RouterServer(machine, selecting, clock)
    selection = SelectionService(router, selecting, tenant_secret=settings.tenant_secret.encode())
    tenants = Tenants(settings.tenants, clock.now())
    generation = Generation(
        router,
        codecs,
        clock=clock,
        tenants=tenants,
        tenant_secret=settings.tenant_secret.encode(),
        metrics=metrics,
    )
    shared_limits = _shared_limits(settings.tenants_redis, tenants, clock) if settings.tenants_redis else None
    relay = None
    if settings.openai_workers:
        relay = _relay(settings, router, foreign, tenants, metrics.registry, clock)
    metrics.registry.register(RouterMetrics(router.status))
    replicas = Replicas(settings, router, members) if settings.replicas_listen else None
    registry = GrpcRegistry(members, replicas)
    services: dict[str, Callable[[Server], None]] = {
        SERVICE: partial(add_RegistryServicer_to_server, registry),
        SELECTION: selection.add,
    }
    async with (
        _stop_requested() as stop,
        asyncio.TaskGroup() as tasks,
        open_http_frontend(
            settings.http_listen,
            HttpSettings(),
            generation,
            metrics.registry,
            clock,
            relay,
            shared=settings.share_ports,
        ) as http,
        open_grpc_frontend(
            settings.grpc_listen,
            generation,
            router,
            clock,
            store=settings.store,
            shared=settings.share_ports,
            control_listen=settings.control_listen,
            services=services,
        ) as grpc,
        _kserve(settings, generation, clock) as kserve,
    ):
        heard = workers.only_acceptable(router.hear)
        parts = [members.run(), router.run(), own_workers.run(heard), foreign.run(router.hear)]
        if shared_limits is not None:
            parts.append(shared_limits.run())
        if replicas is not None:
            parts.append(replicas.run())
        running = [tasks.create_task(part) for part in parts]
        endpoints = {"http": http.address, "grpc": grpc.address}
        if grpc.control:
            endpoints["control"] = grpc.control
        if kserve is not None:
            endpoints["kserve"] = kserve.address
        announce(endpoints)
        await stop.wait()
        grpc.drain()
        selection.drain()
        if kserve is not None:
            kserve.drain()
        async with asyncio.TaskGroup() as draining:
            draining.create_task(http.drain(DRAIN_WITHIN / SECOND))
            draining.create_task(router.drain(DRAIN_WITHIN))
        for task in running:
            task.cancel()
    generation.close()
    if relay is not None:
        relay.close()


@asynccontextmanager
async def _kserve(
    settings: RouterSettings, generation: "Generation", clock: SystemClock
) -> AsyncIterator["KserveFrontend | None"]:
    """The front of the Open Inference Protocol; None where there is to be none.

    Raises:
        ConfigurationRefused: Its address is in use.
    """
    if not settings.kserve_listen:
        yield None
        return
    from fleet.adapters.kserve_frontend import open_kserve_frontend  # noqa: PLC0415 - most routers have none

    async with open_kserve_frontend(settings.kserve_listen, generation, clock, shared=settings.share_ports) as frontend:
        yield frontend


def _shared_limits(url: str, tenants: "Tenants", clock: SystemClock) -> "RedisTenants":
    """What keeps the limits of this router in step with the others'.

    Raises:
        ConfigurationRefused: The URL is none of Redis, or the client library is not installed.
    """
    try:
        from fleet.adapters.redis_tenants import RedisTenants  # noqa: PLC0415 - optional

        return RedisTenants(url, tenants, clock)
    except ImportError as error:
        raise ConfigurationRefused(
            "tenants_redis: needs the package redis: pip install 'fleet-serving[redis]'"
        ) from error
    except ValueError as error:
        raise ConfigurationRefused(f"tenants_redis: {error}") from error


def _relay(
    settings: RouterSettings,
    router: "RouterServer",
    workers: "OpenAiWorkers",
    tenants: "Tenants",
    registry: "CollectorRegistry",
    clock: SystemClock,
) -> "Relay":
    """What serves the models of foreign servers.

    Raises:
        ConfigurationRefused: A `tokenizer` is not a model folder.
    """
    from fleet.adapters.prompt_keys import PromptReader  # noqa: PLC0415
    from fleet.adapters.relay import Relay  # noqa: PLC0415
    from fleet.adapters.relay_metrics import RelayMetrics  # noqa: PLC0415

    by_model: dict[ModelName, list[OpenAiWorkerSettings]] = {}
    for index, worker in enumerate(settings.openai_workers):
        if worker.kv_events and find_spec("zmq") is None:
            raise ConfigurationRefused(f"openai_workers[{index}].kv_events: needs the package pyzmq; install it")
        by_model.setdefault(ModelName(worker.model), []).append(worker)
    readers = {
        model: PromptReader(
            model,
            [each.compared_tokens for each in alike],
            _codec(alike[0]),
            clock,
            named_by_workers=bool(alike[0].kv_events),
        )
        for model, alike in by_model.items()
    }
    metrics = RelayMetrics(
        lambda: [("fleet_cache_knowledge", "Foreign workers by how their caches are known", "by", workers.knowledge())]
    )
    registry.register(metrics)
    return Relay(
        router, workers, readers, tenants, metrics, clock, id_prefix=secrets.token_hex(4), only=not settings.models
    )


def _codec(worker: OpenAiWorkerSettings) -> "TextCodec | None":
    from fleet.adapters.text_codec import load_codec  # noqa: PLC0415

    if not worker.tokenizer:
        return None
    try:
        return load_codec(worker.tokenizer)
    except ConfigurationRefused as error:
        raise ConfigurationRefused(f"tokenizer of {worker.worker_id} in openai_workers: {error}") from error


async def run_kvstore(settings: StoreSettings, announce: Announce) -> None:
    """A node of the KV store.

    Raises:
        ConfigurationRefused: An address is in use, or there is too little memory.
    """
    from kvstore.errors import StoreNotStarted  # noqa: PLC0415 - each process loads its own part only
    from kvstore.monotonic import MonotonicClock  # noqa: PLC0415
    from kvstore.server import open_node  # noqa: PLC0415

    try:
        async with _stop_requested() as stop, open_node(settings, MonotonicClock()) as endpoints:
            announce({"grpc": endpoints.listen[0], "data": endpoints.data_address})
            await stop.wait()
    except StoreNotStarted as error:
        raise ConfigurationRefused(str(error)) from error


async def run_worker(settings: WorkerSettings, announce: Announce) -> None:
    """One engine and the service around it.

    Raises:
        ConfigurationRefused: The engine is unknown or refuses its settings, or the address cannot be listened on.
        EngineDied: The engine ended by itself.
        StoreUnreachable: The store node does not answer.
    """
    from fleet.adapters.grpc_registry import GrpcRegistryClient  # noqa: PLC0415 - each process loads its own part only
    from fleet.adapters.grpc_worker import serve_control  # noqa: PLC0415
    from fleet.adapters.router_streams import serve_routers  # noqa: PLC0415
    from fleet.adapters.stream_tls import of_worker  # noqa: PLC0415
    from workers.registration import Registration  # noqa: PLC0415
    from workers.server import WorkerServer  # noqa: PLC0415

    tls = of_worker("credentials", settings.credentials)
    incarnation = Incarnation(secrets.token_hex(8))
    async with AsyncExitStack() as held:
        try:
            engine = await held.enter_async_context(_open_engine(settings))
            keeper = await held.enter_async_context(_holds(settings, engine.facts))
        except LayoutMismatch as error:
            raise ConfigurationRefused(f"{error.field}: {error}") from error
        worker = WorkerServer(settings, engine, SystemClock(), incarnation, keeper=keeper)
        listening = await held.enter_async_context(serve_routers(worker, settings.listen, tls))
        endpoints = {"stream": listening}
        if settings.control_listen:
            endpoints["grpc"] = await held.enter_async_context(serve_control(worker, settings.control_listen))
        if settings.registry:
            registration = Registration(
                registry=await held.enter_async_context(GrpcRegistryClient(settings.registry)),
                worker_id=settings.worker_id,
                incarnation=incarnation,
                address=settings.advertise or listening,
            )
            await held.enter_async_context(_registered(registration))
        async with asyncio.TaskGroup() as tasks, _stop_requested() as stop:
            serving = tasks.create_task(worker.run())  # ends with a drain, by whomever, or with the engine
            serving.add_done_callback(lambda _: stop.set())
            announce(endpoints)
            await stop.wait()
            await worker.drain(Nanos(settings.drain_timeout_ms * MILLISECOND))


@asynccontextmanager
async def _holds(settings: WorkerSettings, facts: EngineFacts) -> AsyncIterator["StoreHolds | None"]:
    """What keeps the chains of sessions that wait; None where there is no store, or it is not to."""
    from workers.store_holds import open_store_holds  # noqa: PLC0415 - each process loads its own part only

    if facts.store_id is None or facts.kv is None or not settings.hold_seconds:
        yield None
        return
    async with open_store_holds(settings.store, facts.kv, settings.store_credentials) as holds:
        yield holds


def _open_engine(settings: WorkerSettings) -> AbstractAsyncContextManager[Engine]:
    found = entry_points(group="workers.engines", name=settings.engine)
    if not found:
        known = ", ".join(sorted(entry_points(group="workers.engines").names))
        raise ConfigurationRefused(f"engine: {settings.engine!r} is not installed; there is: {known}")
    open_engine: Callable[[WorkerSettings], AbstractAsyncContextManager[Engine]] = next(iter(found)).load()
    return open_engine(settings)


@asynccontextmanager
async def _registered(registration: "Registration") -> AsyncIterator[None]:
    """Stay registered while the context is open."""
    async with asyncio.TaskGroup() as tasks:
        renewing = tasks.create_task(registration.run())
        try:
            yield
        finally:
            renewing.cancel()
            await registration.leave()


@asynccontextmanager
async def _stop_requested() -> AsyncIterator[asyncio.Event]:
    """An event that SIGTERM and SIGINT set; another signal after that ends the process as if nobody listened."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    numbers = (signal.SIGTERM, signal.SIGINT)

    def ask() -> None:
        stop.set()
        for number in numbers:
            loop.remove_signal_handler(number)

    for number in numbers:
        loop.add_signal_handler(number, ask)
    try:
        yield stop
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


_PARTS: Mapping[Part, Callable[[Path, Announce], Coroutine[Any, Any, None]]] = {
    "router": lambda config, announce: run_router(load(config, RouterSettings), announce),
    "worker": lambda config, announce: run_worker(load(config, WorkerSettings), announce),
    "kvstore": lambda config, announce: run_kvstore(load(config, StoreSettings), announce),
}
