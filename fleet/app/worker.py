"""Worker process: runs an engine with its services, or an additional rank of an engine that spans several hosts.

Each engine has an entry point in the group `workers.engines`: a function that starts the engine. For vLLM,
`workers.engines.vllm.launch` makes the arguments of the engine. A stop signal begins a drain (`workers.machine`, rule 1).
"""

import asyncio
import faulthandler
import os
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

import uvloop
from msgspec import structs
from prometheus_client import CollectorRegistry

from fleet.app.hub import fetch_worker_model
from fleet.app.process import Announce, ServiceDefinition, cancelled_by_signals, stop_signal
from fleet.core.clock import MILLISECOND, SECOND, Nanos
from fleet.core.errors import ConfigurationRefused
from fleet.core.ids import Incarnation
from fleet.core.system_clock import SystemClock, process_age, unix_nanoseconds
from fleet.frontend.text.response_templates import misspelt_parser
from fleet.frontend.text.tokenizer_check import folder_tokenizer_digests
from fleet.membership.discovery.open import open_directory
from fleet.membership.ports import Registry
from fleet.membership.registry import GrpcRegistries
from fleet.net.certificate_watch import certificate_watch, metrics_port_certificates
from fleet.net.control.access import ControlAccess, load_control_access
from fleet.net.metrics_port import metrics_port
from fleet.net.streams.identity import worker_identity
from fleet.tracing.process import new_span_ids, open_tracing
from kvstore.errors import BadCredentials, InvalidArgument, LayoutMismatch
from kvstore.security.certificates import CertificateFiles, CertificateWatch
from kvstore.security.open_ports import warn_of_open_ports
from kvstore.service.metrics_server import LoopCollector
from kvstore.tracing.exporter import TraceExporter
from kvstore.tracing.metrics import ExportMetrics
from workers.attempt_traces import AttemptTraces
from workers.connections.control_port import serve_control, serve_rank
from workers.connections.open_ports import open_worker_ports
from workers.connections.ranks import GroupLeader, joined_group, leading_group
from workers.connections.router_streams import serve_routers
from workers.machine import GRACE
from workers.metrics import WorkerMetrics
from workers.ports import BlockSaver, Engine, EngineFacts, EngineHung, WorkerReplaced
from workers.rank_rendezvous import common_settings_digest
from workers.registration import RegistryEntry, WorkerMembership
from workers.server import END_SECONDS, WorkerServer
from workers.settings import GroupSettings, WorkerSettings
from workers.start_phase import StartPhase, note_phase
from workers.store.embedded import open_embedded_store
from workers.store.evacuation import StoreEvacuator, open_evacuator
from workers.store.pin_keeper import StorePinKeeper, open_pin_keeper


