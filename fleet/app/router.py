"""A router's process: its fronts, what decides behind them, and the registry where workers say that they are there."""

import asyncio
import gc
import logging
import resource
import secrets
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing, nullcontext
from importlib.util import find_spec
from random import Random
from typing import TYPE_CHECKING, Any

from msgspec import Struct, structs

from fleet.app.process import Announce, cancelled_by_signals, stop_signal
from fleet.core.clock import MILLISECOND, SECOND, Nanos
from fleet.core.errors import ConfigurationRefused
from fleet.core.ids import ModelName
from fleet.core.system_clock import SystemClock, utc_now
from fleet.router.settings.router import OpenAiWorkerSettings, RouterSettings

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from fleet.backends.external.workers import AllBackends, ExternalBackends
    from fleet.backends.workers.streams import WorkerStreams
    from fleet.core.telemetry import RouterProcessMetrics
    from fleet.frontend.generation import Generation
    from fleet.frontend.grpc.service import GrpcFrontend
    from fleet.frontend.kserve.service import KserveFrontend
    from fleet.frontend.metrics.predictions import PredictionMetrics
    from fleet.frontend.openai.prompt_keys import SecretBlockKeys
    from fleet.frontend.openai.relay import Relay
    from fleet.frontend.openai.service import HttpFrontend
    from fleet.frontend.text.tokenizer_threads import TokenizerThreads
    from fleet.gateway.endpoint_picker import EndpointPicker
    from fleet.gateway.endpoints import PickerLeadership
    from fleet.gateway.selection import SelectionService
    from fleet.membership.ports import Directory
    from fleet.membership.server import RegistryServer
    from fleet.net.control.access import ControlAccess
    from fleet.peers.redis_tenants import RedisRateLimits
    from fleet.peers.routers import PeerRouters
    from fleet.recording.flight_recorder import FlightRecorder
    from fleet.router.machine import RouterMachine
    from fleet.router.ports import TextCodec
    from fleet.router.server import RouterServer
    from fleet.router.settings.endpoint_picker import EndpointPickerSettings
    from fleet.router.tenants import Tenants

log = logging.getLogger(__name__)

RESERVED_DESCRIPTORS = 512  # for streams to workers, the ports for health and control, other routers, and files
GC_THRESHOLD = 5_000  # new objects, a millisecond or two; with Python's 700 a router spends 5 % on collections


