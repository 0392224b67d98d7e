"""Worker server: the async shell that connects an engine, the worker machine and the streams of routers.

A request flows in this order: routers -> `RouterSession.receive` -> machine -> engine -> `outputs()` -> machine ->
`RouterSession.offer` -> routers. A single task reads `outputs()` and carries each output as far as the sessions, so no
output waits for another task. Changes of the engine's cache are sent to every router. When a router connects, it is
first sent the list of all cached blocks. When the worker drains, a separate task evacuates its warm blocks.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import Never, Protocol, assert_never

import msgspec

from fleet.core.clock import MILLISECOND, SECOND, Clock, Nanos
from fleet.core.ids import Incarnation
from fleet.core.repeats import LogDeduplicator
from fleet.core.work import KeepTrace, LoadReport, Progress, Rejected, TokenizerDigests, WorkerDescription
from kvstore.protocol.versions import own_protocols
from workers.answer_keeper import AnswerKeeper
from workers.cache_view import CacheView
from workers.machine import GRACE, LifePhase, WorkerMachine
from workers.messages import (
    Abandon,
    CancelInEngine,
    CutStream,
    Drained,
    DrainRequested,
    EngineReady,
    EngineStepped,
    EngineStuck,
    Evacuate,
    EvacuationEnded,
    FactsChanged,
    RouterConnected,
    RouterGone,
    StreamId,
    Submit,
    Tell,
    WarnOfSharedRouterId,
    WorkerCommand,
    WorkerEvent,
    WorkerTicked,
)
from workers.ports import Engine, EngineDied, EngineFacts, EngineHung, Evacuator, Outlet, PinKeeper
from workers.router_session import RouterSession
from workers.settings import WorkerSettings
from workers.store.evacuation_priority import RecentPrompts
from workers.store.session_pins import SessionPinPolicy
from workers.watchdog import EngineHealth, Watchdog

log = logging.getLogger(__name__)

END_SECONDS = 10.0
"""Time that the process has to end after its engine was found to hang; it is enough to close the ports and the store. If
the process still runs after this time, its liveness probe fails, so that the process is killed."""


class WorkerObserver(Protocol):
    """Sees every event and command of a worker's machine. Its methods must return at once, and must not raise."""

    def __call__(self, now: Nanos, event: WorkerEvent, commands: Sequence[WorkerCommand], /) -> None:
        """Take notice of an event and the commands that follow from it; the commands are performed afterwards."""
        ...

    def keep_trace(self, request: KeepTrace) -> None:
        """Export the spans of attempts whose request a router has decided to trace after its end (tail sampling)."""
        ...


