"""Composition roots: one function for each process, the only place that knows everything.

Each announces its endpoints when it is ready, serves until it is asked to stop (SIGTERM, SIGINT), drains, and returns.
"""

import asyncio
import gc
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import uvloop
from msgspec import Struct, structs

from fleet.adapters.clock import SystemClock, utc_now
from fleet.clock import MILLISECOND, SECOND, Nanos
from fleet.config import load
from fleet.errors import ConfigurationRefused
from fleet.ids import Incarnation, ModelName
from fleet.router.settings import OpenAiWorkerSettings, RouterSettings
from fleet.telemetry import configure_logging
from kvstore.errors import LayoutMismatch, NodeEnded, StoreUnreachable
from kvstore.settings import StoreSettings
from operators.settings import OperatorSettings
from workers.groups import common_of
from workers.machine import GRACE
from workers.ports import Engine, EngineDied, EngineFacts
from workers.settings import GroupSettings, WorkerSettings

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from fleet.adapters.endpoint_picker import EndpointPicker, Standing
    from fleet.adapters.expected_workers import LiveExpectations
    from fleet.adapters.flight_recorder import FlightRecorder
    from fleet.adapters.grpc_frontend import GrpcFrontend
    from fleet.adapters.grpc_selection import SelectionService
    from fleet.adapters.http_frontend import HttpFrontend
    from fleet.adapters.kserve_frontend import KserveFrontend
    from fleet.adapters.openai_workers import MixedWorkers, OpenAiWorkers
    from fleet.adapters.redis_tenants import RedisTenants
    from fleet.adapters.relay import Relay
    from fleet.adapters.replicas import Replicas
    from fleet.adapters.worker_groups import Lead
    from fleet.adapters.worker_streams import WorkerStreams
    from fleet.control.ports import Directory
    from fleet.control.server import RegistryServer
    from fleet.router.generation import Generation
    from fleet.router.machine import RouterMachine
    from fleet.router.picker_settings import EndpointPickerSettings
    from fleet.router.ports import TextCodec
    from fleet.router.server import RouterServer
    from fleet.router.tenants import Tenants
    from fleet.router.tokenising import TokenisingThreads
    from fleet.telemetry import Metrics
    from workers.evacuation import StoreEvacuator
    from workers.ports import Registry
    from workers.store_holds import StoreHoldKeeper

Announce = Callable[[Mapping[str, str]], None]
"""Told the endpoints by protocol, once, when everything is ready."""

Part = str
"""router, worker, kvstore or operator"""

COLLECTED_AT_ONCE = 5_000  # new objects, a millisecond or two; with Python's 700 a router spends 5 % on collections


def serve(part: Part, config: Path, announce: Announce, changes: Mapping[str, Any] | None = None) -> None:
    """Run one process of a cluster until it is asked to stop.

    Args:
        part: Which.
        config: Its settings.
        announce: Told when it is ready.
        changes: Settings in place of the file's, by path.

    Raises:
        ConfigurationRefused: The settings cannot be obeyed; nothing is left running.
        EngineDied: The engine of a worker ended by itself.
        NodeEnded: The store node in a worker's process did.
        StoreUnreachable: A worker's store node does not answer.
    """
    running = _PARTS[part](config, announce, changes)
    configure_logging()
    try:
        uvloop.run(running)
    except BaseExceptionGroup as group:
        raise _foremost(group) from group


