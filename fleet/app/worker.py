"""A worker's process: an engine and the service around it, or a further rank of an engine over several nodes."""

import asyncio
import faulthandler
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

import uvloop
from msgspec import structs

from fleet.app.process import Announce, cancelled_by_signals, stop_signal
from fleet.core.clock import MILLISECOND, SECOND, Nanos
from fleet.core.errors import ConfigurationRefused
from fleet.core.ids import Incarnation
from fleet.core.system_clock import SystemClock
from kvstore.errors import LayoutMismatch
from workers.machine import GRACE
from workers.ports import Engine, EngineFacts, EngineHung, WorkerReplaced
from workers.rank_rendezvous import common_settings_digest
from workers.settings import GroupSettings, WorkerSettings

if TYPE_CHECKING:
    from fleet.net.control.access import ControlAccess
    from workers.connections.ranks import Lead
    from workers.ports import Registry
    from workers.store.evacuation import StoreEvacuator
    from workers.store.pin_keeper import StorePinKeeper


async def run_worker(settings: WorkerSettings, announce: Announce) -> None:
    """One engine and the service around it.

    Raises:
        ConfigurationRefused: The engine is unknown or refuses its settings, the model cannot be fetched, or the address cannot be
            listened on.
        EngineDied: The engine ended by itself.
        EngineHung: The engine made no progress, and was killed. The process ends within `END_SECONDS` from then on.
        NodeEnded: The store node in this process did.
        WorkerReplaced: Another process has its id.
    """
    from fleet.app.hub import fetch_worker_model  # noqa: PLC0415
    from fleet.frontend.text.tokenizer_check import folder_tokenizer_digests  # noqa: PLC0415 - each process loads its own part only
    from fleet.net.control.access import load_control_access  # noqa: PLC0415
    from fleet.net.streams.identity import worker_identity  # noqa: PLC0415
    from workers.connections.control_port import serve_control  # noqa: PLC0415
    from workers.connections.router_streams import serve_routers  # noqa: PLC0415
    from workers.registration import RegistryEntry, WorkerMembership  # noqa: PLC0415
    from workers.server import END_SECONDS, WorkerServer  # noqa: PLC0415
    from workers.store.embedded import open_embedded_store  # noqa: PLC0415

    if settings.group is not None and settings.group.rank:
        await _run_rank(settings, settings.group, announce)
        return
    identity = worker_identity("credentials", settings.credentials)
    identity.require("listen", settings.listen, on_loopback=False)
    access = load_control_access("registry_credentials", settings.registry_credentials)
    control = load_control_access("control_credentials", settings.control_proof)
    incarnation = Incarnation(secrets.token_hex(8))
    async with AsyncExitStack() as held:
        await held.enter_async_context(cancelled_by_signals())
        model = await fetch_worker_model(settings, SystemClock())
        lead: Lead | None = None
        if settings.group is not None:
            from workers.connections.ranks import leading  # noqa: PLC0415 - few workers have a group

            alike = common_settings_digest(structs.replace(settings, model_dir=model.named))
            lead = await held.enter_async_context(leading(settings.group, alike, SystemClock()))
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
        golden = await asyncio.to_thread(folder_tokenizer_digests, settings.model_dir, engine.facts.block_tokens)
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
        await held.enter_async_context(presence.kept())
        async with asyncio.TaskGroup() as tasks, stop_signal() as stop:
            serving = tasks.create_task(worker.run())  # ends with a drain, by whomever, or with the engine
            serving.add_done_callback(lambda _: stop.set())
            serving.add_done_callback(lambda ended: _force_exit_after_hang(ended, END_SECONDS))
            presence.when_replaced(stop.set)
            announce(endpoints)
            if lead is not None:
                lead.when_asked_to_end(stop.set)
                lead.serving()
            await stop.wait()
            tasks.create_task(presence.leave())
            await worker.drain(Nanos(settings.drain_timeout_ms * MILLISECOND))
            if lead is not None:
                lead.end()
        if presence.replaced:
            raise WorkerReplaced(presence.replaced)


def _force_exit_after_hang(served: "asyncio.Task[None]", seconds: float) -> None:
    """End the process after a hang of the engine even if the orderly end hangs too; what its threads do then is on standard error."""
    if not served.cancelled() and isinstance(served.exception(), EngineHung):
        faulthandler.dump_traceback_later(seconds, exit=True)


async def _run_rank(settings: WorkerSettings, group: GroupSettings, announce: Announce) -> None:
    """A node's part of an engine that another node leads: it serves nobody, and is there as long as the leader is.

    Raises:
        ConfigurationRefused: The leader is of another group, the model cannot be fetched, or the engine cannot be spread or refuses its settings.
        EngineDied: Its part of the engine ended by itself, or the leader is gone.
    """
    from fleet.app.hub import fetch_worker_model  # noqa: PLC0415
    from workers.connections.control_port import serve_rank  # noqa: PLC0415 - few workers have a group
    from workers.connections.ranks import following  # noqa: PLC0415

    open_rank = _rank_opener(settings.engine)
    async with AsyncExitStack() as held:
        await held.enter_async_context(cancelled_by_signals())
        model = await fetch_worker_model(settings, SystemClock())
        alike = common_settings_digest(structs.replace(settings, model_dir=model.named))
        follow = await held.enter_async_context(following(group, alike, SystemClock()))
        stop = await held.enter_async_context(stop_signal())
        settings = structs.replace(settings, group=follow.group, model_dir=model.folder)
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
    settings: WorkerSettings, access: "ControlAccess", warm_blocks: Callable[[], int]
) -> "list[AbstractAsyncContextManager[Registry]]":
    """Where a worker is to say that it is here, and, where that can be told, how many blocks it would take along.

    Raises:
        ConfigurationRefused: `discovery` needs what is not installed, or names what is not there.
    """
    registries: list[AbstractAsyncContextManager[Registry]] = []
    if settings.registry:
        from fleet.membership.registry import GrpcRegistries  # noqa: PLC0415 - each process loads its own part only

        registries.append(GrpcRegistries(settings.registry, access=access))
    if settings.discovery is not None:
        from fleet.membership.discovery.open import open_directory  # noqa: PLC0415

        registries.append(open_directory(settings.discovery, warm_blocks))
    return registries


@asynccontextmanager
async def _session_pin_keeper(settings: WorkerSettings, facts: EngineFacts) -> AsyncIterator["StorePinKeeper | None"]:
    """What keeps the chains of sessions that wait; None where there is no store, or it is not to."""
    from workers.store.pin_keeper import open_pin_keeper  # noqa: PLC0415 - each process loads its own part only

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
) -> AsyncIterator["StoreEvacuator | None"]:
    """What brings warm blocks away when the worker drains; None where there is no store, or it is not to."""
    from workers.ports import BlockSaver  # noqa: PLC0415
    from workers.store.evacuation import open_evacuator  # noqa: PLC0415 - each process loads its own part only

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
    """Return how long to wait for the store node at the start: not again, where it has not answered the engine."""
    return None if facts.store_id is not None else 0.0


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
