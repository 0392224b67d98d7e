"""Worker process: runs production's worker machine, and the parts of its simulated engine, in virtual time.

This module runs the same parts as `fleet serve worker`: the batch, the sequences with their bytes, the block memory, the
lender and the borrower of handoffs, the watchdog, the cache view and the sessions of routers. This module replaces
`workers.server`, `workers.engines.simulated.engine` and `workers.registration`: it steps the batch, moves blocks, and
keeps the worker registered.
"""

from collections.abc import Callable, Sequence
from itertools import count, takewhile
from operator import itemgetter
from random import Random

import google_crc32c
import msgspec

from fleet.app.fault_simulation.block_truth import (
    BLOCK_BYTES,
    FACTS,
    LIMITS,
    REBUILDING_FACTS,
    REBUILDING_WORKERS,
    SHAPE,
    BlockTruth,
)
from fleet.app.fault_simulation.fault_points import FaultPoint, FaultPoints
from fleet.app.fault_simulation.promises import Promise, PromiseBroken
from fleet.app.fault_simulation.router_process import ROUTER, Malformed, RegistrationAnswer
from fleet.app.fault_simulation.store_process import (
    STORE,
    CondemnCall,
    MatchAnswer,
    MatchCall,
    PublishCall,
    ReadCall,
    ReleaseCall,
    ReserveCall,
    WriteCall,
)
from fleet.app.fault_simulation.virtual_network import ConnectionEnd, Listener, VirtualNetwork
from fleet.app.fault_simulation.virtual_process import Once, VirtualProcess
from fleet.core.clock import MILLISECOND, SECOND, Nanos
from fleet.core.errors import Reason
from fleet.core.ids import Incarnation, WorkerId
from fleet.core.requests import Finish, Source, state_fields
from fleet.core.roles import KvPath, Phase, Role
from fleet.core.work import (
    Cancel,
    Handoff,
    KvEvents,
    Progress,
    Rejected,
    RouterHello,
    Start,
    WorkerDescription,
    WorkerMessage,
)
from fleet.membership.messages import Deregister, Register
from fleet.sim.kernel import Kernel
from kvstore.block import BlockHash
from kvstore.messages import LeaseId, Slot, WriteReservation
from workers.cache_view import CacheView
from workers.engines.simulated.batch import Batch, StepOutcome
from workers.engines.simulated.direct_transfer import (
    BlockBorrower,
    BlockLender,
    BlockLoan,
    BlockRequest,
    DirectParams,
    LentBlock,
)
from workers.engines.simulated.sequence import Sequence as Running
from workers.machine import LifePhase, WorkerMachine
from workers.messages import (
    Abandon,
    CancelInEngine,
    CutStream,
    Drained,
    DrainRequested,
    EngineReady,
    EngineStepped,
    EngineStuck,
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
from workers.ports import Pulse
from workers.router_session import RouterSession
from workers.watchdog import EngineHealth, Watchdog, WatchdogSettings

CAPACITY = LIMITS.max_running + 4
TICK = Nanos(250 * MILLISECOND)
HEARTBEAT = Nanos(1 * SECOND)
START = Nanos(400 * MILLISECOND)
STEP_BASE = Nanos(25 * MILLISECOND)
STEP_PER_PROMPT_TOKEN = Nanos(MILLISECOND // 2)
HANDOFF_LEASE = Nanos(500 * MILLISECOND)
TRANSFER_TIME = Nanos(30 * MILLISECOND)
LOAD_TIMEOUT = Nanos(1500 * MILLISECOND)
STORE_LEASE = Nanos(500 * MILLISECOND)
WRITE_TIME = Nanos(10 * MILLISECOND)
CALL_TIMEOUT = Nanos(1 * SECOND)
MATCH_AGAIN = Nanos(40 * MILLISECOND)
DEATH_WITHIN = Nanos(25 * MILLISECOND)
NAME_WAIT = Nanos(6 * SECOND)
FIRST_PAUSE, LONGEST_PAUSE, HELD_PAUSE = Nanos(SECOND // 10), Nanos(2 * SECOND), Nanos(SECOND // 2)
DRAINING = (LifePhase.DRAINING, LifePhase.GONE)


class _StreamOutlet:
    """Sends the messages of a router's session over a virtual connection. Faults may damage or drop some of the messages."""

    full = False

    def __init__(self, worker: "WorkerProcess", end: ConnectionEnd):
        self._worker, self._end = worker, end

    def put(self, message: WorkerMessage) -> None:
        if self._worker.skips and isinstance(message, KvEvents) and message.sequence:
            self._worker.skips -= 1  # a fault drops this message
        elif self._worker.spoils and not isinstance(message, WorkerDescription):
            self._worker.spoils -= 1
            self._end.send(Malformed())
        else:
            self._end.send(message)

    def end(self, why: str) -> None:  # noqa: ARG002 - the cause is only for logs
        self._end.close()


class WorkerProcess(VirtualProcess):
    """Runs one incarnation of a worker in virtual time."""

    def __init__(
        self,
        kernel: Kernel,
        network: VirtualNetwork,
        points: FaultPoints,
        truth: BlockTruth,
        chance: Random,
        *,
        name: str,
        worker_id: WorkerId,
        role: Role,
        incarnation: int,
        exited: Callable[["WorkerProcess"], None],
    ):
        super().__init__(kernel, name)
        self.role = role
        self.worker_id = worker_id
        self.incarnation = Incarnation(f"{name}-{incarnation}")
        facts = REBUILDING_FACTS if worker_id in REBUILDING_WORKERS else FACTS
        self.machine = WorkerMachine(role=role, facts=facts, capacity=CAPACITY)
        self.batch = Batch(LIMITS, loads=lambda _: True)
        self.lender = BlockLender(self.batch.blocks, HANDOFF_LEASE)
        self.hangs = False  # True while the engine hangs; faults set this field and the next ones
        self.fails = 0  # how many of the next attempts will fail in the engine
        self.spoils = 0  # how many of the next messages to the router will be malformed; descriptions are spared
        self.skips = 0  # how many of the next messages with KV events will be lost; the first one of a stream is spared
        # Stages (`schedule.STAGES`); when this process reaches one of them, it will be killed.
        self.dies_at: set[str] = set()
        # Stages with durations; when this process reaches one of them, it will be frozen for the duration.
        self.stops_at: dict[str, Nanos] = {}
        self.damages = 0  # how many of the next answers to borrowers will have all their blocks damaged on the way
        self._points, self._truth, self._network = points, truth, network
        self._random = chance.random
        self._exited = exited
        self._description = WorkerDescription(
            worker_id=worker_id,
            incarnation=self.incarnation,
            model=FACTS.model,
            role=role,
            block_tokens=FACTS.block_tokens,
            max_model_len=FACTS.max_model_len,
            kv_blocks=FACTS.kv_blocks,
            max_running=FACTS.max_running,
            fingerprint=FACTS.fingerprint,
            kv_paths=FACTS.kv_paths,
            store_id=FACTS.store_id,
            engine=FACTS.name,
            kv=FACTS.kv,
            continued_fields=facts.continued_fields,
        )
        self._cache = CacheView()
        self._sessions: dict[StreamId, tuple[RouterSession, ConnectionEnd]] = {}
        self._streams = count()
        self._leases = count()
        self._ended: list[Progress | Rejected] = []
        self._stepping = False
        self._steps = self._step_tokens = 0
        self._waits = True
        self._woken = False
        self._pulling = 0
        self._reading = 0
        self._writing = 0
        self._watchdog = Watchdog(WatchdogSettings(floor_seconds=2.0, ceiling_seconds=4.0))
        self._refusals = 0
        self._held_since: Nanos | None = None
        self._registered = False
        self._pause = FIRST_PAUSE
        self.after(START, self._start)

    def _start(self) -> None:
        self._absorb(EngineReady())
        self._network.listeners[self.name] = Listener(process=self, accept=self._accept, handle=_no_calls)
        self._register()
        self.after(TICK, self._tick)
        self.after(HEARTBEAT, self._report_load)

    # Registration at the router.

    def _register(self) -> None:
        if self.machine.phase in DRAINING:
            return
        request = Register(worker_id=self.worker_id, incarnation=self.incarnation, address=self.name)
        self._network.call(self, ROUTER, request, self._register_answered, self._register_failed, CALL_TIMEOUT)

    def _register_answered(self, answer: RegistrationAnswer) -> None:
        if self.machine.phase in DRAINING:
            return
        if answer.lease is not None:
            self._registered, self._held_since, self._pause = True, None, FIRST_PAUSE
            self.after(answer.lease // 3, self._register)
            return
        if self._held_since is None:
            self._held_since = self.now
        if answer.superseded or self._registered or self.now - self._held_since >= NAME_WAIT:
            self._exit()
        else:
            self.after(HELD_PAUSE, self._register)

    def _register_failed(self, silent: bool) -> None:  # noqa: ARG002 - both kinds of failure are treated alike
        self._points.reach(FaultPoint.REGISTRY_AWAY)
        pause, self._pause = self._pause, Nanos(min(2 * self._pause, LONGEST_PAUSE))
        self.after(pause, self._register)

    # Streams from routers.

    def _accept(self, end: ConnectionEnd) -> None:
        def first(message: object) -> None:
            if isinstance(message, RouterHello):
                self._open(end, message)
            else:
                end.received = lambda request: self._lend(end, request)
                self._lend(end, message)

        end.received = first

    def _open(self, end: ConnectionEnd, hello: RouterHello) -> None:
        stream = StreamId(next(self._streams))
        session = RouterSession(
            stream,
            _StreamOutlet(self, end),
            description=self._description,
            cache=self._cache.dump(),
            limit=1000,
            absorb=self._absorb,
        )
        self._sessions[stream] = session, end

        def received(message: object) -> None:
            assert isinstance(message, Start | Cancel)
            session.receive(message)

        def ended() -> None:
            if self._sessions.pop(stream, None) is not None:
                self._absorb(RouterGone(stream=stream))

        end.received, end.ended = received, ended
        session.offer(self.batch.load)
        self._absorb(RouterConnected(stream=stream, router_id=hello.router_id))
        session.flow()

    def _report_load(self) -> None:
        for session, _ in list(self._sessions.values()):
            session.offer(self.batch.load)
        self.after(HEARTBEAT, self._report_load)

    # Events and commands of the worker machine.

    def _absorb(self, event: WorkerEvent) -> None:
        for command in self.machine.handle(event, self.now):
            self._perform(command)
        self.machine.check()

    def _perform(self, command: WorkerCommand) -> None:
        match command:
            case Tell():
                session = self._sessions.get(command.stream)
                if isinstance(command.message, Rejected) and command.message.reason is Reason.DRAINING:
                    self._points.reach(FaultPoint.REFUSED_WHILE_DRAINING)
                if session is not None:
                    session[0].offer(command.message)
            case Submit():
                self._submit(command.start)
            case CancelInEngine():
                if self.batch.remove(command.request_id) is not None:
                    self._ended.append(Progress(request_id=command.request_id, finish=Finish.CANCELLED))
                    self._wake()
            case CutStream():
                self._points.reach(FaultPoint.OLDER_STREAM_CUT)
                cut = self._sessions.pop(command.stream, None)
                if cut is not None:
                    cut[0].cut("the router has connected again")
            case WarnOfSharedRouterId():
                pass  # ignored, because the simulation has no log
            case Drained():
                self._points.reach(FaultPoint.DRAIN_GAVE_UP if command.cancelled else FaultPoint.DRAINED)
                for finished, _ in list(self._sessions.values()):
                    finished.finish()
                self._exit()
            case Abandon():
                self._points.reach(FaultPoint.ENGINE_STUCK)
                self._exit()
            case _:
                raise AssertionError(command)

    def drain(self, within: Nanos) -> None:
        """Deregister the worker and let it drain, as a worker's process does after SIGTERM."""
        if self.machine.phase is LifePhase.GONE:
            return
        request = Deregister(worker_id=self.worker_id, incarnation=self.incarnation)
        self._network.call(self, ROUTER, request, lambda _: None, lambda _: None, CALL_TIMEOUT)
        self._absorb(DrainRequested(deadline=Nanos(self.now + within)))

    def _tick(self) -> None:
        if self.lender.expire(self.now):
            self._points.reach(FaultPoint.LEASE_EXPIRED)
            self._wake()
        self._absorb(WorkerTicked(lent=len(self.lender.leases)))
        if not self.alive:
            return
        pulse = Pulse(steps=self._steps, tokens=self._step_tokens, working=not self._waits)
        if self._watchdog.look((pulse,), self.now) is EngineHealth.HUNG:
            self._absorb(EngineStuck())
            return
        self.after(TICK, self._tick)

    # Steps of the engine.

    def _submit(self, start: Start) -> None:
        if self.fails:
            self.fails -= 1
            self._points.reach(FaultPoint.ENGINE_FAILED)
            self._ended.append(Rejected(request_id=start.request_id, reason=Reason.INTERNAL, message="a fault"))
        else:
            self._points.reach(
                FaultPoint.STATE_REBUILT, start.generated_tokens > 0 and bool(state_fields(start.sampling))
            )
            self.batch.add(Running(start, SHAPE))
        self._wake()

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            self.after(0, self._go_on)

    def _go_on(self) -> None:
        """Report what has changed, and begin the next engine step if there is something to compute.

        While a step is running, do neither: the end of the step calls this method again.
        """
        self._woken = False
        if self._stepping:
            return
        plan = self.batch.plan()
        for sequence in self.batch.take_loads():
            self._load(sequence)
        self._tell_changes()
        self._flush()
        if plan is None or not self.alive:
            self._waits = True
            return
        self._waits = False
        self._steps += 1
        self._step_tokens = plan.prompt_tokens + plan.decodes
        self._stepping = True
        self._stage("prefill" if plan.prompt_tokens else "decode")

        def end() -> None:
            if self.hangs:  # an engine that hangs never ends its step
                return
            self._stepping = False
            for outcome in self.batch.perform(plan):
                self._conclude(outcome)
            self._go_on()

        self.after(STEP_BASE + STEP_PER_PROMPT_TOKEN * plan.prompt_tokens, end)

    def _tell_changes(self) -> None:
        if not self.batch.memory.changed():
            return
        events = self.batch.memory.take_events()
        self._cache.apply(events)
        for session, _ in list(self._sessions.values()):
            session.offer_changes(events)

    def _flush(self) -> None:
        if self._ended:
            ended, self._ended = self._ended, []
            self._absorb(EngineStepped(outputs=ended, lent=len(self.lender.leases)))

    def _conclude(self, outcome: StepOutcome) -> None:
        sequence, sampled = outcome.sequence, outcome.sampled
        start = sequence.start
        if outcome.filled and not (start.phase is Phase.PREFILL and start.kv_path is KvPath.STORE):
            self._write({name: bytes(sequence.blocks[name]) for name in outcome.filled}, lambda: None)
        if sampled is None:
            return
        progress = Progress(
            request_id=start.request_id,
            token_ids=(sampled.token,),
            finish=sampled.finish,
            kv=sequence.report() if sampled.finish is not None or sequence.generated == 1 else None,
        )
        if start.phase is not Phase.PREFILL:
            self._ended.append(progress)
        elif start.kv_path is KvPath.STORE:
            blocks = {name: bytes(content) for name, content in sequence.blocks.items()}
            self._write(blocks, lambda: self._hand_off(sequence, progress, b"{}"))
        else:
            self.batch.name(sequence)
            lease = ""
            if sequence.blocks:
                lease = f"{self.incarnation}/{next(self._leases)}"
                self._stage("lend")
                self.lender.lend(lease, sequence.blocks, self.now)
            params = msgspec.json.encode(DirectParams(address=self.name, lease=lease))
            self._hand_off(sequence, progress, params)

    def _hand_off(self, sequence: Running, last: Progress, params: bytes) -> None:
        start = sequence.start
        if self.batch.sequences.get(start.request_id) is not sequence:
            return  # the attempt was cancelled meanwhile
        self.batch.remove(start.request_id)
        assert start.kv_path is not None
        handoff = Handoff(
            kv_path=start.kv_path,
            prefill_worker=self.worker_id,
            fingerprint=FACTS.fingerprint,
            num_tokens=len(sequence.blocks) * FACTS.block_tokens,
            params=params,
            kv=FACTS.kv,
        )
        self._ended.append(msgspec.structs.replace(last, handoff=handoff))
        self._wake()

    # Blocks from prefill workers and from the store.

    def _load(self, sequence: Running) -> None:
        names = sequence.reusable_names[len(sequence.blocks) :]
        handoff = sequence.start.handoff
        if handoff is not None and handoff.kv_path is KvPath.DIRECT:
            self._pull(sequence, names, msgspec.json.decode(handoff.params, type=DirectParams), handoff.prefill_worker)
        elif names:
            self._read_store(sequence, names)
        else:
            self.after(0, lambda: self._accept_blocks(sequence, names, [], Source.STORE, ""))

    def _accept_blocks(
        self, sequence: Running, names: Sequence[BlockHash], blocks: Sequence[bytes], source: Source, origin: str
    ) -> None:
        for name, content in zip(names, blocks, strict=False):
            if not self._truth.is_right(name, content):
                raise PromiseBroken(Promise.RIGHT_BLOCKS, f"{self.name} uses a wrong block {name.hex()} of {source}")
        if blocks and sequence.start.handoff is not None:
            direct = source is Source.DIRECT
            self._points.reach(FaultPoint.HANDED_OVER_DIRECT if direct else FaultPoint.HANDED_OVER_BY_STORE)
        if self.batch.accept(sequence, blocks, source, origin, {}):
            self._wake()

    def _pull(self, sequence: Running, names: Sequence[BlockHash], params: DirectParams, lender: WorkerId) -> None:
        borrower = BlockBorrower(params.lease, names, BLOCK_BYTES)
        once = Once()
        self._pulling += 1
        self._stage("pull")

        def finish(blocks: Sequence[bytes]) -> None:
            if once.first():
                self._pulling -= 1
                self._accept_blocks(sequence, names, blocks, Source.DIRECT, lender)

        def fail() -> None:
            if not once.over:
                self._points.reach(FaultPoint.PULL_FAILED)
                borrower.fail()
                finish([])

        def opened(end: ConnectionEnd) -> None:
            if once.over:
                end.close()
                return

            def received(loan: object) -> None:
                assert isinstance(loan, BlockLoan)
                if once.over:
                    return
                blocks = borrower.receive(loan)
                lent = sum(1 for _ in takewhile(lambda each: each is not None, loan.blocks))
                self._points.reach(FaultPoint.PULL_TOO_LATE, lent == 0)
                self._points.reach(FaultPoint.BLOCK_DAMAGED, len(blocks) < lent)
                end.send(borrower.end())
                end.close()
                finish(blocks)

            end.received, end.ended = received, fail
            request = borrower.begin()
            end.send(request)
            if request.done:
                end.close()
                finish([])

        if not params.lease:
            self.after(0, lambda: finish([]))
            return
        self.after(LOAD_TIMEOUT, fail)
        self._network.dial(self, params.address, opened, lambda _: fail(), LOAD_TIMEOUT)

    def _lend(self, end: ConnectionEnd, request: object) -> None:
        assert isinstance(request, BlockRequest)
        loan = self.lender.answer(request)
        if loan is None:
            self._wake()
            return
        if self.damages and any(loan.blocks):
            self.damages -= 1
            loan = BlockLoan(blocks=tuple(map(_damaged, loan.blocks)))
        answer = loan
        self.after(round(TRANSFER_TIME * (0.5 + self._random())), lambda: end.send(answer))

    def _read_store(self, sequence: Running, names: Sequence[BlockHash]) -> None:
        until = Nanos(self.now + LOAD_TIMEOUT)
        self._reading += 1
        self._stage("read")
        once = Once()

        def finish(blocks: Sequence[bytes]) -> None:
            if once.first():
                self._reading -= 1
                self._accept_blocks(sequence, names, blocks, Source.STORE, STORE)

        def failed(silent: bool) -> None:
            self._points.reach(FaultPoint.STORE_SILENT, silent)
            finish([])

        def match() -> None:
            call = MatchCall(names=tuple(names), lease=STORE_LEASE, max_wait=Nanos(max(0, until - self.now) // 2))
            self._network.call(self, STORE, call, matched, failed, CALL_TIMEOUT)

        def matched(found: object) -> None:
            if not isinstance(found, MatchAnswer):
                finish([])
                return
            lease_id, slots = found.leased.lease_id, tuple(found.leased.slots)
            if found.loading and self.now + MATCH_AGAIN < until:
                if slots:
                    self._tell_store(ReleaseCall(lease_id))
                self.after(MATCH_AGAIN, match)
            elif slots:
                self._network.call(
                    self, STORE, ReadCall(slots), lambda read: have_read(slots, read, lease_id), failed, CALL_TIMEOUT
                )
            else:
                finish([])

        def have_read(slots: Sequence[Slot], read: Sequence[bytes | None], lease_id: LeaseId) -> None:
            self._tell_store(ReleaseCall(lease_id))
            whole: list[tuple[bytes, bool]] = []
            for name, slot, content in zip(names, slots, read, strict=False):
                right = content is not None and google_crc32c.value(content) == slot.crc32c
                if content is not None and not right:
                    self._tell_store(CondemnCall(name, slot))
                whole.append((content or b"", right))
            finish([content for content, _ in takewhile(itemgetter(1), whole)])

        match()

    def _write(self, blocks: dict[BlockHash, bytes], then: Callable[[], None]) -> None:
        """Write blocks to the store, and then call `then`, even if the write has failed."""
        names = tuple(blocks)
        contents = list(blocks.values())
        if not names:
            self.after(0, then)
            return
        self._writing += 1

        def end(_: object = None) -> None:
            self._writing -= 1
            then()

        def failed(silent: bool) -> None:
            self._points.reach(FaultPoint.STORE_SILENT, silent)
            end()

        def reserved(answer: object) -> None:
            if not isinstance(answer, WriteReservation) or not answer.reserved:
                end()
                return
            self._stage("write")
            places = answer.reserved
            written = WriteCall(tuple((place.slot, contents[place.index]) for place in places))
            checksums = {place.index: int(google_crc32c.value(contents[place.index])) for place in places}
            publish = PublishCall(reservation_id=answer.reservation_id, checksums=checksums, owner=self.name)

            def have_written(_: object) -> None:
                self._network.call(self, STORE, publish, end, failed, CALL_TIMEOUT)

            self.after(
                round(WRITE_TIME * (0.5 + self._random())),
                lambda: self._network.call(self, STORE, written, have_written, failed, CALL_TIMEOUT),
            )

        reserve = ReserveCall(names=names, owner=self.name, lease=STORE_LEASE)
        self._network.call(self, STORE, reserve, reserved, failed, CALL_TIMEOUT)

    def _tell_store(self, call: ReleaseCall | CondemnCall) -> None:
        self._network.call(self, STORE, call, lambda _: None, lambda _: None, CALL_TIMEOUT)

    # End of the process.

    def _stage(self, name: str) -> None:
        """Note that the process has reached a stage. If the schedule has a fault for it, freeze the process now or kill it soon."""
        if name in self.dies_at:
            self.dies_at.discard(name)
            self.kernel.after(round(self._random() * DEATH_WITHIN), self._die)
        if (lasting := self.stops_at.pop(name, None)) is not None and not self.frozen:
            self.freeze()
            self.kernel.after(lasting, self.thaw)

    def _die(self) -> None:
        if self.alive:
            self.kill()

    def _exit(self) -> None:
        super().kill()
        self._network.ended(self)
        self._exited(self)

    def kill(self) -> None:
        """End the process at once, and count the fault points that its end reaches."""
        reach = self._points.reach
        computing = any(not each.generated for each in self.batch.sequences.values())
        reach(FaultPoint.KILLED_WHILE_PREFILLING, computing)
        reach(FaultPoint.KILLED_WHILE_DECODING, any(each.generated for each in self.batch.sequences.values()))
        reach(FaultPoint.KILLED_WHILE_LENDING, bool(len(self.lender.leases)))
        reach(FaultPoint.KILLED_WHILE_PULLING, bool(self._pulling))
        reach(FaultPoint.KILLED_WHILE_WRITING, bool(self._writing))
        reach(FaultPoint.KILLED_WHILE_READING, bool(self._reading))
        self._exit()

    def leftovers(self) -> Sequence[str]:
        """Return a description of each kind of object that the worker still holds, such as blocks, although no request is live."""
        self.machine.check()
        self.batch.check()
        self.lender.check()
        held = {
            "attempts": self.machine.held,
            "sequences": len(self.batch.sequences),
            "handoff leases": len(self.lender.leases),
            "blocks in use": self.batch.blocks.used,
        }
        return [f"{self.name} holds {count} {what}" for what, count in held.items() if count]


def _no_calls(request: object, answer: Callable[[object], None]) -> None:  # noqa: ARG001 - a listener's signature
    raise AssertionError(request)


def _damaged(lent: LentBlock | None) -> LentBlock | None:
    if lent is None:
        return None
    return LentBlock(crc32c=lent.crc32c, content=bytes([lent.content[0] ^ 1]) + lent.content[1:])