def _foremost(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What a task group wrapped, where it is one of the expected ends of a process; else the group."""
    expected = group.subgroup((ConfigurationRefused, EngineDied, NodeEnded, StoreUnreachable))
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
    parts = _parts_of_router(settings)
    with parts.recorder or nullcontext():
        await _route(settings, parts, announce)


async def _route(settings: RouterSettings, parts: "_RouterParts", announce: Announce) -> None:
    """Serve until asked to stop."""
    async with (
        _stop_requested() as stop,
        _directory(settings) as directory,
        asyncio.TaskGroup() as tasks,
        _fronts(settings, parts) as fronts,
    ):
        running = [tasks.create_task(each) for each in parts.loops()]
        if directory is not None:
            running.append(tasks.create_task(parts.members.follow(directory)))
        announce(fronts.endpoints())
        gc.freeze()  # what is there by now stays: no collection has to look at it
        gc.set_threshold(COLLECTED_AT_ONCE)
        await stop.wait()
        parts.selection.drain()
        within = Nanos(settings.drain_timeout_ms * MILLISECOND)
        async with asyncio.TaskGroup() as draining:
            fronts.drain(draining, within)
            draining.create_task(parts.router.drain(within))
        for task in running:
            task.cancel()
    parts.threads.close()


@asynccontextmanager
async def _directory(settings: RouterSettings) -> "AsyncIterator[Directory | None]":
    """Where workers are found besides those that register here; None: nowhere.

    Raises:
        ConfigurationRefused: It needs what is not installed, or is not there.
    """
    if settings.discovery is None:
        yield None
        return
    from fleet.adapters.discovery import directory_of  # noqa: PLC0415 - most routers have none

    async with directory_of(settings.discovery) as directory:
        yield directory


class _RouterParts(Struct, frozen=True, kw_only=True):
    """What a router process has behind its fronts."""

    clock: SystemClock
    metrics: "Metrics"
    tenants: "Tenants"
    members: "RegistryServer"
    own_workers: "WorkerStreams"
    foreign_workers: "OpenAiWorkers"
    workers: "MixedWorkers"
    router: "RouterServer"
    recorder: "FlightRecorder | None"
    selection: "SelectionService"
    generation: "Generation"
    threads: "TokenisingThreads"
    relay: "Relay | None"
    replicas: "Replicas | None"
    limits: "RedisTenants | None"

    def loops(self) -> list[Coroutine[Any, Any, Any]]:
        """What runs as long as the process serves."""
        own = self.own_workers.run(self.workers.only_acceptable(self.router.hear))
        loops = [self.members.run(), self.router.run(), own, self.foreign_workers.run(self.router.hear)]
        if self.limits is not None:
            loops.append(self.limits.run())
        if self.replicas is not None:
            loops.append(self.replicas.run())
        return loops


def _parts_of_router(settings: RouterSettings) -> _RouterParts:
    """Made and put together; nothing runs yet.

    Raises:
        ConfigurationRefused: A model folder is not one, or the settings name what is not installed.
    """
    from prometheus_client import CollectorRegistry, generate_latest  # noqa: PLC0415 - each process loads its own part only

    from fleet.adapters.golden import GoldenCheck  # noqa: PLC0415
    from fleet.adapters.grpc_selection import SelectingWorkers, SelectionService  # noqa: PLC0415
    from fleet.adapters.openai_workers import MixedWorkers, OpenAiWorkers  # noqa: PLC0415
    from fleet.adapters.replicas import Replicas  # noqa: PLC0415
    from fleet.adapters.router_metrics import RouterMetrics  # noqa: PLC0415
    from fleet.adapters.tenant_metrics import TenantMetrics  # noqa: PLC0415
    from fleet.adapters.text_codec import load_codec  # noqa: PLC0415
    from fleet.adapters.worker_streams import WorkerStreams  # noqa: PLC0415
    from fleet.control.server import RegistryServer  # noqa: PLC0415
    from fleet.control.settings import ControlSettings  # noqa: PLC0415
    from fleet.router.generation import Generation  # noqa: PLC0415
    from fleet.router.server import RouterServer  # noqa: PLC0415
    from fleet.router.tenants import Tenants  # noqa: PLC0415
    from fleet.router.tokenising import TokenisingThreads  # noqa: PLC0415
    from fleet.telemetry import Metrics  # noqa: PLC0415

    clock = SystemClock()
    metrics = Metrics(CollectorRegistry())
    tenants = Tenants(settings.tenants, clock.now())
    metrics.registry.register(TenantMetrics(tenants.usage))
    tenant_secret = settings.tenant_secret.encode()
    threads = TokenisingThreads()

    members = RegistryServer(ControlSettings(), clock)
    own_workers = WorkerStreams(settings, members.membership())
    foreign_codecs = _foreign_codecs(settings)
    foreign_workers = OpenAiWorkers(settings.openai_workers, settings.connect_timeout_seconds, clock, foreign_codecs)
    codecs = {model: load_codec(folder) for model, folder in settings.models.items()}
    golden = GoldenCheck(codecs)
    workers = MixedWorkers(own_workers, foreign_workers, golden)
    selecting = SelectingWorkers(workers)

    expectations = _expectations(settings)
    machine, recorder = _machine(settings, clock, expectations)
    if expectations is not None:
        expectations.machine = machine
        metrics.registry.register(expectations)
    router = RouterServer(machine, selecting, clock)
    metrics.registry.register(
        RouterMetrics(router.status, tasks=lambda: len(asyncio.all_tasks()), refused=golden.refused)
    )
    generation = Generation(
        router,
        codecs,
        clock=clock,
        tenants=tenants,
        tenant_secret=tenant_secret,
        metrics=metrics,
        threads=threads,
    )
    relay = None
    if settings.openai_workers:
        relay = _relay(settings, router, foreign_workers, foreign_codecs, tenants, metrics.registry, clock, threads)
    limits = None
    if settings.tenants_redis:
        limits = _shared_limits(settings.tenants_redis, tenants, clock)
        metrics.registry.register(limits)
    return _RouterParts(
        clock=clock,
        metrics=metrics,
        tenants=tenants,
        members=members,
        own_workers=own_workers,
        foreign_workers=foreign_workers,
        workers=workers,
        router=router,
        recorder=recorder,
        selection=SelectionService(router, selecting, tenant_secret=tenant_secret),
        generation=generation,
        threads=threads,
        relay=relay,
        replicas=Replicas(settings, router, members, lambda: generate_latest(metrics.registry).decode())
        if settings.replicas_listen
        else None,
        limits=limits,
    )


def _expectations(settings: RouterSettings) -> "LiveExpectations | None":
    """Who predicts what workers do; None: nobody.

    Raises:
        ConfigurationRefused: A profile is not possible.
    """
    if not settings.profiles:
        return None
    from fleet.adapters.expected_workers import live_expectations  # noqa: PLC0415 - few routers predict

    return live_expectations(settings.profiles)


def _machine(
    settings: RouterSettings, clock: SystemClock, expectations: "LiveExpectations | None"
) -> "tuple[RouterMachine, FlightRecorder | None]":
    """What decides, and who writes down what.

    Raises:
        ConfigurationRefused: The policy is not installed, or the recording cannot be written.
    """
    from fleet.adapters.router_policies import open_policy  # noqa: PLC0415 - each process loads its own part only
    from fleet.router.machine import RouterMachine  # noqa: PLC0415

    seed, policy = secrets.randbits(63), open_policy(settings)
    if not settings.record:
        if expectations is None:
            return RouterMachine(settings, Random(seed), policy), None
        from fleet.router.observed import ObservedMachine  # noqa: PLC0415

        return ObservedMachine(settings, Random(seed), policy, observer=expectations), None
    from fleet.adapters.flight_recorder import recorded_machine  # noqa: PLC0415 - few routers record

    return recorded_machine(settings, seed, policy, clock.now(), also=expectations)


class _Fronts(Struct, frozen=True, kw_only=True):
    """The ports of a router process."""

    http: "HttpFrontend"
    grpc: "GrpcFrontend"
    kserve: "KserveFrontend | None"
    picker: "EndpointPicker | None"

    def endpoints(self) -> dict[str, str]:
        """Where they are, by protocol."""
        endpoints = {"http": self.http.address, "grpc": self.grpc.address}
        if self.grpc.control:
            endpoints["control"] = self.grpc.control
        if self.kserve is not None:
            endpoints["kserve"] = self.kserve.address
        if self.picker is not None:
            endpoints["endpoint_picker"] = self.picker.address
        return endpoints

    def drain(self, tasks: asyncio.TaskGroup, within: Nanos) -> None:
        """Take no more requests; tasks wait for the answers that are being streamed, at most so long."""
        self.grpc.door.drain()
        if self.kserve is not None:
            self.kserve.door.drain()
        if self.picker is not None:
            tasks.create_task(self.picker.drain(within))
        tasks.create_task(self.http.drain(within / SECOND))


@asynccontextmanager
async def _fronts(settings: RouterSettings, parts: _RouterParts) -> AsyncIterator[_Fronts]:
    """All of them, listening.

    Raises:
        ConfigurationRefused: An address is in use.
    """
    from fleet.adapters.grpc_frontend import open_grpc_frontend  # noqa: PLC0415 - each process loads its own part only
    from fleet.adapters.grpc_registry import SERVICE, GrpcRegistry  # noqa: PLC0415
    from fleet.adapters.grpc_selection import SERVICE as SELECTION  # noqa: PLC0415
    from fleet.adapters.http_frontend import open_http_frontend  # noqa: PLC0415

    registry = GrpcRegistry(parts.members, parts.replicas)
    async with (
        open_http_frontend(
            settings.http_listen,
            settings.http,
            parts.generation,
            parts.metrics.registry,
            parts.clock,
            parts.relay,
            shared=settings.share_ports,
            processes=parts.replicas if parts.replicas is not None and parts.replicas.share_a_port else None,
            connection_seconds=settings.connection_seconds,
        ) as http,
        open_grpc_frontend(
            settings.grpc_listen,
            parts.generation,
            parts.router,
            parts.clock,
            store=settings.store,
            shared=settings.share_ports,
            connection_seconds=settings.connection_seconds,
            control_listen=settings.control_listen,
            services={SERVICE: registry.add, SELECTION: parts.selection.add},
            others=parts.replicas,
        ) as grpc,
        _kserve(settings, parts.generation, parts.clock) as kserve,
        _endpoint_picker(settings, parts) as picker,
    ):
        yield _Fronts(http=http, grpc=grpc, kserve=kserve, picker=picker)


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

    async with open_kserve_frontend(
        settings.kserve_listen,
        generation,
        clock,
        shared=settings.share_ports,
        connection_seconds=settings.connection_seconds,
    ) as frontend:
        yield frontend


@asynccontextmanager
async def _endpoint_picker(settings: RouterSettings, parts: _RouterParts) -> AsyncIterator["EndpointPicker | None"]:
    """What gateways ask where to send requests; None where they are not to.

    Raises:
        ConfigurationRefused: Its address is in use, or its Lease needs what is not installed or not there.
    """
    if settings.endpoint_picker is None:
        yield None
        return
    from fleet.adapters.endpoint_picker import (  # noqa: PLC0415 - most routers have none
        EndpointPicker,
        RoutersPrompts,
        open_endpoint_picker,
    )

    prompts = RoutersPrompts(parts.generation, parts.relay, parts.tenants, parts.clock)
    async with _standing(settings.endpoint_picker, parts.clock) as standing:
        picker = EndpointPicker(settings.endpoint_picker, parts.router, parts.selection, prompts, standing)
        async with open_endpoint_picker(
            settings.endpoint_picker,
            picker,
            shared=settings.share_ports,
            connection_seconds=settings.connection_seconds,
        ):
            yield picker


@asynccontextmanager
async def _standing(settings: "EndpointPickerSettings", clock: SystemClock) -> "AsyncIterator[Standing | None]":
    """Of the endpoint picker among others; None where it is the only one.

    Raises:
        ConfigurationRefused: Its Lease needs what is not installed, or is not there.
    """
    if settings.lease is None:
        yield None
        return
    try:
        from fleet.adapters.picker_lease import open_candidate  # noqa: PLC0415 - optional
    except ImportError as error:
        raise ConfigurationRefused(
            "endpoint_picker.lease: needs the package kubernetes: pip install 'fleet-serving[kubernetes]'"
        ) from error

    async with open_candidate(settings.lease, clock, utc_now) as candidate:
        yield candidate


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
    codecs: "Mapping[ModelName, TextCodec]",
    tenants: "Tenants",
    registry: "CollectorRegistry",
    clock: SystemClock,
    threads: "TokenisingThreads",
) -> "Relay":
    """What serves the models of foreign servers.

    Raises:
        ConfigurationRefused: `kv_events` need what is not installed.
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
            codecs.get(model),
            clock,
            named_by_workers=bool(alike[0].kv_events),
        )
        for model, alike in by_model.items()
    }
    for model, alike in by_model.items():
        for name in dict.fromkeys(name for each in alike for name in each.adapters):
            readers[name] = readers[model].for_adapter(name)
    metrics = RelayMetrics(
        lambda: [
            ("fleet_cache_knowledge", "Foreign workers by how their caches are known", "by", workers.knowledge()),
            (
                "fleet_foreign_tokenizers",
                "Foreign workers by what they make of the golden prompts, beside the router",
                "tokenises",
                workers.tokenizers(),
            ),
            (
                "fleet_kv_event_alerts",
                "Foreign workers by what is wrong with their KV events",
                "alert",
                workers.alerts(),
            ),
            ("fleet_kv_event_passed_over", "Blocks of KV events not followed, by why", "why", workers.passed_over()),
        ]
    )
    registry.register(metrics)
    return Relay(
        router,
        workers,
        readers,
        tenants,
        metrics,
        clock,
        threads,
        id_prefix=secrets.token_hex(4),
        only=not settings.models,
    )