async def run_router(settings: RouterSettings, announce: Announce) -> None:
    """The fronts, the router behind them, and the registry where workers announce themselves.

    Raises:
        ConfigurationRefused: An address is in use, a model folder is not one, or a model cannot be fetched.
    """
    from fleet.app.freed_memory import map_large_allocations  # noqa: PLC0415 - likewise
    from fleet.app.hub import fetch_router_models  # noqa: PLC0415 - each process loads its own part only

    map_large_allocations()
    async with cancelled_by_signals():
        settings = within_descriptors(settings, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        settings = await fetch_router_models(settings, SystemClock())
        parts = _parts_of_router(settings)
        with parts.recorder or nullcontext(), closing(parts.threads):
            await _serve(settings, parts, announce)


def within_descriptors(settings: RouterSettings, limit: int) -> RouterSettings:
    """Return the settings with tables of client connections that leave descriptors for everything else.

    Args:
        settings: What was asked for.
        limit: Open files that this process may have.
    """
    grpc_ports = 2 if settings.kserve_listen else 1
    asked = settings.http.max_connections + grpc_ports * settings.grpc.max_connections
    room = max(limit - RESERVED_DESCRIPTORS, limit // 2)
    if asked <= room:
        return settings
    http = max(1, settings.http.max_connections * room // asked)
    grpc = max(1, settings.grpc.max_connections * room // asked)
    log.warning(
        "connection limits lowered to fit the limit of open files",
        extra={"open_files": limit, "http_max_connections": http, "grpc_max_connections": grpc},
    )
    return structs.replace(
        settings,
        http=structs.replace(settings.http, max_connections=http),
        grpc=structs.replace(settings.grpc, max_connections=grpc),
    )


async def _serve(settings: RouterSettings, parts: "_RouterParts", announce: Announce) -> None:
    """Serve until asked to stop.

    A process alone takes its ports first: where another one has them, nobody else may hear of this one. Those that share ports
    open them last, since they get connections from then on; whoever asks a process alone for its health is told what it can serve.
    """
    async with _directory(settings) as directory, asyncio.TaskGroup() as tasks, AsyncExitStack() as opened:
        ports = _fronts(settings, parts)
        early = None if settings.share_ports else await opened.enter_async_context(ports)
        running = [tasks.create_task(each) for each in parts.loops(directory)]
        await parts.caught_up(directory, settings.catch_up_seconds)
        async with stop_signal() as stop:
            fronts = early if early is not None else await opened.enter_async_context(ports)
            announce(fronts.endpoints())
            gc.freeze()  # what is there by now stays: no collection has to look at it
            gc.set_threshold(GC_THRESHOLD)
            await stop.wait()
            parts.selection.drain()
            within = Nanos(settings.drain_timeout_ms * MILLISECOND)
            async with asyncio.TaskGroup() as draining:
                fronts.drain(draining, within)
                draining.create_task(parts.router.drain(within))
            for task in running:
                task.cancel()


@asynccontextmanager
async def _directory(settings: RouterSettings) -> "AsyncIterator[Directory | None]":
    """Where workers are found besides those that register here; None: nowhere.

    Raises:
        ConfigurationRefused: It needs what is not installed, or is not there.
    """
    if settings.discovery is None:
        yield None
        return
    from fleet.membership.discovery.open import open_directory  # noqa: PLC0415 - most routers have none

    async with open_directory(settings.discovery) as directory:
        yield directory


class _RouterParts(Struct, frozen=True, kw_only=True):
    """What a router process has behind its fronts."""

    clock: SystemClock
    metrics: "RouterProcessMetrics"
    tenants: "Tenants"
    control_access: "ControlAccess"
    members: "RegistryServer"
    own_workers: "WorkerStreams"
    foreign_workers: "ExternalBackends"
    workers: "AllBackends"
    router: "RouterServer"
    recorder: "FlightRecorder | None"
    selection: "SelectionService"
    generation: "Generation"
    threads: "TokenizerThreads"
    relay: "Relay | None"
    replicas: "PeerRouters | None"
    limits: "RedisRateLimits | None"

    def loops(self, directory: "Directory | None") -> list[Coroutine[Any, Any, Any]]:
        """What runs as long as the process serves."""
        own = self.own_workers.run(self.workers.only_acceptable(self.router.hear))
        loops = [self.members.run(), self.router.run(), own, self.foreign_workers.run(self.router.hear)]
        if self.limits is not None:
            loops.append(self.limits.run())
        if self.replicas is not None:
            loops.append(self.replicas.run())
        if directory is not None:
            loops.append(self.members.follow(directory))
        return loops

    async def caught_up(self, directory: "Directory | None", seconds: float) -> None:
        """When the workers that are there have said what they are, at the latest after so long: some may not answer."""
        waiting_for = "foreign servers"
        try:
            async with asyncio.timeout(seconds):
                await self.foreign_workers.asked()
                if self.replicas is not None:
                    waiting_for = "routers beside this one"
                    await self.replicas.caught_up()
                if directory is not None:
                    waiting_for = "the directory of workers"
                    await self.members.followed.wait()
                waiting_for = "workers"
                while not self.own_workers.tried(self.members.members):  # noqa: ASYNC110 - for a moment, once
                    await asyncio.sleep(0.01)
        except TimeoutError:
            log.warning("starts without having heard of all", extra={"waited_for": waiting_for, "seconds": seconds})


def _parts_of_router(settings: RouterSettings) -> _RouterParts:
    """Made and put together; nothing runs yet.

    Raises:
        ConfigurationRefused: A model folder is not one, or the settings name what is not installed.
    """
    from prometheus_client import CollectorRegistry, generate_latest  # noqa: PLC0415 - each process loads its own part only

    from fleet.app.freed_memory import trim_heaps  # noqa: PLC0415
    from fleet.backends.external.workers import AllBackends, ExternalBackends  # noqa: PLC0415
    from fleet.backends.workers.streams import WorkerStreams  # noqa: PLC0415
    from fleet.core.telemetry import RouterProcessMetrics  # noqa: PLC0415
    from fleet.frontend.generation import Generation  # noqa: PLC0415
    from fleet.frontend.metrics.router import RouterMetrics, TenantMetrics  # noqa: PLC0415
    from fleet.frontend.openai.prompt_keys import SecretBlockKeys  # noqa: PLC0415
    from fleet.frontend.text.codec import load_codec  # noqa: PLC0415
    from fleet.frontend.text.tokenizer_check import TokenizerCheck  # noqa: PLC0415
    from fleet.frontend.text.tokenizer_threads import TokenizerThreads  # noqa: PLC0415
    from fleet.gateway.selection import SelectionAwareWorkers, SelectionService  # noqa: PLC0415
    from fleet.membership.server import RegistryServer  # noqa: PLC0415
    from fleet.membership.settings import MembershipSettings  # noqa: PLC0415
    from fleet.net.control.access import load_control_access  # noqa: PLC0415
    from fleet.peers.routers import PeerLimits, PeerRouters  # noqa: PLC0415
    from fleet.router.server import RouterServer  # noqa: PLC0415
    from fleet.router.tenants import Tenants  # noqa: PLC0415

    clock = SystemClock()
    metrics = RouterProcessMetrics(CollectorRegistry())
    tenants = Tenants(settings.tenants, clock.now())
    metrics.registry.register(TenantMetrics(tenants.usage))
    tenant_secret = settings.tenant_secret.encode()
    threads = TokenizerThreads(trim_heaps)

    members = RegistryServer(MembershipSettings(), clock)
    own_workers = WorkerStreams(settings, members.membership(), reachability=members.hear)
    foreign_codecs = _external_codecs(settings)
    foreign_workers = ExternalBackends(settings.openai_workers, settings.connect_timeout_seconds, clock, foreign_codecs)
    codecs = {model: load_codec(folder) for model, folder in settings.models.items()}
    golden = TokenizerCheck(codecs)
    workers = AllBackends(own_workers, foreign_workers, golden)
    selecting = SelectionAwareWorkers(workers)

    expectations = _expectations(settings)
    machine, recorder = _machine(settings, clock, expectations)
    if expectations is not None:
        expectations.machine = machine
        metrics.registry.register(expectations)
    router = RouterServer(machine, selecting, clock)
    metrics.registry.register(
        RouterMetrics(
            router.status,
            tasks=lambda: len(asyncio.all_tasks()),
            refused=golden.refused,
            directory=lambda: members.directory_reachable,
        )
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
    relay, private = None, SecretBlockKeys(settings.prompt_secret or settings.tenant_secret)
    if settings.openai_workers:
        registry = metrics.registry
        relay = _relay(settings, router, foreign_workers, foreign_codecs, private, tenants, registry, clock, threads)
    limits = None
    if settings.tenants_redis:
        limits = _shared_limits(settings.tenants_redis, tenants, clock)
        metrics.registry.register(limits)
    elif settings.counts_limits_without_redis:
        log.warning(
            "tenant limits hold for this router and those in replicas together; each other router counts for itself",
            extra={"replicas": ",".join(settings.replicas) or "none", "to_share_with_others": "set tenants_redis"},
        )
    selection = SelectionService(router, selecting, settings.selection, tenant_secret=tenant_secret)
    replicas = None
    if settings.replicas_listen:
        replicas = PeerRouters(
            settings,
            router,
            members,
            selection,
            lambda: generate_latest(metrics.registry).decode(),
            private=private.fingerprint,
            limits=PeerLimits(tenants, clock) if settings.counts_limits_without_redis else None,
        )
        selection.others = replicas
    return _RouterParts(
        clock=clock,
        metrics=metrics,
        tenants=tenants,
        control_access=load_control_access("control_credentials", settings.control_credentials),
        members=members,
        own_workers=own_workers,
        foreign_workers=foreign_workers,
        workers=workers,
        router=router,
        recorder=recorder,
        selection=selection,
        generation=generation,
        threads=threads,
        relay=relay,
        replicas=replicas,
        limits=limits,
    )


def _expectations(settings: RouterSettings) -> "PredictionMetrics | None":
    """Who predicts what workers do; None: nobody.

    Raises:
        ConfigurationRefused: A profile is not possible.
    """
    if not settings.profiles:
        return None
    from fleet.frontend.metrics.predictions import PredictionMetrics, profile_lookup  # noqa: PLC0415 - few routers predict

    return PredictionMetrics(profile_lookup(settings.profiles))


def _machine(
    settings: RouterSettings, clock: SystemClock, expectations: "PredictionMetrics | None"
) -> "tuple[RouterMachine, FlightRecorder | None]":
    """What decides, and who writes down what.

    Raises:
        ConfigurationRefused: The policy is not installed, or the recording cannot be written.
    """
    from fleet.router.machine import RouterMachine  # noqa: PLC0415
    from fleet.router.placement.plugins import open_policy  # noqa: PLC0415 - each process loads its own part only

    seed, policy = secrets.randbits(63), open_policy(settings)
    if not settings.record:
        if expectations is None:
            return RouterMachine(settings, Random(seed), policy), None
        from fleet.router.observer import ObservedMachine  # noqa: PLC0415

        return ObservedMachine(settings, Random(seed), policy, observer=expectations), None
    from fleet.recording.flight_recorder import open_recorded_machine  # noqa: PLC0415 - few routers record

    return open_recorded_machine(settings, seed, policy, clock.now(), also=expectations)


class _Fronts(Struct, frozen=True, kw_only=True):
    """The ports of a router process."""

    http: "HttpFrontend"
    grpc: "GrpcFrontend"
    control: str  # address
    kserve: "KserveFrontend | None"
    picker: "EndpointPicker | None"

    def endpoints(self) -> dict[str, str]:
        """Where they are, by protocol."""
        endpoints = {"http": self.http.address, "grpc": self.grpc.address, "control": self.control}
        if self.http.health_address:
            endpoints["health"] = self.http.health_address
        if self.kserve is not None:
            endpoints["kserve"] = self.kserve.address
        if self.picker is not None:
            endpoints["endpoint_picker"] = self.picker.address
        return endpoints

    def drain(self, tasks: asyncio.TaskGroup, within: Nanos) -> None:
        """Take no more requests; tasks wait for the answers that are being streamed, at most so long."""
        self.grpc.drain()
        if self.kserve is not None:
            self.kserve.drain()
        if self.picker is not None:
            tasks.create_task(self.picker.drain(within))
        tasks.create_task(self.http.drain(within / SECOND))


@asynccontextmanager
async def _fronts(settings: RouterSettings, parts: _RouterParts) -> AsyncIterator[_Fronts]:
    """All of them, listening.

    Raises:
        ConfigurationRefused: An address is in use.
    """
    from fleet.frontend.control.port import open_control_port  # noqa: PLC0415 - each process loads its own part only
    from fleet.frontend.grpc.service import GrpcFrontend  # noqa: PLC0415
    from fleet.frontend.openai.service import open_http_frontend  # noqa: PLC0415
    from fleet.gateway.selection import SERVICE as SELECTION  # noqa: PLC0415
    from fleet.membership.registry import SERVICE, GrpcRegistry  # noqa: PLC0415
    from kvstore.security.channels import load  # noqa: PLC0415 - likewise

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
            health_listen=settings.health_listen,
        ) as http,
        GrpcFrontend.open(
            settings.grpc_listen,
            parts.generation,
            parts.clock,
            shared=settings.share_ports,
            connection_seconds=settings.connection_seconds,
            max_held_bytes=settings.grpc_max_held_bytes,
            limits=settings.grpc,
        ) as grpc,
        open_control_port(
            settings.control_listen,
            parts.control_access,
            parts.router,
            grpc.ready,
            grpc_address=grpc.address,
            services={SERVICE: registry.add, SELECTION: parts.selection.add},
            store=settings.store,
            store_access=load(settings.store_credentials),
            shared=settings.share_ports,
            others=parts.replicas,
        ) as control,
        _kserve(settings, parts.generation, parts.clock) as kserve,
        _endpoint_picker(settings, parts) as picker,
    ):
        yield _Fronts(http=http, grpc=grpc, control=control, kserve=kserve, picker=picker)


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
    from fleet.frontend.kserve.service import KserveFrontend  # noqa: PLC0415 - most routers have none

    async with KserveFrontend.open(
        settings.kserve_listen,
        generation,
        clock,
        shared=settings.share_ports,
        connection_seconds=settings.connection_seconds,
        max_held_bytes=settings.grpc_max_held_bytes,
        limits=settings.grpc,
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
    from fleet.gateway.endpoint_picker import EndpointPicker, open_endpoint_picker  # noqa: PLC0415 - most routers have none
    from fleet.gateway.prompts import ApiPromptReader  # noqa: PLC0415 - likewise

    prompts = ApiPromptReader(parts.generation, parts.relay, parts.tenants, parts.clock)
    async with _picker_leadership(settings.endpoint_picker, parts.clock) as standing:
        picker = EndpointPicker(settings.endpoint_picker, parts.router, parts.selection, prompts, standing)
        async with open_endpoint_picker(
            settings.endpoint_picker,
            picker,
            shared=settings.share_ports,
            connection_seconds=settings.connection_seconds,
        ):
            yield picker


@asynccontextmanager
async def _picker_leadership(
    settings: "EndpointPickerSettings", clock: SystemClock
) -> "AsyncIterator[PickerLeadership | None]":
    """Of the endpoint picker among others; None where it is the only one.

    Raises:
        ConfigurationRefused: Its Lease needs what is not installed, or is not there.
    """
    if settings.lease is None:
        yield None
        return
    try:
        from fleet.gateway.lease import open_candidate  # noqa: PLC0415 - optional
    except ImportError as error:
        raise ConfigurationRefused(
            "endpoint_picker.lease: needs the package kubernetes: pip install 'fleet-serving[kubernetes]'"
        ) from error

    async with open_candidate(settings.lease, clock, utc_now) as candidate:
        yield candidate


def _shared_limits(url: str, tenants: "Tenants", clock: SystemClock) -> "RedisRateLimits":
    """What keeps the limits of this router in step with the others'.

    Raises:
        ConfigurationRefused: The URL is none of Redis, or the client library is not installed.
    """
    try:
        from fleet.peers.redis_tenants import RedisRateLimits  # noqa: PLC0415 - optional

        return RedisRateLimits(url, tenants, clock)
    except ImportError as error:
        raise ConfigurationRefused(
            "tenants_redis: needs the package redis: pip install 'fleet-serving[redis]'"
        ) from error
    except ValueError as error:
        raise ConfigurationRefused(f"tenants_redis: {error}") from error


def _relay(
    settings: RouterSettings,
    router: "RouterServer",
    workers: "ExternalBackends",
    codecs: "Mapping[ModelName, TextCodec]",
    private: "SecretBlockKeys",
    tenants: "Tenants",
    registry: "CollectorRegistry",
    clock: SystemClock,
    threads: "TokenizerThreads",
) -> "Relay":
    """What serves the models of foreign servers.

    Raises:
        ConfigurationRefused: `kv_events` need what is not installed.
    """
    from fleet.frontend.metrics.relay import RelayMetrics  # noqa: PLC0415
    from fleet.frontend.openai.prompt_keys import PromptReader  # noqa: PLC0415
    from fleet.frontend.openai.relay import Relay  # noqa: PLC0415

    by_model: dict[ModelName, list[OpenAiWorkerSettings]] = {}
    for index, worker in enumerate(settings.openai_workers):
        if worker.kv_events and find_spec("zmq") is None:
            raise ConfigurationRefused(
                f"openai_workers[{index}].kv_events: needs the package pyzmq: pip install 'fleet-serving[kv-events]'"
            )
        by_model.setdefault(ModelName(worker.model), []).append(worker)
    readers = {
        model: PromptReader(
            model,
            [each.compared_tokens for each in alike],
            codecs.get(model),
            clock,
            None if alike[0].kv_events else private,
        )
        for model, alike in by_model.items()
    }
    for model, alike in by_model.items():
        for name in dict.fromkeys(name for each in alike for name in each.adapters):
            readers[name] = readers[model].for_adapter(name)
    metrics = RelayMetrics(
        lambda: [
            ("fleet_foreign_servers", "Foreign servers by how they stand", "state", workers.standing()),
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


def _external_codecs(settings: RouterSettings) -> "dict[ModelName, TextCodec]":
    """The tokenizers that are named for foreign servers; those of one model have the same.

    Raises:
        ConfigurationRefused: A `tokenizer` is not a model folder.
    """
    from fleet.frontend.text.codec import load_codec  # noqa: PLC0415

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