async def run_worker(settings: WorkerSettings, announce: Announce) -> None:
    """Run one worker until a stop signal.

    Raises:
        ConfigurationRefused: The engine is unknown or refuses its settings, the model cannot be fetched, a credentials file,
            the store node or the directory cannot be used, or an address cannot be listened on.
        EngineDied: The engine ended by itself.
        EngineHung: The engine made no progress and was killed. The process ends at most `END_SECONDS` later.
        NodeEnded: The store node in this process ended by itself.
        WorkerReplaced: Another process has the worker's id.
    """
    if settings.group is not None and settings.group.rank:
        await _run_rank(settings, settings.group, announce)
        return
    identity = worker_identity("credentials", settings.credentials)
    identity.require("listen", settings.listen, on_loopback=False)
    warn_of_open_ports(open_worker_ports(settings))
    access = load_control_access("registry_credentials", settings.registry_credentials)
    control = load_control_access("control_credentials", settings.control_proof)
    scraped = metrics_port_certificates(settings.metrics_tls)
    watch = _certificate_watch(settings, scraped)
    incarnation = Incarnation(secrets.token_hex(8))
    async with AsyncExitStack() as held:
        await held.enter_async_context(cancelled_by_signals())
        model = await fetch_worker_model(settings, SystemClock())
        note_phase(StartPhase.LOAD)
        lead: GroupLeader | None = None
        if settings.group is not None:
            alike = common_settings_digest(structs.replace(settings, model_dir=model.named))
            lead = await held.enter_async_context(leading_group(settings.group, alike, SystemClock()))
            settings = structs.replace(settings, group=lead.group)
        settings = structs.replace(settings, model_dir=model.folder)
        furnished = await held.enter_async_context(open_embedded_store(settings, uvloop.new_event_loop))
        settings = furnished.settings
        try:
            engine = await held.enter_async_context(_open_engine(settings))
            keeper = await held.enter_async_context(_session_pin_keeper(settings, engine.facts))
            own_store = furnished.node is not None
            evacuator = await held.enter_async_context(_evacuator(settings, engine, leaving=own_store))
        except LayoutMismatch as error:
            raise ConfigurationRefused(f"{error.field}: {error}") from error
        except InvalidArgument as error:
            raise ConfigurationRefused(f"store: {error}") from error
        except BadCredentials as error:
            raise ConfigurationRefused(str(error)) from error
        tracing = held.enter_context(open_tracing(settings.tracing, "fleet-worker", settings.worker_id))
        digests = await asyncio.to_thread(folder_tokenizer_digests, settings.model_dir, engine.facts.block_tokens)
        worker = WorkerServer(
            settings,
            engine,
            SystemClock(),
            incarnation,
            keeper=keeper,
            tokenizer_digests=digests,
            evacuator=evacuator,
            store_goes=own_store,
            start_seconds=process_age(os.getpid()),
            observer=None if tracing is None else _attempt_traces(settings, tracing),
        )
        listening = await held.enter_async_context(serve_routers(worker, settings.listen, identity))
        endpoints = {"stream": listening}
        if furnished.node is not None:
            endpoints |= {"store": furnished.node.listen[0], "data": furnished.node.data_address}
        presence = WorkerMembership(
            [
                RegistryEntry(
                    registry=await held.enter_async_context(registry),
                    worker_id=settings.worker_id,
                    incarnation=incarnation,
                    address=settings.advertise or listening,
                    name_wait_seconds=settings.name_wait_seconds,
                )
                for registry in _registries(settings, access, lambda: worker.warm_blocks)
            ]
        )
        if settings.control_listen:
            endpoints["grpc"] = await held.enter_async_context(
                serve_control(worker, settings.control_listen, presence, control)
            )
        registry = CollectorRegistry()
        registry.register(LoopCollector(WorkerMetrics(worker)))
        registry.register(watch)
        if tracing is not None:
            registry.register(ExportMetrics(tracing))
        metrics = metrics_port(settings.metrics_listen, settings.metrics_access, registry, scraped)
        if address := await held.enter_async_context(metrics):
            endpoints["metrics"] = address
        await held.enter_async_context(presence.kept())
        async with asyncio.TaskGroup() as tasks, stop_signal() as stop:
            # This task ends when a drain is complete, or when the engine ends.
            serving = tasks.create_task(worker.run())
            serving.add_done_callback(lambda _: stop.set())
            watching = tasks.create_task(watch.run())
            serving.add_done_callback(lambda ended: _force_exit_after_hang(ended, END_SECONDS))
            presence.when_replaced(stop.set)
            announce(endpoints)
            if lead is not None:
                lead.when_asked_to_end(stop.set)
                lead.serving()
            await stop.wait()
            watching.cancel()
            tasks.create_task(presence.leave())
            await worker.drain(Nanos(settings.drain_timeout_ms * MILLISECOND))
            if lead is not None:
                lead.end()
        if presence.replaced:
            raise WorkerReplaced(presence.replaced)


def _certificate_watch(settings: WorkerSettings, scraped: CertificateFiles | None) -> CertificateWatch:
    """Return an object that checks the certificates of the worker's streams, its control port, and its calls to registries and stores.

    It checks regularly whether they end soon, and whether renewals can be used. `scraped` is the certificate of the port
    for metrics, which is checked too; None: that port has no TLS.

    Raises:
        ConfigurationRefused: A file cannot be used.
    """
    names = ("credentials", "control_credentials", "registry_credentials", "store_credentials")
    return certificate_watch({name: getattr(settings, name) for name in names}, scraped)


def _attempt_traces(settings: WorkerSettings, exporter: TraceExporter) -> AttemptTraces:
    return AttemptTraces(settings.worker_id, settings.model, exporter, SystemClock(), unix_nanoseconds, new_span_ids())


def _force_exit_after_hang(served: asyncio.Task[None], seconds: float) -> None:
    """End the process `seconds` after a hang of the engine, if it has not ended in the ordinary way before.

    Before the forced end, write the stacks of all threads to standard error.
    """
    if not served.cancelled() and isinstance(served.exception(), EngineHung):
        faulthandler.dump_traceback_later(seconds, exit=True)