class WorkerServer:
    """Runs one worker: the owner calls `run`, and `open` for each router that connects."""

    def __init__(
        self,
        settings: WorkerSettings,
        engine: Engine,
        clock: Clock,
        incarnation: Incarnation,
        *,
        keeper: PinKeeper | None = None,
        tokenizer_digests: TokenizerDigests | None = None,
        evacuator: Evacuator | None = None,
        store_goes: bool = False,
        start_seconds: float = 0.0,
        observer: WorkerObserver | None = None,
    ) -> None:
        """Create a worker that is still starting.

        Args:
            settings: Settings of the worker.
            engine: The running engine.
            clock: The clock by which deadlines are checked.
            incarnation: The incarnation of this process.
            keeper: Pins the chains of paused sessions in the store; None: no chains are pinned.
            tokenizer_digests: Digests by which routers check that they and the worker have the same tokenizer; None:
                routers cannot check it.
            evacuator: Copies warm blocks when the worker drains; None: no blocks are copied.
            store_goes: True if the engine uses an embedded store, whose memory ends with this process.
            start_seconds: Time from the start of this process until now; 0 if it is not known.
            observer: Sees the events and commands of the machine, to trace attempts; None: attempts are not traced.
        """
        facts = self._facts = engine.facts
        self.description = WorkerDescription(
            worker_id=settings.worker_id,
            incarnation=incarnation,
            model=facts.model,
            role=settings.role,
            block_tokens=facts.block_tokens,
            max_model_len=facts.max_model_len,
            kv_blocks=facts.kv_blocks,
            max_running=facts.max_running,
            fingerprint=facts.fingerprint,
            kv_paths=facts.kv_paths,
            store_id=facts.store_id,
            engine=facts.name,
            kv=facts.kv,
            prefill_speed=settings.prefill_speed,
            decode_speed=settings.decode_speed,
            labels=settings.labels,
            adapters=facts.adapters,
            adapter_slots=facts.adapter_slots,
            tokenizer_digests=tokenizer_digests,
            keeps_forms=facts.keeps_forms,
            sampling_fields=facts.sampling_fields,
            continued_fields=facts.continued_fields,
            generation=settings.generation,
            start_seconds=start_seconds,
            parsers=facts.parsers,
            pooling=facts.pooling,
            protocols=own_protocols(),
            keeps_answers=settings.kept_answers_mib > 0,
        )
        self._settings = settings
        self.engine = engine
        self._clock = clock
        self._machine = WorkerMachine(
            role=settings.role,
            facts=facts,
            capacity=facts.max_running + settings.max_waiting,
            evacuates=evacuator is not None,
            store_goes=store_goes,
            kept=AnswerKeeper(settings.kept_answers_mib << 20, settings.kept_answers_seconds),
        )
        self._observer = observer
        self._evacuator = evacuator
        self._prompts = RecentPrompts()
        self._keeper = keeper
        self._pins = SessionPinPolicy(Nanos(round(settings.hold_seconds * SECOND))) if keeper is not None else None
        self._cache = CacheView()
        self._sessions: dict[StreamId, RouterSession] = {}
        self._streams = count()
        self._shared_ids = LogDeduplicator()
        self._cancelled_by_drain: int | None = None
        self._evacuate_by: Nanos | None = None
        self._evacuation_asked = asyncio.Event()
        self._gone = asyncio.Event()
        self._watchdog = Watchdog(settings.watchdog)
        self._health = EngineHealth.HEALTHY
        self._hung_at: Nanos | None = None

    @property
    def phase(self) -> LifePhase:
        return self._machine.phase

    @property
    def routers(self) -> int:
        """Number of connected routers."""
        return len(self._sessions)

    @property
    def held(self) -> int:
        """Number of attempts that were given to the engine and whose end it has not reported."""
        return self._machine.held

    @property
    def hung(self) -> bool:
        """True if the engine hangs: the worker accepts no more routers and requests, and the process ends."""
        return self._hung_at is not None

    @property
    def live(self) -> bool:
        """False if the engine hangs and the process has not ended within `END_SECONDS`, so that its supervisor must end it."""
        return self._hung_at is None or self._clock.now() - self._hung_at < END_SECONDS * SECOND

    @property
    def warm_blocks(self) -> int:
        """Number of blocks in the engine's prefix cache; these blocks are lost if this worker is removed."""
        return len(self._cache)

    async def run(self) -> None:
        """Serve until the worker has drained.

        Raises:
            EngineHung: The engine made no progress and was killed.
            EngineDied: The engine ended, so the process has to end too, and its supervisor starts another one.
        """
        self._absorb(EngineReady())
        log.info("worker serving", extra={"worker": self.description.worker_id, "engine": self.description.engine})
        try:
            async with asyncio.TaskGroup() as tasks:
                pumps = [
                    tasks.create_task(self._pump_outputs(), name="outputs"),
                    tasks.create_task(self._pump_cache(), name="cache"),
                    tasks.create_task(self._keep_time(), name="time"),
                    tasks.create_task(self._evacuate(), name="evacuation"),
                ]
                await self._gone.wait()
                for pump in pumps:
                    pump.cancel()
        except BaseExceptionGroup as group:
            if (died := group.subgroup(EngineDied)) is None:
                raise
            if (hung := group.subgroup(EngineHung)) is not None:
                # If the engine hung, this error is raised, and not the failures that have followed from the hang.
                raise EngineHung(f"{self.description.engine}: {hung.exceptions[0]}") from group
            raise EngineDied(f"{self.description.engine}: {died.exceptions[0]}") from group
        finally:
            for session in list(self._sessions.values()):
                if self.phase is LifePhase.GONE:
                    session.finish()
                else:
                    session.cut("the worker ends")

    def open(self, router_id: str, outlet: Outlet) -> RouterSession:
        """Open a session for a router, and send the router the worker's description and the list of cached blocks.

        The caller calls `close` when the stream has ended.
        """
        stream = StreamId(next(self._streams))
        session = RouterSession(
            stream,
            outlet,
            description=self.description,
            cache=self._cache.dump(),
            limit=self._settings.stream_buffer,
            absorb=self._absorb,
            keep_trace=None if self._observer is None else self._observer.keep_trace,
        )
        self._sessions[stream] = session
        session.offer(self.engine.load())
        log.info("router connected", extra={"router": router_id, "stream": stream, "cached_blocks": len(self._cache)})
        self._absorb(RouterConnected(stream=stream, router_id=router_id))
        session.flow()
        return session

    def close(self, session: RouterSession) -> None:
        """End the session of a router whose stream has ended, and cancel its requests."""
        self._sessions.pop(session.stream, None)
        session.drop()
        self._absorb(RouterGone(stream=session.stream))
        log.info("router disconnected", extra={"stream": session.stream})

    async def drain(self, timeout: Nanos) -> int:  # noqa: ASYNC109 - the machine watches this deadline
        """Reject new requests, and let running ones finish; return how many have not finished within `timeout`."""
        self._absorb(DrainRequested(deadline=Nanos(self._clock.now() + timeout)))
        async with asyncio.timeout((timeout + GRACE) / SECOND + 1):
            await self._gone.wait()
        assert self._cancelled_by_drain is not None
        return self._cancelled_by_drain

    async def _pump_outputs(self) -> Never:
        async for outputs in self.engine.outputs():
            self._absorb(EngineStepped(outputs=self._with_worker_id(outputs), lent=self.engine.lent))
            if self._keeper is not None and self._pins is not None:
                self._keeper.keep(self._pins.stepped(outputs, self._clock.now()))
        raise EngineDied("its outputs ended")

    async def _pump_cache(self) -> Never:
        async for events in self.engine.kv_events():
            self._cache.apply(events)
            changes = tuple(events)
            for session in list(self._sessions.values()):
                if not session.offer_changes(changes):
                    self._cut(session)
        raise EngineDied("its cache events ended")

    async def _keep_time(self) -> Never:
        """Send ticks to the machine, watch the engine, and report the load: when it changes, and at every heartbeat."""
        interval = self._settings.load_interval_ms
        heartbeat = self._settings.heartbeat_ms * MILLISECOND
        reported: LoadReport | None = None
        reported_at = Nanos(0)
        while True:
            self._absorb(WorkerTicked(lent=self.engine.lent))
            if (facts := self.engine.facts) != self._facts:
                self._describe_anew(facts)
            self._watch_engine()
            load, now = self.engine.load(), self._clock.now()
            if load != reported or now - reported_at >= heartbeat:
                reported, reported_at = load, now
                for session in list(self._sessions.values()):
                    if not session.offer(load):
                        self._cut(session)
            await asyncio.sleep(interval / 1000)

    def _describe_anew(self, facts: EngineFacts) -> None:
        """Send all routers the description again, because the engine has joined its store after the start."""
        self._facts = facts
        self.description = msgspec.structs.replace(self.description, store_id=facts.store_id, kv_paths=facts.kv_paths)
        log.info("worker description changed", extra={"store": facts.store_id, "kv_paths": facts.kv_paths})
        self._absorb(FactsChanged(facts=facts))
        for session in list(self._sessions.values()):
            if not session.offer(self.description):
                self._cut(session)

    def _watch_engine(self) -> None:
        """Check with the watchdog whether the engine hangs.

        Raises:
            EngineHung: The engine hangs. The routers' streams were closed, and the engine was killed.
        """
        if self.phase is LifePhase.GONE:
            return
        before, self._health = self._health, self._watchdog.look(self.engine.pulses(), self._clock.now())
        if self._health is EngineHealth.HEALTHY:
            if before is not EngineHealth.HEALTHY:
                log.info("engine makes progress again", extra={"worker": self.description.worker_id})
            return
        # An engine that a debugger has stopped does not hang. `traced` looks for debuggers of all processes of the engine, which
        # takes time, so it is called only if a hang is suspected.
        if (self._health is EngineHealth.HUNG or before is EngineHealth.HEALTHY) and self.engine.traced():
            self._watchdog.excuse()
            self._health = EngineHealth.HEALTHY
            return
        seconds = self._watchdog.waited / SECOND
        if self._health is EngineHealth.HUNG:
            self._absorb(EngineStuck())
            raise EngineHung(f"it holds work and made no step for {seconds:.1f} s; it was killed")
        if before is EngineHealth.HEALTHY:
            log.warning(
                "engine makes no progress",
                extra={"worker": self.description.worker_id, "seconds": round(seconds, 1)},
            )

    async def _evacuate(self) -> Never:
        """Evacuate warm blocks each time the machine commands it. Requests may still run meanwhile."""
        while True:
            await self._evacuation_asked.wait()
            self._evacuation_asked.clear()
            assert self._evacuator is not None
            assert self._evacuate_by is not None
            deadline = self._evacuate_by
            try:
                async with asyncio.timeout((deadline - self._clock.now()) / SECOND):
                    await self._evacuator.evacuate(self._prompts.all(), self._cache.names(), deadline)
            except TimeoutError:
                log.warning("evacuation ran out of time")
            except Exception:  # supervisor: any failure only means that other workers compute the missing blocks again
                log.exception("evacuation failed")
            self._absorb(EvacuationEnded())

    def _with_worker_id(self, outputs: Sequence[Progress | Rejected]) -> Sequence[Progress | Rejected]:
        """Add this worker's id to the handoffs among the outputs, because engines do not know the id."""
        if not any(isinstance(output, Progress) and output.handoff is not None for output in outputs):
            return outputs
        return [
            msgspec.structs.replace(
                output,
                handoff=msgspec.structs.replace(output.handoff, prefill_worker=self.description.worker_id),
            )
            if isinstance(output, Progress) and output.handoff is not None
            else output
            for output in outputs
        ]

    def _absorb(self, event: WorkerEvent) -> None:
        """Pass an event to the machine, and perform the commands that it returns."""
        now = self._clock.now()
        commands = self._machine.handle(event, now)
        if self._observer is not None:
            self._observer(now, event, commands)
        self._perform(commands)

    def _cut(self, session: RouterSession) -> None:
        self._perform(self._overflowed(session))

    def _perform(self, decided: Sequence[WorkerCommand]) -> None:
        commands = deque(decided)
        while commands:
            match commands.popleft():
                case Tell(stream=stream, message=message):
                    session = self._sessions.get(stream)
                    if session is not None and not session.offer(message):
                        commands.extend(self._overflowed(session))
                case Submit(start=start):
                    if self._pins is not None:
                        self._pins.began(start, self._clock.now())
                    if self._evacuator is not None:
                        self._prompts.note(start.tokens, start.salt)
                    self.engine.submit(start)
                case CancelInEngine(request_id=request_id):
                    self.engine.cancel(request_id)
                case CutStream(stream=stream):
                    if (cut := self._sessions.pop(stream, None)) is not None:
                        cut.cut("the router connected again")
                case WarnOfSharedRouterId(router_id=router_id):
                    self._warn_of_shared_id(router_id)
                case Evacuate(deadline=deadline):
                    self._evacuate_by = deadline
                    self._evacuation_asked.set()
                case Drained(cancelled=cancelled, unfetched=unfetched):
                    log.info("worker drained", extra={"cancelled": cancelled, "unfetched": unfetched})
                    self._cancelled_by_drain = cancelled
                    self._gone.set()
                case Abandon(lost=lost):
                    self._abandon(lost)
                case unknown:
                    assert_never(unknown)

    def _warn_of_shared_id(self, router_id: str) -> None:
        cause = "probably two routers have this id, and each cuts the other's stream and requests: set another router_id in one of them"
        if self._shared_ids.is_new(router_id, cause, self._clock.now()):
            log.warning("router connects again and again", extra={"router": router_id, "cause": cause})

    def _abandon(self, lost: int) -> None:
        """End all streams first, so that routers continue the requests on other workers; then kill the engine."""
        self._hung_at = self._clock.now()
        for session in self._sessions.values():
            session.cut("its engine hangs")
        self._sessions.clear()
        log.error("engine hangs and is killed", extra={"worker": self.description.worker_id, "requests": lost})
        self.engine.kill()
        self._cancelled_by_drain = lost
        self._gone.set()

    def _overflowed(self, session: RouterSession) -> list[WorkerCommand]:
        """Close the stream of a router that reads too slowly; return the machine's commands that cancel the router's attempts."""
        log.warning("router reads too slowly, stream cut", extra={"stream": session.stream})
        self._sessions.pop(session.stream, None)
        session.cut("the router does not read fast enough")
        now, gone = self._clock.now(), RouterGone(stream=session.stream)
        commands = self._machine.handle(gone, now)
        if self._observer is not None:
            self._observer(now, gone, commands)
        return commands
