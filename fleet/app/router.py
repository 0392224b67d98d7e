"""Router process: builds the backends, the router, the peers and the frontends, and serves until a stop signal."""

import asyncio
import gc
import logging
import resource
import secrets
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, nullcontext
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from msgspec import Struct, structs
from prometheus_client import CollectorRegistry, generate_latest

from fleet.app.freed_memory import map_large_allocations, trim_heaps
from fleet.app.hub import fetch_router_models
from fleet.app.native_modules import warn_of_missing_modules
from fleet.app.process import Announce, ServiceDefinition, cancelled_by_signals, stop_signal
from fleet.backends.external.workers import CombinedBackends, ExternalBackends
from fleet.backends.workers.streams import WorkerStreams
from fleet.core.clock import MILLISECOND, SECOND, Nanos
from fleet.core.errors import ConfigurationRefused, missing_package
from fleet.core.ids import Incarnation, ModelName
from fleet.core.system_clock import SystemClock, unix_nanoseconds, unix_seconds, utc_now
from fleet.core.telemetry import RouterProcessMetrics
from fleet.frontend.access_log import AccessLog
from fleet.frontend.control.demand import DemandWatch
from fleet.frontend.control.port import open_control_port
from fleet.frontend.generation import Generation
from fleet.frontend.grpc.service import GrpcFrontend
from fleet.frontend.images.fetcher import ImageFetcher
from fleet.frontend.metrics.demand import DemandMetrics
from fleet.frontend.metrics.images import ImageMetrics
from fleet.frontend.metrics.relay import RelayMetrics
from fleet.frontend.metrics.router import RouterMetrics, TenantMetrics
from fleet.frontend.openai.prompt_keys import PromptReader, SecretBlockKeys
from fleet.frontend.openai.relay import Relay
from fleet.frontend.openai.relayed_paths import RelayedPaths
from fleet.frontend.openai.service import HttpFrontend, open_http_frontend
from fleet.frontend.resume_tokens import ResumeTokens
from fleet.frontend.text.codec import load_codec
from fleet.frontend.text.tokenizer_check import TokenizerCheck
from fleet.frontend.text.tokenizer_threads import TokenizerThreads
from fleet.gateway.selected_requests import SelectionAwareWorkers
from fleet.gateway.selection import SERVICE as SELECTION_SERVICE
from fleet.gateway.selection import SelectionService
from fleet.membership.compatibility import IncompatiblePeers
from fleet.membership.discovery.open import open_directory
from fleet.membership.registry import SERVICE as REGISTRY_SERVICE
from fleet.membership.registry import GrpcRegistry
from fleet.membership.server import RegistryServer
from fleet.membership.settings import MembershipSettings
from fleet.net.certificate_watch import certificate_watch
from fleet.net.client_tls import ServerCertificates
from fleet.net.control.access import ControlAccess, load_control_access
from fleet.net.settings import MIB
from fleet.peers.routers import PeerLimits, PeerRouters
from fleet.recording.access_records import AccessRecordFile
from fleet.recording.rotated_file import RotatedFile
from fleet.router.machine import RouterMachine
from fleet.router.observer import ObservedMachine, Observer, Observers
from fleet.router.placement.plugins import open_policy
from fleet.router.ports import TextCodec, Workers
from fleet.router.server import RouterServer
from fleet.router.settings.open_ports import open_router_ports
from fleet.router.settings.router import OpenAiWorkerSettings, RouterSettings
from fleet.router.tenants import Tenants
from fleet.tracing.process import new_span_ids, open_tracing
from kvstore.errors import BadCredentials
from kvstore.net.addresses import is_local
from kvstore.security.certificates import CertificateWatch
from kvstore.security.channels import LoadedCredentials, load
from kvstore.security.metrics_access import MetricsGuard
from kvstore.security.open_ports import warn_of_open_ports
from kvstore.tracing.exporter import TraceExporter

if TYPE_CHECKING:
    from fleet.backends.hosted.overflow import HostedOverflow
    from fleet.frontend.kserve.service import KserveFrontend
    from fleet.frontend.metrics.predictions import PredictionMetrics
    from fleet.gateway.endpoint_picker import EndpointPicker
    from fleet.gateway.endpoints import PickerLeadership
    from fleet.membership.ports import Directory
    from fleet.peers.redis_tenants import RedisRateLimits
    from fleet.recording.flight_recorder import FlightRecorder
    from fleet.router.settings.endpoint_picker import EndpointPickerSettings
    from fleet.tracing.request_traces import RequestTraces