async def _run_rank(settings: WorkerSettings, group: GroupSettings, announce: Announce) -> None:
    """Run an additional rank of an engine. This rank serves no requests. It ends with the lead rank or at a stop signal.

    Raises:
        ConfigurationRefused: The lead rank belongs to another group, the model cannot be fetched, the engine refuses its
            settings or cannot span hosts, or an address cannot be listened on.
        EngineDied: The rank ended by itself, the group did not form in time, or the connection to the lead rank was lost.
    """
    open_rank = _rank_opener(settings.engine)
    warn_of_open_ports(open_worker_ports(settings))
    scraped = metrics_port_certificates(settings.metrics_tls)
    watch = certificate_watch({}, scraped)
    async with AsyncExitStack() as held:
        await held.enter_async_context(cancelled_by_signals())
        model = await fetch_worker_model(settings, SystemClock())
        alike = common_settings_digest(structs.replace(settings, model_dir=model.named))
        follow = await held.enter_async_context(joined_group(group, alike, SystemClock()))
        stop = await held.enter_async_context(stop_signal())
        settings = structs.replace(settings, group=follow.group, model_dir=model.folder)
        endpoints: dict[str, str] = {}
        if settings.control_listen:
            ready = serve_rank(settings.control_listen, lambda: follow.serving)
            endpoints["grpc"] = await held.enter_async_context(ready)
        registry = CollectorRegistry()
        registry.register(watch)
        metrics = metrics_port(settings.metrics_listen, settings.metrics_access, registry, scraped)
        if address := await held.enter_async_context(metrics):
            endpoints["metrics"] = address
        follow.when_serving(lambda: announce(endpoints))
        await held.enter_async_context(open_rank(settings))
        async with asyncio.TaskGroup() as tasks:
            over = tasks.create_task(follow.over.wait())
            over.add_done_callback(lambda _: stop.set())
            watching = tasks.create_task(watch.run())
            await stop.wait()
            watching.cancel()
            follow.leave()
            # Wait until the lead rank has drained, but not longer than the drain timeout plus `GRACE`.
            await asyncio.wait([over], timeout=settings.drain_timeout_ms / 1000 + GRACE / SECOND)
            over.cancel()


def _registries(
    settings: WorkerSettings, access: ControlAccess, warm_blocks: Callable[[], int]
) -> list[AbstractAsyncContextManager[Registry]]:
    """Return the registries at which a worker registers. A registry that can show the number of warm blocks gets `warm_blocks`.

    Raises:
        ConfigurationRefused: `discovery` needs a package that is not installed, or names something that does not exist.
    """
    registries: list[AbstractAsyncContextManager[Registry]] = []
    if settings.registry:
        registries.append(GrpcRegistries(settings.registry, access=access))
    if settings.discovery is not None:
        registries.append(open_directory(settings.discovery, warm_blocks))
    return registries


@asynccontextmanager
async def _session_pin_keeper(settings: WorkerSettings, facts: EngineFacts) -> AsyncIterator[StorePinKeeper | None]:
    """Open the part that pins the blocks of paused sessions in the store.

    Yield None if there is no store, if the block layout of the engine is unknown, or if `hold_seconds` is 0.
    """
    if not settings.store or facts.kv is None or not settings.hold_seconds:
        yield None
        return
    async with open_pin_keeper(
        settings.store, facts.kv, settings.store_credentials, wait_seconds=_patience(facts)
    ) as keeper:
        yield keeper


@asynccontextmanager
async def _evacuator(
    settings: WorkerSettings, engine: Engine, *, leaving: bool
) -> AsyncIterator[StoreEvacuator | None]:
    """Open the part that evacuates warm blocks when the worker drains.

    Yield None if there is no store, if the block layout of the engine is unknown, or if `evacuate_bytes` is 0. `leaving` is
    True if the store node ends with this process.
    """
    facts = engine.facts
    if not settings.store or facts.kv is None or not settings.evacuate_bytes:
        yield None
        return
    async with open_evacuator(
        settings.store,
        facts.kv,
        settings.store_credentials,
        engine if isinstance(engine, BlockSaver) else None,
        SystemClock(),
        leaving=leaving,
        most_bytes=settings.evacuate_bytes,
        wait_seconds=_patience(facts),
    ) as evacuator:
        yield evacuator


def _patience(facts: EngineFacts) -> float | None:
    """Return the seconds to wait for the store node; None means the default time.

    The time is 0 if the node did not answer when the engine started, because it will probably not answer now either.
    """
    return None if facts.store_id is not None else 0.0


def _open_engine(settings: WorkerSettings) -> AbstractAsyncContextManager[Engine]:
    if settings.group is not None:
        _rank_opener(settings.engine)  # raises an error if the engine cannot span hosts; the result is not used
    if settings.engine == "simulated" and (
        refused := misspelt_parser(settings.tool_call_parser, settings.reasoning_parser)
    ):
        raise ConfigurationRefused(refused)
    open_engine: Callable[[WorkerSettings], AbstractAsyncContextManager[Engine]] = _engine(settings.engine).load()
    return open_engine(settings)


def _rank_opener(engine: str) -> Callable[[WorkerSettings], AbstractAsyncContextManager[None]]:
    """Return the function `open_rank` of the module of an engine. Only engines that can span hosts have it.

    Raises:
        ConfigurationRefused: The engine is not installed, or cannot span hosts.
    """
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


SERVICE = ServiceDefinition(WorkerSettings, run_worker)