def _foreign_codecs(settings: RouterSettings) -> "dict[ModelName, TextCodec]":
    """The tokenizers that are named for foreign servers; those of one model have the same.

    Raises:
        ConfigurationRefused: A `tokenizer` is not a model folder.
    """
    from fleet.adapters.text_codec import load_codec  # noqa: PLC0415

    codecs: dict[ModelName, TextCodec] = {}
    for worker in settings.openai_workers:
        model = ModelName(worker.model)
        if not worker.tokenizer or model in codecs:
            continue
        try:
            codecs[model] = load_codec(worker.tokenizer)
        except ConfigurationRefused as error:
            raise ConfigurationRefused(f"tokenizer of {worker.worker_id} in openai_workers: {error}") from error
    return codecs


async def run_operator(settings: OperatorSettings, announce: Announce) -> None:
    """The operator on Kubernetes, or a standby of it.

    Raises:
        ConfigurationRefused: An address is in use, or it is not said how to reach the API.
    """
    try:
        from prometheus_client import CollectorRegistry  # noqa: PLC0415 - each process loads its own part only

        from fleet.adapters.router_registrations import RouterRegistrations  # noqa: PLC0415
        from fleet.adapters.served_probes import ServedProbes  # noqa: PLC0415
        from operators.process import serve_operator  # noqa: PLC0415 - optional
    except ImportError as error:
        raise ConfigurationRefused(
            "operator: needs the package kubernetes: pip install 'fleet-serving[kubernetes]'"
        ) from error

    async with _stop_requested() as stop:
        routers = RouterRegistrations() if settings.ask_routers else None
        clients = ServedProbes(settings.probe.keys, settings.probe.deadline_seconds)
        await serve_operator(settings, routers, clients, SystemClock(), utc_now, CollectorRegistry(), announce, stop)


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
        NodeEnded: The store node in this process did.
        StoreUnreachable: The store node does not answer.
    """
    from fleet.adapters.golden import golden_of_folder  # noqa: PLC0415 - each process loads its own part only
    from fleet.adapters.grpc_worker import serve_control  # noqa: PLC0415
    from fleet.adapters.router_streams import serve_routers  # noqa: PLC0415
    from fleet.adapters.stream_tls import of_worker  # noqa: PLC0415
    from workers.embedded import with_store  # noqa: PLC0415
    from workers.registration import Presence, Registration  # noqa: PLC0415
    from workers.server import WorkerServer  # noqa: PLC0415

    if settings.group is not None and settings.group.rank:
        await _run_rank(settings, settings.group, announce)
        return
    tls = of_worker("credentials", settings.credentials)
    incarnation = Incarnation(secrets.token_hex(8))
    async with AsyncExitStack() as held:
        lead: Lead | None = None
        if settings.group is not None:
            from fleet.adapters.worker_groups import leading  # noqa: PLC0415 - few workers have a group

            await held.enter_async_context(_giving_up_when_asked())
            lead = await held.enter_async_context(leading(settings.group, common_of(settings), SystemClock()))
            settings = structs.replace(settings, group=lead.group)
        furnished = await held.enter_async_context(with_store(settings, uvloop.new_event_loop))
        settings = furnished.settings
        try:
            engine = await held.enter_async_context(_open_engine(settings))
            keeper = await held.enter_async_context(_hold_keeper(settings, engine.facts))
            own_store = furnished.node is not None
            evacuator = await held.enter_async_context(_evacuator(settings, engine, leaving=own_store))
        except LayoutMismatch as error:
            raise ConfigurationRefused(f"{error.field}: {error}") from error
        golden = await asyncio.to_thread(golden_of_folder, settings.model_dir, engine.facts.block_tokens)
        worker = WorkerServer(
            settings,
            engine,
            SystemClock(),
            incarnation,
            keeper=keeper,
            golden=golden,
            evacuator=evacuator,
            store_goes=own_store,
        )
        listening = await held.enter_async_context(serve_routers(worker, settings.listen, tls))
        endpoints = {"stream": listening}
        if furnished.node is not None:
            endpoints |= {"store": furnished.node.listen[0], "data": furnished.node.data_address}
        presence = Presence(
            [
                Registration(
                    registry=await held.enter_async_context(registry),
                    worker_id=settings.worker_id,
                    incarnation=incarnation,
                    address=settings.advertise or listening,
                )
                for registry in _registries(settings, lambda: worker.warm_blocks)
            ]
        )
        if settings.control_listen:
            endpoints["grpc"] = await held.enter_async_context(serve_control(worker, settings.control_listen, presence))
        await held.enter_async_context(presence.kept())
        async with asyncio.TaskGroup() as tasks, _stop_requested() as stop:
            serving = tasks.create_task(worker.run())  # ends with a drain, by whomever, or with the engine
            serving.add_done_callback(lambda _: stop.set())
            announce(endpoints)
            if lead is not None:
                lead.when_asked_to_end(stop.set)
                lead.serving()
            await stop.wait()
            tasks.create_task(presence.leave())
            await worker.drain(Nanos(settings.drain_timeout_ms * MILLISECOND))
            if lead is not None:
                lead.end()


async def _run_rank(settings: WorkerSettings, group: GroupSettings, announce: Announce) -> None:
    """A node's part of an engine that another node leads: it serves nobody, and is there as long as the leader is.

    Raises:
        ConfigurationRefused: The leader is of another group, or the engine cannot be spread or refuses its settings.
        EngineDied: Its part of the engine ended by itself, or the leader is gone.
    """
    from fleet.adapters.grpc_worker import serve_rank  # noqa: PLC0415 - few workers have a group
    from fleet.adapters.worker_groups import following  # noqa: PLC0415

    open_rank = _rank_opener(settings.engine)
    async with AsyncExitStack() as held:
        await held.enter_async_context(_giving_up_when_asked())
        follow = await held.enter_async_context(following(group, common_of(settings), SystemClock()))
        stop = await held.enter_async_context(_stop_requested())
        settings = structs.replace(settings, group=follow.group)
        endpoints: dict[str, str] = {}
        if settings.control_listen:
            ready = serve_rank(settings.control_listen, lambda: follow.serving)
            endpoints["grpc"] = await held.enter_async_context(ready)
        follow.when_serving(lambda: announce(endpoints))
        await held.enter_async_context(open_rank(settings))
        async with asyncio.TaskGroup() as tasks:
            over = tasks.create_task(follow.over.wait())
            over.add_done_callback(lambda _: stop.set())
            await stop.wait()
            follow.leave()
            # A leader that drains for longer than it may is no reason to stay.
            await asyncio.wait([over], timeout=settings.drain_timeout_ms / 1000 + GRACE / SECOND)
            over.cancel()


def _registries(
    settings: WorkerSettings, warm_blocks: Callable[[], int]
) -> "list[AbstractAsyncContextManager[Registry]]":
    """Where a worker is to say that it is here, and, where that can be told, how many blocks it would take along.

    Raises:
        ConfigurationRefused: `discovery` needs what is not installed, or names what is not there.
    """
    registries: list[AbstractAsyncContextManager[Registry]] = []
    if settings.registry:
        from fleet.adapters.grpc_registry import GrpcRegistries  # noqa: PLC0415 - each process loads its own part only

        registries.append(GrpcRegistries(settings.registry))
    if settings.discovery is not None:
        from fleet.adapters.discovery import directory_of  # noqa: PLC0415

        registries.append(directory_of(settings.discovery, warm_blocks))
    return registries


@asynccontextmanager
async def _hold_keeper(settings: WorkerSettings, facts: EngineFacts) -> AsyncIterator["StoreHoldKeeper | None"]:
    """What keeps the chains of sessions that wait; None where there is no store, or it is not to."""
    from workers.store_holds import open_hold_keeper  # noqa: PLC0415 - each process loads its own part only

    if facts.store_id is None or facts.kv is None or not settings.hold_seconds:
        yield None
        return
    async with open_hold_keeper(settings.store, facts.kv, settings.store_credentials) as keeper:
        yield keeper


@asynccontextmanager
async def _evacuator(
    settings: WorkerSettings, engine: Engine, *, leaving: bool
) -> AsyncIterator["StoreEvacuator | None"]:
    """What brings warm blocks away when the worker drains; None where there is no store, or it is not to."""
    from workers.evacuation import open_evacuator  # noqa: PLC0415 - each process loads its own part only
    from workers.ports import Saving  # noqa: PLC0415

    facts = engine.facts
    if facts.store_id is None or facts.kv is None or not settings.evacuate_bytes:
        yield None
        return
    async with open_evacuator(
        settings.store,
        facts.kv,
        settings.store_credentials,
        engine if isinstance(engine, Saving) else None,
        SystemClock(),
        leaving=leaving,
        most_bytes=settings.evacuate_bytes,
    ) as evacuator:
        yield evacuator


def _open_engine(settings: WorkerSettings) -> AbstractAsyncContextManager[Engine]:
    if settings.group is not None:
        _rank_opener(settings.engine)  # the other nodes need it
    open_engine: Callable[[WorkerSettings], AbstractAsyncContextManager[Engine]] = _engine(settings.engine).load()
    return open_engine(settings)


def _rank_opener(engine: str) -> Callable[[WorkerSettings], AbstractAsyncContextManager[None]]:
    """An engine's `open_rank`, which stands beside what opens it where it can be spread over nodes."""
    module = import_module(_engine(engine).module)
    found: Callable[[WorkerSettings], AbstractAsyncContextManager[None]] | None = getattr(module, "open_rank", None)
    if found is None:
        raise ConfigurationRefused(f"group: the engine {engine!r} runs on one node; leave `group` out")
    return found