log = logging.getLogger(__name__)

# Number of file descriptors that client connections must not use: for worker streams, other ports, peer routers and files.
# If the limit of open files is below twice this number, client connections may use half of the limit.
RESERVED_DESCRIPTORS = 512
# Number of new objects after which Python collects garbage. A collection takes 1 to 2 ms. With Python's default of 700
# objects, a router would spend 5 % of its time on collections.
GC_THRESHOLD = 5_000


async def run_router(settings: RouterSettings, announce: Announce) -> None:
    """Run a router until a stop signal.

    Raises:
        ConfigurationRefused: The settings cannot be used, for example because an address is in use or a model cannot be
            fetched.
    """
    map_large_allocations()
    warn_of_missing_modules()
    async with cancelled_by_signals():
        settings = within_descriptors(settings, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        settings = await fetch_router_models(settings, SystemClock())
        shared = _Shared.build(settings)
        backends = _Backends.build(settings, shared)
        async with _overflow(settings, shared, backends.codecs) as overflow:
            with open_tracing(settings.tracing, "fleet-router", settings.router_id) as exporter:
                traces = None if exporter is None else _traces(settings, shared, backends, exporter)
                core = _Core.build(settings, shared, backends, overflow, traces)
                limits = _shared_limits(settings, shared)
                peers = _peers(settings, shared, backends, core)
                parts = _Parts(shared=shared, backends=backends, core=core, limits=limits, peers=peers)
                fetcher = shared.image_fetcher
                with (
                    core.recorder or nullcontext(),
                    core.records or nullcontext(),
                    closing(shared.threads),
                    nullcontext() if fetcher is None else closing(fetcher),
                ):
                    await _serve(settings, parts, announce)


def within_descriptors(settings: RouterSettings, limit: int) -> RouterSettings:
    """Lower the connection limits, if necessary, so that file descriptors remain for everything else.

    Args:
        settings: The settings of the router.
        limit: Number of files that this process may open.
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


class _Shared(Struct, frozen=True, kw_only=True):
    """Objects that several parts of the router process share, such as clock, metrics and certificates."""

    clock: SystemClock
    metrics: RouterProcessMetrics
    tenants: Tenants
    threads: TokenizerThreads
    secret_keys: SecretBlockKeys
    image_fetcher: ImageFetcher | None  # None: images at URLs are refused
    control_access: ControlAccess
    store_access: LoadedCredentials
    incompatible: IncompatiblePeers
    certificates: ServerCertificates | None  # certificates of the ports for clients; None: these ports do not speak TLS
    certificate_watch: CertificateWatch

    @classmethod
    def build(cls, settings: RouterSettings) -> "_Shared":
        """Build the shared objects from the settings.

        Raises:
            ConfigurationRefused: A credentials file, a certificate, or the certificate authority for images cannot be used.
        """
        clock = SystemClock()
        metrics, tenants = RouterProcessMetrics(CollectorRegistry()), Tenants(settings.tenants, clock.now())
        metrics.registry.register(TenantMetrics(tenants.usage))
        certificates = ServerCertificates(settings.tls, unix_seconds) if settings.tls.certificate else None
        watch = _certificate_watch(settings, certificates)
        metrics.registry.register(watch)
        fetcher = ImageFetcher(settings.images) if settings.images.fetch_urls else None
        if fetcher is not None:
            metrics.registry.register(ImageMetrics(fetcher))
        return cls(
            clock=clock,
            metrics=metrics,
            tenants=tenants,
            threads=TokenizerThreads(trim_heaps),
            secret_keys=SecretBlockKeys(settings.prompt_secret or settings.tenant_secret),
            image_fetcher=fetcher,
            control_access=load_control_access("control_credentials", settings.control_credentials),
            store_access=_store_access(settings),
            incompatible=IncompatiblePeers(clock),
            certificates=certificates,
            certificate_watch=watch,
        )


def _store_access(settings: RouterSettings) -> LoadedCredentials:
    """Read the credentials with which the router connects to store nodes.

    Raises:
        ConfigurationRefused: A file cannot be used.
    """
    try:
        return load(settings.store_credentials, field="store_credentials")
    except BadCredentials as error:
        raise ConfigurationRefused(str(error)) from error


def _certificate_watch(settings: RouterSettings, clients: ServerCertificates | None) -> CertificateWatch:
    """Return an object that checks regularly whether the certificates of the settings end soon, and whether renewals can be used.

    `clients` are the certificates of the ports for clients; None: these ports do not speak TLS.

    Raises:
        ConfigurationRefused: A file cannot be used.
    """
    names = ("control_credentials", "worker_credentials", "replicas_credentials", "store_credentials")
    return certificate_watch(
        {name: getattr(settings, name) for name in names}, None if clients is None else clients.files
    )


class _Backends(Struct, frozen=True, kw_only=True):
    """The backends to which the router sends attempts, and the registry of workers."""

    registry: RegistryServer
    codecs: dict[ModelName, TextCodec]  # tokenizers and templates of the models that Fleet's own workers serve
    external_codecs: dict[ModelName, TextCodec]
    check: TokenizerCheck
    own: WorkerStreams
    external: ExternalBackends
    combined: CombinedBackends | None  # None: the settings name no external backends
    selection_aware: SelectionAwareWorkers

    @classmethod
    def build(cls, settings: RouterSettings, shared: _Shared) -> "_Backends":
        """Build the backends, without connecting to any of them yet.

        Raises:
            ConfigurationRefused: A model folder or a credentials file is invalid.
        """
        registry = RegistryServer(MembershipSettings(), shared.clock)
        codecs = load_codecs(settings)
        check = TokenizerCheck(codecs)
        own = WorkerStreams(
            settings,
            registry.membership(),
            reachability=registry.hear,
            incompatible=shared.incompatible,
            accepts=check.accepts,
        )
        external_codecs = _external_codecs(settings)
        external = ExternalBackends(
            settings.openai_workers, settings.connect_timeout_seconds, shared.clock, external_codecs
        )
        combined = CombinedBackends(own, external) if settings.openai_workers else None
        return cls(
            registry=registry,
            codecs=codecs,
            external_codecs=external_codecs,
            check=check,
            own=own,
            external=external,
            combined=combined,
            selection_aware=SelectionAwareWorkers(combined or own),
        )


def load_codecs(settings: RouterSettings) -> dict[ModelName, TextCodec]:
    """Load the tokenizer, the chat template and, if `model_defaults` is on, the sampling defaults of each model of Fleet's own workers.

    Raises:
        ConfigurationRefused: A model folder is invalid.
    """
    return {
        model: load_codec(folder, model_defaults=settings.model_defaults) for model, folder in settings.models.items()
    }


def _external_codecs(settings: RouterSettings) -> dict[ModelName, TextCodec]:
    """Load the tokenizers that the settings name for external backends; the servers of one model share one tokenizer.

    Raises:
        ConfigurationRefused: A `tokenizer` is not a model folder.
    """
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


def check_overflow_models(settings: RouterSettings) -> None:
    """Raise ConfigurationRefused if `overflow` names a model that is not in `models`."""
    for model in settings.overflow:
        if model not in settings.models:
            served = ", ".join(settings.models) or "none"
            raise ConfigurationRefused(f"overflow.{model}: `models` has no such model; there are: {served}")


@asynccontextmanager
async def _overflow(
    settings: RouterSettings, shared: _Shared, codecs: Mapping[ModelName, TextCodec]
) -> "AsyncIterator[HostedOverflow | None]":
    """Open the hosted endpoints. The `with` block gets None if the settings name no hosted endpoint.

    Raises:
        ConfigurationRefused: `overflow` names a model that is not in `models`, or a key or ledger file cannot be used.
    """
    if not settings.overflow:
        yield None
        return
    check_overflow_models(settings)
    from fleet.backends.hosted.overflow import open_overflow  # noqa: PLC0415 - few routers have hosted endpoints
    from fleet.frontend.metrics.overflow import OverflowMetrics  # noqa: PLC0415 - few routers have hosted endpoints

    async with open_overflow(
        settings.overflow,
        shared.tenants,
        shared.clock,
        unix_seconds,
        connect_timeout_seconds=settings.connect_timeout_seconds,
        explained_requests=settings.explained_requests,
        sampling_defaults={model: codecs[model].sampling_defaults for model in settings.overflow},
    ) as overflow:
        shared.metrics.registry.register(OverflowMetrics(overflow))
        yield overflow


class _Core(Struct, frozen=True, kw_only=True):
    """The router itself, and the services that submit requests to it."""

    server: RouterServer
    recorder: "FlightRecorder | None"
    records: RotatedFile | None  # the file of access records; None: no records are written
    generation: Generation
    relay: Relay | None
    selection: SelectionService
    demand: DemandWatch
    overflow: "HostedOverflow | None"

    @classmethod
    def build(
        cls,
        settings: RouterSettings,
        shared: _Shared,
        backends: _Backends,
        overflow: "HostedOverflow | None",
        traces: "RequestTraces | None",
    ) -> "_Core":
        """Build the router and the services, without starting any task.

        Raises:
            ConfigurationRefused: A package or policy is not installed, a profile is invalid, or the recording or the file of
                access records cannot be written.
        """
        predictions = _predictions(settings)
        machine, recorder = _machine(settings, shared, [each for each in (predictions, traces) if each is not None])
        if traces is not None:
            traces.machine = machine
        if predictions is not None:
            predictions.machine = machine
            shared.metrics.registry.register(predictions)
        server = RouterServer(machine, _workers(backends, traces), shared.clock)
        shared.metrics.registry.register(
            RouterMetrics(
                server.status,
                tasks=lambda: len(asyncio.all_tasks()),
                refused=backends.check.refused,
                directory=lambda: backends.registry.directory_reachable,
                incompatible=shared.incompatible.present,
            )
        )
        demand = DemandWatch(
            server,
            settings.router_id,
            Incarnation(secrets.token_hex(8)),
            dict if predictions is None else predictions.speeds,
            overflow=overflow,
        )
        shared.metrics.registry.register(DemandMetrics(demand))
        tenant_secret = settings.tenant_secret.encode()
        access, records = _access_log(settings, shared, server)
        generation = Generation(
            server,
            backends.codecs,
            clock=shared.clock,
            tenants=shared.tenants,
            tenant_secret=tenant_secret,
            metrics=shared.metrics,
            threads=shared.threads,
            resume_tokens=_resume_tokens(settings),
            kept_answers=backends.own.answers,
            access=access,
            tracing=traces,
            image_loader=shared.image_fetcher,
        )
        return cls(
            server=server,
            recorder=recorder,
            records=records,
            generation=generation,
            relay=_relay(settings, shared, backends, server, generation, access, traces)
            if settings.openai_workers
            else None,
            selection=SelectionService(
                server, backends.selection_aware, settings.selection, tenant_secret=tenant_secret
            ),
            demand=demand,
            overflow=overflow,
        )


def _access_log(
    settings: RouterSettings, shared: _Shared, router: RouterServer
) -> tuple[AccessLog | None, RotatedFile | None]:
    """Build the access log and open the file of access records.

    The log is None if the settings demand neither log lines nor records, and the file is None if they demand no records.

    Raises:
        ConfigurationRefused: The file cannot be written.
    """
    wanted = settings.access_records
    if not settings.access_log and not wanted.path:
        return None, None
    if not wanted.path:
        return AccessLog(router, shared.clock, unix_nanoseconds, logs=True), None
    file = RotatedFile(
        Path(wanted.path),
        most_bytes=wanted.max_mib * MIB,
        kept=wanted.kept_files,
        field="access_records.path",
        clock=shared.clock,
    )
    if wanted.content:
        log.warning("access records contain prompts and answers", extra={"path": wanted.path})
    records = AccessRecordFile(file, content=wanted.content)
    shared.metrics.registry.register(records)
    return AccessLog(router, shared.clock, unix_nanoseconds, logs=settings.access_log, records=records), file


def _resume_tokens(settings: RouterSettings) -> ResumeTokens | None:
    """Build the object that signs resume tokens. Return None if clients have keys, but the settings have no secret to sign with."""
    secret = settings.prompt_secret or settings.tenant_secret
    if not secret and any(tenant.api_key_sha256 for tenant in settings.tenants.values()):
        return None
    return ResumeTokens(secret.encode(), settings.resume.token_seconds, unix_seconds)


def _predictions(settings: RouterSettings) -> "PredictionMetrics | None":
    """Build the object that predicts the times to the first token and between tokens, from the step times of profiles.

    Return None if the settings name no profiles.

    Raises:
        ConfigurationRefused: A profile is invalid.
    """
    if not settings.profiles:
        return None
    from fleet.frontend.metrics.predictions import PredictionMetrics, profile_lookup  # noqa: PLC0415 - few routers predict

    return PredictionMetrics(profile_lookup(settings.profiles))


def _traces(settings: RouterSettings, shared: _Shared, backends: _Backends, exporter: TraceExporter) -> "RequestTraces":
    """Build the object that makes the traces of this router's requests."""
    from fleet.frontend.metrics.tracing import TracingMetrics  # noqa: PLC0415 - few routers trace
    from fleet.tracing.request_traces import RequestTraces  # noqa: PLC0415 - few routers trace
    from kvstore.tracing.metrics import ExportMetrics  # noqa: PLC0415 - few routers trace

    traces = RequestTraces(
        settings.tracing, exporter, shared.clock, unix_nanoseconds, new_span_ids(), backends.own.keep_trace
    )
    shared.metrics.registry.register(TracingMetrics(traces.counts))
    shared.metrics.registry.register(ExportMetrics(exporter))
    return traces


def _workers(backends: _Backends, traces: "RequestTraces | None") -> Workers:
    if traces is None:
        return backends.selection_aware
    from fleet.tracing.request_traces import TracedWorkers  # noqa: PLC0415 - few routers trace

    return TracedWorkers(backends.selection_aware, traces)


def _machine(
    settings: RouterSettings, shared: _Shared, observers: Sequence[Observer]
) -> "tuple[RouterMachine, FlightRecorder | None]":
    """Build the router machine and its flight recorder. If the settings demand no recording, return None for the recorder.

    Raises:
        ConfigurationRefused: The policy is not installed, or the recording cannot be written.
    """
    seed, policy = secrets.randbits(63), open_policy(settings)
    observer = None if not observers else observers[0] if len(observers) == 1 else Observers(*observers)
    if settings.record:
        from fleet.recording.flight_recorder import open_recorded_machine  # noqa: PLC0415 - few routers record

        return open_recorded_machine(settings, seed, policy, shared.clock.now(), also=observer)
    if observer is None:
        return RouterMachine(settings, Random(seed), policy), None
    return ObservedMachine(settings, Random(seed), policy, observer=observer), None


def _relay(
    settings: RouterSettings,
    shared: _Shared,
    backends: _Backends,
    server: RouterServer,
    generation: Generation,
    access: AccessLog | None,
    traces: "RequestTraces | None",
) -> Relay:
    """Build the relay, which serves the models of external backends.

    Raises:
        ConfigurationRefused: `kv_events` need a package that is not installed.
    """
    by_model: dict[ModelName, list[OpenAiWorkerSettings]] = {}
    for index, worker in enumerate(settings.openai_workers):
        if worker.kv_events and find_spec("zmq") is None:
            raise missing_package(f"openai_workers[{index}].kv_events", "pyzmq", "kv-events")
        by_model.setdefault(ModelName(worker.model), []).append(worker)
    readers = {
        model: PromptReader(
            model,
            [each.compared_tokens for each in alike],
            backends.external_codecs.get(model),
            shared.clock,
            None if alike[0].kv_events else shared.secret_keys,
        )
        for model, alike in by_model.items()
    }
    for model, alike in by_model.items():
        for name in dict.fromkeys(name for each in alike for name in each.adapters):
            readers[name] = readers[model].for_adapter(name)
    metrics = RelayMetrics(backends.external.gauges)
    shared.metrics.registry.register(metrics)
    shared.metrics.times.append(metrics.times)
    return Relay(
        server,
        backends.external,
        readers,
        shared.tenants,
        metrics,
        shared.clock,
        shared.threads,
        id_prefix=secrets.token_hex(4),
        only=not settings.models,
        paths=RelayedPaths.of(settings.external_paths),
        is_running=generation.serves,
        named_ids=generation.relayed_ids,
        access=access,
        tracing=traces,
    )


def _shared_limits(settings: RouterSettings, shared: _Shared) -> "RedisRateLimits | None":
    """Build the rate limits that routers share through Redis. Return None if the settings name no Redis.

    If tenants have limits and there is no Redis, log which routers share these limits.

    Raises:
        ConfigurationRefused: The URL is not a Redis URL, or the client library is not installed.
    """
    if not settings.tenants_redis:
        if settings.counts_limits_without_redis:
            log.warning(
                "tenant limits hold for this router and its peers together; each other router counts for itself",
                extra={
                    "replicas": ",".join(settings.replicas) or "none",
                    "replicas_name": settings.replicas_name or "none",
                    "to_share_with_others": "set tenants_redis",
                },
            )
        return None
    try:
        from fleet.peers.redis_tenants import RedisRateLimits  # noqa: PLC0415 - optional

        limits = RedisRateLimits(settings.tenants_redis, shared.tenants, shared.clock)
    except ImportError as error:
        raise missing_package("tenants_redis", "redis", "redis") from error
    except ValueError as error:
        raise ConfigurationRefused(f"tenants_redis: {error}") from error
    shared.metrics.registry.register(limits)
    return limits


def _peers(settings: RouterSettings, shared: _Shared, backends: _Backends, core: _Core) -> PeerRouters | None:
    """Build the object that connects to peer routers. Return None if the settings have no `replicas_listen`.

    Raises:
        ConfigurationRefused: `replicas_credentials` cannot be used, or `replicas` or `replicas_name` are set without
            `replicas_listen`.
    """
    if not settings.replicas_listen:
        if settings.replicas or settings.replicas_name:
            field = "replicas" if settings.replicas else "replicas_name"
            raise ConfigurationRefused(
                f"{field}: {', '.join(settings.replicas) or settings.replicas_name} could not reach this router, because replicas_listen is empty:"
                f" set replicas_listen (and replicas_credentials beyond a Unix socket), or leave {field} out"
            )
        return None
    peers = PeerRouters(
        settings,
        core.server,
        backends.registry,
        core.selection,
        lambda: generate_latest(shared.metrics.registry).decode(),
        private=shared.secret_keys.fingerprint,
        limits=PeerLimits(shared.tenants, shared.clock) if settings.counts_limits_without_redis else None,
        overflow=core.overflow,
        incompatible=shared.incompatible,
    )
    core.selection.others = peers
    return peers


class _Parts(Struct, frozen=True, kw_only=True):
    """All parts of a router process except its ports."""

    shared: _Shared
    backends: _Backends
    core: _Core
    limits: "RedisRateLimits | None"
    peers: PeerRouters | None


async def _serve(settings: RouterSettings, parts: _Parts, announce: Announce) -> None:
    """Open the ports and serve until a stop signal.

    A process that does not share its ports opens them first. So if another process has these ports already,
    this process ends before it contacts workers. Its health port can also report from the beginning whether the process is ready.
    Processes that share ports (`share_ports`) open them last. If they listened earlier, they would get connections that
    another process of the router, which is ready, could serve at once.
    """
    async with _directory(settings) as directory, asyncio.TaskGroup() as tasks, AsyncExitStack() as opened:
        ports = _frontends(settings, parts)
        early = None if settings.share_ports else await opened.enter_async_context(ports)
        running = [tasks.create_task(each) for each in _background(parts, directory)]
        await _catch_up(parts, directory, settings.catch_up_seconds)
        async with stop_signal() as stop:
            frontends = early if early is not None else await opened.enter_async_context(ports)
            announce(frontends.endpoints())
            gc.freeze()  # collections need not visit the present objects, because most of them live as long as the process
            gc.set_threshold(GC_THRESHOLD)
            await stop.wait()
            parts.core.selection.drain()
            within = Nanos(settings.drain_timeout_ms * MILLISECOND)
            async with asyncio.TaskGroup() as draining:
                frontends.drain(draining, within)
                draining.create_task(parts.core.server.drain(within))
            for task in running:
                task.cancel()


@asynccontextmanager
async def _directory(settings: RouterSettings) -> "AsyncIterator[Directory | None]":
    """Open the directory in which the router finds workers. The `with` block gets None if the settings name no discovery.

    Raises:
        ConfigurationRefused: The directory needs a package that is not installed, or does not exist.
    """
    if settings.discovery is None:
        yield None
        return
    async with open_directory(settings.discovery) as directory:
        yield directory


def _background(parts: _Parts, directory: "Directory | None") -> list[Coroutine[Any, Any, Any]]:
    """Return the coroutines that run as long as the process serves."""
    backends, server = parts.backends, parts.core.server
    hear_own = server.hear if backends.combined is None else backends.combined.only_acceptable(server.hear)
    running: list[Coroutine[Any, Any, Any]] = [
        backends.registry.run(),
        server.run(),
        parts.shared.certificate_watch.run(),
        backends.own.run(hear_own),
        backends.external.run(server.hear),
    ]
    if parts.limits is not None:
        running.append(parts.limits.run())
    if parts.peers is not None:
        running.append(parts.peers.run())
    if directory is not None:
        running.append(backends.registry.follow(directory))
    return running


async def _catch_up(parts: _Parts, directory: "Directory | None", seconds: float) -> None:
    """Wait at most `seconds` for what this router has to know before it announces that it is ready.

    The wait ends when each external server has joined or failed its first health check, the processes that share the ports of
    this one have sent their state, the directory was read once, and the router has tried once to connect to each member.
    Other peer routers are not waited for. If the time is over before, log a warning.
    """
    backends = parts.backends
    waiting_for = "external backends"
    try:
        async with asyncio.timeout(seconds):
            await backends.external.asked()
            if parts.peers is not None:
                waiting_for = "peer routers"
                await parts.peers.caught_up()
            if directory is not None:
                waiting_for = "the directory of workers"
                await backends.registry.followed.wait()
            waiting_for = "workers"
            while not backends.own.tried(backends.registry.members):  # noqa: ASYNC110 - a short wait at the start
                await asyncio.sleep(0.01)
    except TimeoutError:
        log.warning("catch-up incomplete, serving starts", extra={"waited_for": waiting_for, "seconds": seconds})


class _Frontends(Struct, frozen=True, kw_only=True):
    """The listening ports of a router process."""

    http: HttpFrontend
    grpc: GrpcFrontend
    control: str  # address of the control port
    kserve: "KserveFrontend | None"
    picker: "EndpointPicker | None"

    def endpoints(self) -> dict[str, str]:
        """Return the address of each listening port, by its protocol or purpose."""
        endpoints = {"http": self.http.address, "grpc": self.grpc.address, "control": self.control}
        if self.http.health_address:
            endpoints["health"] = self.http.health_address
        if self.kserve is not None:
            endpoints["kserve"] = self.kserve.address
        if self.picker is not None:
            endpoints["endpoint_picker"] = self.picker.address
        return endpoints

    def drain(self, tasks: asyncio.TaskGroup, within: Nanos) -> None:
        """Refuse new requests, and start tasks that wait for the running answers, but not longer than `within`."""
        self.grpc.drain()
        if self.kserve is not None:
            self.kserve.drain()
        if self.picker is not None:
            tasks.create_task(self.picker.drain(within))
        tasks.create_task(self.http.drain(within / SECOND))


@asynccontextmanager
async def _frontends(settings: RouterSettings, parts: _Parts) -> AsyncIterator[_Frontends]:
    """Open all ports of the router, and close them at the end of the `with` block.

    Raises:
        ConfigurationRefused: An address is in use, or the Lease of the endpoint picker cannot be used.
    """
    shared, core, peers = parts.shared, parts.core, parts.peers
    warn_of_open_ports(open_router_ports(settings, keyed=shared.tenants.by_key))
    registry = GrpcRegistry(
        parts.backends.registry, peers, router_id=settings.router_id, incompatible=shared.incompatible
    )
    async with (
        open_http_frontend(
            settings.http_listen,
            settings.http,
            core.generation,
            shared.metrics.registry,
            shared.clock,
            core.relay,
            shared=settings.share_ports,
            processes=peers if peers is not None and peers.share_a_port else None,
            connection_seconds=settings.connection_seconds,
            health_listen=settings.health_listen,
            certificates=shared.certificates,
            health_certificates=shared.certificates if settings.tls.health else None,
            overflow=core.overflow,
            metrics_guards=metrics_guards(settings, keyed=shared.tenants.by_key),
        ) as http,
        GrpcFrontend.open(
            settings.grpc_listen,
            core.generation,
            shared.clock,
            shared=settings.share_ports,
            connection_seconds=settings.connection_seconds,
            max_held_bytes=settings.grpc_max_held_bytes,
            limits=settings.grpc,
            certificates=shared.certificates,
        ) as grpc,
        open_control_port(
            settings.control_listen,
            shared.control_access,
            core.server,
            grpc.ready,
            grpc_address=grpc.address,
            services={REGISTRY_SERVICE: registry.add, SELECTION_SERVICE: core.selection.add},
            store=settings.store,
            store_access=shared.store_access,
            shared=settings.share_ports,
            others=peers,
            demand=core.demand,
            overflow=core.overflow,
            incompatible=shared.incompatible,
        ) as control,
        _kserve(settings, parts) as kserve,
        _endpoint_picker(settings, parts) as picker,
    ):
        yield _Frontends(http=http, grpc=grpc, control=control, kserve=kserve, picker=picker)


def metrics_guards(settings: RouterSettings, *, keyed: bool) -> tuple[MetricsGuard, MetricsGuard]:
    """Return the guards of `http_listen` and `health_listen`, which check whether a caller may read the metrics.

    `keyed` is True if clients need a key.
    """
    access = settings.metrics_access
    asks = access.ask if access.ask is not None else keyed or bool(access.key_sha256)
    health, asks_on_health = settings.health_listen, access.ask_on_health
    if asks_on_health is None:
        asks_on_health = asks and not (health and is_local(health))
    return MetricsGuard(access.key_sha256, asks=asks), MetricsGuard(access.key_sha256, asks=asks_on_health)


@asynccontextmanager
async def _kserve(settings: RouterSettings, parts: _Parts) -> AsyncIterator["KserveFrontend | None"]:
    """Open the frontend of the Open Inference Protocol. The `with` block gets None if the settings name no address for it.

    Raises:
        ConfigurationRefused: The address is in use.
    """
    if not settings.kserve_listen:
        yield None
        return
    from fleet.frontend.kserve.service import KserveFrontend  # noqa: PLC0415 - most routers have none

    async with KserveFrontend.open(
        settings.kserve_listen,
        parts.core.generation,
        parts.shared.clock,
        shared=settings.share_ports,
        connection_seconds=settings.connection_seconds,
        max_held_bytes=settings.grpc_max_held_bytes,
        limits=settings.grpc,
        certificates=parts.shared.certificates,
    ) as frontend:
        yield frontend


@asynccontextmanager
async def _endpoint_picker(settings: RouterSettings, parts: _Parts) -> AsyncIterator["EndpointPicker | None"]:
    """Open the endpoint picker for gateways. The `with` block gets None if the settings name no endpoint picker.

    Raises:
        ConfigurationRefused: The address of the endpoint picker is in use, or its Lease cannot be used.
    """
    if settings.endpoint_picker is None:
        yield None
        return
    from fleet.gateway.endpoint_picker import EndpointPicker, open_endpoint_picker  # noqa: PLC0415 - most routers have none
    from fleet.gateway.prompts import ApiPromptReader  # noqa: PLC0415 - most routers have none

    shared, core = parts.shared, parts.core
    prompts = ApiPromptReader(core.generation, core.relay, shared.tenants, shared.clock)
    async with _picker_leadership(settings.endpoint_picker, shared.clock) as leadership:
        picker = EndpointPicker(settings.endpoint_picker, core.server, core.selection, prompts, leadership)
        async with open_endpoint_picker(
            settings.endpoint_picker,
            picker,
            shared=settings.share_ports,
            connection_seconds=settings.connection_seconds,
            certificates=shared.certificates.files
            if shared.certificates is not None and settings.tls.endpoint_picker
            else None,
        ):
            yield picker


@asynccontextmanager
async def _picker_leadership(
    settings: "EndpointPickerSettings", clock: SystemClock
) -> "AsyncIterator[PickerLeadership | None]":
    """Take part in the leader election of the endpoint pickers. The `with` block gets None if the settings name no Lease.

    Raises:
        ConfigurationRefused: The Lease needs a package that is not installed, or the API server is not configured.
    """
    if settings.lease is None:
        yield None
        return
    try:
        from fleet.gateway.lease import open_candidate  # noqa: PLC0415 - optional
    except ImportError as error:
        raise missing_package("endpoint_picker.lease", "kubernetes", "kubernetes") from error
    async with open_candidate(settings.lease, clock, utc_now) as candidate:
        yield candidate


SERVICE = ServiceDefinition(RouterSettings, run_router)