def _engine(name: str) -> EntryPoint:
    found = entry_points(group="workers.engines", name=name)
    if not found:
        known = ", ".join(sorted(entry_points(group="workers.engines").names))
        raise ConfigurationRefused(f"engine: {name!r} is not installed; there is: {known}")
    return next(iter(found))


@asynccontextmanager
async def _giving_up_when_asked() -> AsyncIterator[None]:
    """End the context at a signal, for as long as nobody else listens to it: until a process of a group serves, that may be minutes.

    Nothing would end it there by itself: signals that nobody listens to do nothing to the first process of a container.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    asked = False

    def ask() -> None:
        nonlocal asked
        asked = True
        task.cancel()

    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, ask)
    try:
        yield
    except asyncio.CancelledError:
        if not asked:
            raise
        task.uncancel()
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


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


_PARTS: Mapping[Part, Callable[[Path, Announce, Mapping[str, Any] | None], Coroutine[Any, Any, None]]] = {
    "router": lambda config, announce, changes: run_router(load(config, RouterSettings, changes), announce),
    "worker": lambda config, announce, changes: run_worker(load(config, WorkerSettings, changes), announce),
    "kvstore": lambda config, announce, changes: run_kvstore(load(config, StoreSettings, changes), announce),
    "operator": lambda config, announce, changes: run_operator(load(config, OperatorSettings, changes), announce),
}
