"""Seed run: runs one schedule on a cluster in virtual time, and asserts the promises.

Rules:

1. In the safety phase faults happen, and no promise may be broken at any instant.
2. The liveness phase begins at `WELL_FROM`. All faults end: network cuts end, frozen processes go on, and the supervisor
   restarts dead processes. Workers that are still frozen are killed. An engine that hangs while it has requests is left
   to the watchdog. Within `BOUND` of virtual time, every request must have ended, and every worker must be a member. A
   new request to each worker that can decode, and a disaggregated one, must be answered. Afterwards no reservation,
   lease or lock may be left.
3. All random numbers come from the seed. So two runs with the same seed and the same selection of happenings are equal.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from hashlib import blake2b
from random import Random
from typing import assert_never

from msgspec import Struct

from fleet.app.fault_simulation import block_truth
from fleet.app.fault_simulation.block_truth import MODEL, BlockTruth
from fleet.app.fault_simulation.fault_points import FaultPoint, FaultPoints
from fleet.app.fault_simulation.promises import Promise, PromiseBroken
from fleet.app.fault_simulation.router_process import RouterProcess
from fleet.app.fault_simulation.schedule import (
    FOR_GOOD,
    WELL_FROM,
    WORKERS,
    FaultDrawn,
    FaultKind,
    Happening,
    RequestDrawn,
)
from fleet.app.fault_simulation.store_process import STORE, StoreProcess, VirtualDisk
from fleet.app.fault_simulation.virtual_network import VirtualNetwork
from fleet.app.fault_simulation.virtual_process import VirtualProcess
from fleet.app.fault_simulation.worker_process import WorkerProcess
from fleet.core.clock import MILLISECOND, SECOND, Nanos
from fleet.core.errors import Reason
from fleet.core.ids import RequestId, WorkerId
from fleet.core.requests import TOKEN_BYTES, Finish, Sampling
from fleet.core.roles import Placement, Role
from fleet.router.messages import Arrived, Complete, Emit, Reject, RequestCancelled, StartedOver
from fleet.router.placement.wait_or_reject import RejectionCause
from fleet.router.settings.router import RouterSettings
from fleet.router.state.live_requests import RequestStage
from fleet.sim.kernel import Kernel

BOUND = Nanos(60 * SECOND)
LOOK = Nanos(250 * MILLISECOND)
RESTART = Nanos(300 * MILLISECOND)
RETRY = Nanos(400 * MILLISECOND)
MAX_ATTEMPTS = 3
HEARTBEAT_TIMEOUT = Nanos(2 * SECOND)

ORDINARY = {Reason.QUEUE_FULL, Reason.NO_WORKER, Reason.DEADLINE_PASSED}
"""Reasons for which the router may reject a request even if none of its attempts has failed."""

NO_EXCUSE = {"", RejectionCause.PASSED_ON}
"""Causes that do not justify a rejection while the router could still try the request on another worker. The empty cause is
one of them. The other one can occur only for requests to external servers, which this simulation does not have."""

CANCEL_POINTS = {
    RequestStage.QUEUED: FaultPoint.CANCELLED_IN_QUEUE,
    RequestStage.PREFILLING: FaultPoint.CANCELLED_IN_PREFILL,
    RequestStage.HANDED_OVER: FaultPoint.CANCELLED_HANDED_OVER,
    RequestStage.DECODING: FaultPoint.CANCELLED_IN_DECODE,
}


class SeedOutcome(Struct, kw_only=True):
    """Result of the run of one seed."""

    seed: int
    requests: int = 0
    ends: dict[str, int] = {}  # number of requests by the way in which they ended, such as `complete`
    tokens: int = 0  # number of tokens that the clients have at the end; each was compared with the expected one
    events: int = 0
    # Virtual time from `WELL_FROM` until rule 2 was fulfilled or a promise was broken; negative: a promise was broken
    # before `WELL_FROM`.
    recovery_seconds: float = 0.0
    points: dict[str, int] = {}  # how often each fault point was reached, by name
    promise: str = ""  # text of the broken `Promise`; empty: none was broken
    detail: str = ""
    digest: str = ""


class _Client:
    """A client that sends one request, and compares each token of the answer with the expected one."""

    def __init__(self, number: int, request: RequestDrawn, pin: WorkerId | None):
        self.number = number
        self.request = request
        self.pin = pin
        self.expected = block_truth.answer(request.prompt, request.sampling)
        self.received: list[int] = []
        self.sendings = 0
        self.request_id = RequestId("")
        self.end = ""

    def __repr__(self) -> str:
        return f"request {self.number} ({self.request})"


class SeedRun:
    """Runs one seed: starts the cluster, performs the schedule, and checks the answers. Implements the port `RouterClients`."""

    def __init__(self, seed: int, happenings: Sequence[Happening]):
        self.points = FaultPoints()
        self._seed = seed
        self._chance = Random(f"run {seed}")
        self._kernel = Kernel(seed)
        self._events = 0
        self._network = VirtualNetwork(self._kernel, self._chance, self.points)
        self._truth = BlockTruth()
        self._disk = VirtualDisk()
        self._clients: list[_Client] = []
        self._open: dict[RequestId, _Client] = {}
        self._workers: dict[str, WorkerProcess] = {}
        self._twins: dict[str, WorkerProcess] = {}
        self._incarnations = Counter[str]()
        self._ends: Counter[str] = Counter()
        self._digest = blake2b(digest_size=16)
        self._settings = RouterSettings(
            router_id="router",
            remote_prefill_min_tokens=64,
            max_queued=self._chance.choice((2, 8, 64)),
            max_queue_seconds=20.0,
            oversubscribe=self._chance.choice((0.25, 0.5, 1.0, 2.0)),
            prefill_window_tokens=self._chance.choice((100, 8192)),
            prefer_direct=self._chance.random() < 0.5,
            max_attempts=MAX_ATTEMPTS,
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT / SECOND,
            max_reconnect_seconds=1.0,
            session_affinity=self._chance.choice(("off", "soft", "hard")),
            explained_requests=64,
        )
        self._router = self._new_router()
        self._store = self._new_store()
        for name in WORKERS:
            self._start_worker(name)
        for happening in happenings:
            self._kernel.at(happening.at, partial(self._happen, happening))

    # The two phases of the run.

    def run(self) -> SeedOutcome:
        """Run both phases and return the outcome, which names the promise that was broken, if any."""
        outcome = SeedOutcome(seed=self._seed)
        try:
            self._until(WELL_FROM)
            self._end_faults()
            self._get_well()
        except PromiseBroken as found:
            outcome.promise, outcome.detail = found.promise.value, found.detail
        except AssertionError as found:
            outcome.promise, outcome.detail = Promise.CONSISTENT.value, _place_of(found)
        except Exception as found:  # noqa: BLE001 - supervisor: any exception counts as a broken promise
            outcome.promise, outcome.detail = Promise.CONSISTENT.value, f"{type(found).__name__}: {_place_of(found)}"
        if self._router.alive:
            self._router.count_points()
        if self._store.alive:
            self._store.count_points()
        outcome.requests = len(self._clients)
        outcome.ends = dict(self._ends)
        outcome.tokens = sum(len(client.received) for client in self._clients)
        outcome.recovery_seconds = (self._kernel.instant - WELL_FROM) / SECOND
        outcome.points = {point.name.lower(): count for point, count in self.points.counts.items()}
        outcome.digest = self._digest.hexdigest()
        outcome.events = self._events
        return outcome

    def _until(self, instant: Nanos) -> None:
        self._events += self._kernel.run(instant)
        if self._kernel.instant < instant:
            self._kernel.skip(instant)

    def _get_well(self) -> None:
        """Run the liveness phase, and check that the cluster recovers within `BOUND` (rule 2)."""
        bound = Nanos(WELL_FROM + BOUND)
        self._wait_for(bound, Promise.ENDS_IN_TIME, lambda: [repr(client) for client in self._live()])
        self._wait_for(bound, Promise.GETS_WELL, self._missing_workers)
        probes = [self._probe(worker.worker_id) for worker in self._workers.values() if worker.role is not Role.PREFILL]
        probes.append(self._probe(None))
        self._wait_for(bound, Promise.ENDS_IN_TIME, lambda: [repr(client) for client in self._live()])
        if failed := [f"{probe!r} ended with {probe.end}" for probe in probes if probe.end != "complete"]:
            raise PromiseBroken(Promise.GETS_WELL, "; ".join(failed))
        self._wait_for(bound, Promise.NOTHING_HELD, self._leftovers)

    def _wait_for(self, bound: Nanos, promise: Promise, missing: Callable[[], Sequence[str]]) -> None:
        """Run until `missing` returns an empty sequence.

        Raises:
            PromiseBroken: Something is still missing at the instant `bound`.
        """
        while found := missing():
            if self._kernel.instant >= bound:
                raise PromiseBroken(promise, "; ".join(found))
            self._until(Nanos(self._kernel.instant + LOOK))

    def _live(self) -> Iterable[_Client]:
        return [client for client in self._clients if not client.end]

    def _missing_workers(self) -> Sequence[str]:
        known = {
            worker.worker_id
            for pool in self._router.machine.snapshot().pools
            for worker in pool.workers
            if worker.state == "serving"
            and self._router.incarnation_of(worker.worker_id) == self._workers[worker.worker_id].incarnation
        }
        hung = [f"the engine of {name} hangs" for name, worker in self._workers.items() if worker.hangs]
        return [*hung, *(f"{name} has not joined" for name in WORKERS if WorkerId(name) not in known)]

    def _leftovers(self) -> Sequence[str]:
        router = self._router
        router.machine.check()
        snapshot = router.machine.snapshot()
        left = [f"{snapshot.active} requests are live in the router"] if snapshot.active else []
        for pool in snapshot.pools:
            for worker in pool.workers:
                booked = (worker.booked_requests, worker.booked_blocks, worker.booked_prefill_tokens)
                if booked != (0, 0, 0):
                    left.append(f"the router has reserved {booked} on {worker.worker_id}")
        for process in self._workers.values():
            left += process.leftovers()
        return [*left, *self._store.leftovers()]

    # Requests of clients, and their answers.

    def _probe(self, pin: WorkerId | None) -> _Client:
        """Send a request that must succeed. It is pinned to the worker `pin`; if `pin` is None, a prefill and a decode worker serve it."""
        prompt = b"".join((100 + token).to_bytes(TOKEN_BYTES, "little") for token in range(100))
        request = RequestDrawn(
            at=self._kernel.instant,
            prompt=prompt,
            sampling=Sampling(temperature=0.0, max_tokens=4, ignore_eos=True),
            placement=Placement.DISAGGREGATED if pin is None else Placement.AGGREGATED,
            kv_path=None,
            whole=False,
            deadline=None,
            leaves_after=None,
            session="",
        )
        return self._arrive(request, pin)

    def _arrive(self, request: RequestDrawn, pin: WorkerId | None = None) -> _Client:
        client = _Client(len(self._clients), request, pin)
        self._clients.append(client)
        self._truth.learn(request.prompt, client.expected)
        self._send(client)
        if request.leaves_after is not None:
            self._kernel.after(request.leaves_after, lambda: self._leave(client))
        return client

    def _send(self, client: _Client) -> None:
        """Send a client's request to the router. If no router runs, try again later."""
        if client.end:
            return
        router, request = self._router, client.request
        if not router.alive:
            self._kernel.after(RETRY, lambda: self._send(client))
            return
        client.sendings += 1
        client.request_id = RequestId(f"{client.number}.{client.sendings}")
        self._open[client.request_id] = client
        deadline = None if request.deadline is None else Nanos(self._kernel.instant + request.deadline)
        arrived = Arrived(
            request_id=client.request_id,
            model=MODEL,
            tokens=request.prompt,
            sampling=request.sampling,
            deadline=deadline,
            session=request.session,
            placement=request.placement,
            kv_path=request.kv_path,
            pin=client.pin,
            whole=request.whole,
        )
        router.run(lambda: self._deliver(router, arrived))

    def _deliver(self, router: RouterProcess, arrived: Arrived) -> None:
        if arrived.request_id not in self._open:
            return  # the client has cancelled its request before the router read it
        router.hear(arrived)
        live = router.machine.live_requests.get(arrived.request_id)
        self.points.reach(FaultPoint.QUEUED, live is not None and live.stage is RequestStage.QUEUED)

    def _leave(self, client: _Client) -> None:
        if client.end:
            return
        router, request_id = self._router, client.request_id
        self._open.pop(request_id, None)
        self._end(client, "cancelled")
        if router.alive:
            live = router.machine.live_requests.get(request_id)
            if live is not None:
                self.points.reach(CANCEL_POINTS[live.stage])
            router.run(lambda: router.hear(RequestCancelled(request_id=request_id)))

    def answered(self, command: Emit | StartedOver | Complete | Reject) -> None:
        """Handle a part of an answer that the router sends to a client, or the end of the request."""
        client = self._open.get(command.request_id)
        if client is None:
            number = int(command.request_id.partition(".")[0])
            late = self._clients[number]
            if late.end in ("cancelled", "router lost") or late.request_id != command.request_id:
                return  # the client does not wait for this answer: it has cancelled, has lost its router, or has sent its request again
            raise PromiseBroken(Promise.ONE_END, f"{late!r} has ended with {late.end}; then came {command}")
        match command:
            case Emit():
                self._emitted(client, command.progress.token_ids)
            case StartedOver():
                if not client.request.whole:
                    raise PromiseBroken(Promise.EXACT_TOKENS, f"{client!r} started over in front of its client")
                self.points.reach(FaultPoint.STARTED_OVER)
                client.received.clear()
            case Complete():
                self._completed(client, command.finish)
            case Reject():
                self._rejected(client, command)
            case _:
                assert_never(command)

    def _emitted(self, client: _Client, tokens: Sequence[int]) -> None:
        for token in tokens:
            position = len(client.received)
            if position >= len(client.expected) or token != client.expected[position]:
                raise PromiseBroken(
                    Promise.EXACT_TOKENS, f"{client!r}: token {position} is {token} after {client.received[-3:]}"
                )
            client.received.append(token)

    def _completed(self, client: _Client, finish: Finish) -> None:
        if len(client.received) != len(client.expected):
            got = f"{len(client.received)} of {len(client.expected)} tokens"
            raise PromiseBroken(Promise.EXACT_TOKENS, f"{client!r} is complete ({finish}) with {got}")
        del self._open[client.request_id]
        self._end(client, "complete")

    def _rejected(self, client: _Client, reject: Reject) -> None:
        reason, request = reject.reason, client.request
        self.points.reach(FaultPoint.DEADLINE_PASSED, reason is Reason.DEADLINE_PASSED)
        self.points.reach(FaultPoint.WORKER_LOST, reason is Reason.WORKER_LOST)
        continues = request.sampling.stateless or request.whole or not client.received
        placements = self._router.placements(client.request_id)
        if request.session and self._settings.session_affinity == "hard" and reason is Reason.WORKER_LOST:
            continues = False  # a hard session affinity does not allow another worker to continue the answer
        wrong = (
            (reason is Reason.DEADLINE_PASSED and request.deadline is None)
            or (reason is Reason.QUEUE_FULL and bool(client.received))
            or (reason not in ORDINARY and continues and placements < MAX_ATTEMPTS and reject.cause in NO_EXCUSE)
        )
        if wrong:
            details = f"{reason} ({reject.message}) after {placements} placements and {len(client.received)} tokens"
            raise PromiseBroken(Promise.RETRIED, f"{client!r} was rejected: {details}")
        del self._open[client.request_id]
        self._end(client, reason.value)

    def _end(self, client: _Client, how: str) -> None:
        if client.end:
            raise PromiseBroken(Promise.ONE_END, f"{client!r} ended with {client.end}, and again with {how}")
        client.end = how
        self._ends[how] += 1
        self._digest.update(f"{client.number} {how} {len(client.received)} {self._kernel.instant}\n".encode())

    # Start and end of processes.

    def _new_router(self) -> RouterProcess:
        return RouterProcess(
            self._kernel, self._network, self.points, self, self._settings, Random(self._chance.random()), STORE
        )

    def _new_store(self) -> StoreProcess:
        self._incarnations[STORE] += 1
        return StoreProcess(
            self._kernel, self._network, self.points, self._truth, self._disk, self._chance, self._incarnations[STORE]
        )

    def _start_worker(self, name: str) -> None:
        if name not in self._workers or not self._workers[name].alive:
            self._workers[name] = self._worker(name, name, self._exited)

    def _worker(self, name: str, worker_id: str, exited: Callable[[WorkerProcess], None]) -> WorkerProcess:
        self._incarnations[name] += 1
        return WorkerProcess(
            self._kernel,
            self._network,
            self.points,
            self._truth,
            self._chance,
            name=name,
            worker_id=WorkerId(worker_id),
            role=WORKERS[worker_id],
            incarnation=self._incarnations[name],
            exited=exited,
        )

    def _exited(self, worker: WorkerProcess) -> None:
        """Restart a worker whose process has ended, as its supervisor would."""
        self._kernel.after(RESTART, lambda: self._start_worker(worker.name))

    # Begin and end of faults.

    def _happen(self, happening: Happening) -> None:
        if isinstance(happening, RequestDrawn):
            self._arrive(happening)
        else:
            self._fail(happening)

    def _fail(self, fault: FaultDrawn) -> None:
        match fault.kind:
            case FaultKind.CUT:
                self._network.cut(fault.target, fault.other)
                self._later(fault, lambda: self._network.heal(fault.target, fault.other))
            case FaultKind.SLOW:
                self._network.slow_down(fault.target, fault.amount)
                self._later(fault, lambda: self._network.speed_up(fault.target))
            case FaultKind.RESET:
                self.points.reach(FaultPoint.STREAM_RESET, self._network.reset(fault.target, fault.other) > 0)
            case FaultKind.HALF_CLOSE:
                self._network.reset(fault.target, fault.other, both=False)
            case FaultKind.FILL_BUFFER:
                if (link := self._router.links.get(WorkerId(fault.target))) is not None:
                    link.is_full = True
            case FaultKind.REGISTRY_AWAY:
                router = self._router
                router.registry_away = True
                self._later(fault, lambda: setattr(router, "registry_away", False))
            case FaultKind.KILL_ROUTER:
                self._kill_router(fault)
            case FaultKind.FREEZE_ROUTER:
                self.points.reach(FaultPoint.ROUTER_FROZEN, bool(self._open))
                self._freeze(self._router, fault)
            case FaultKind.KILL_STORE if self._store.alive:
                self._store.kill()
                self._later(fault, self._restart_store)
            case FaultKind.FREEZE_STORE if self._store.alive:
                self._freeze(self._store, fault)
            case FaultKind.KILL_STORE | FaultKind.FREEZE_STORE:
                pass  # the process is down already
            case FaultKind.FAIL_DISK | FaultKind.HANG_DISK | FaultKind.FULL_DISK | FaultKind.CORRUPT_DISK:
                self._fail_disk(fault)
            case FaultKind.FLIP_BITS:
                for pick in range(fault.amount):
                    self._store.flip_bit(pick)
            case _:
                if (worker := self._workers[fault.target]).alive:
                    self._fail_worker(worker, fault)

    def _fail_worker(self, worker: WorkerProcess, fault: FaultDrawn) -> None:
        match fault.kind:
            case FaultKind.KILL_WORKER:
                worker.kill()
            case FaultKind.KILL_WORKER_AT:
                worker.dies_at.add(fault.other)
            case FaultKind.FREEZE_WORKER_AT:
                worker.stops_at[fault.other] = fault.lasting
            case FaultKind.FREEZE_WORKER:
                brief = fault.lasting < HEARTBEAT_TIMEOUT
                self.points.reach(FaultPoint.FROZEN_BRIEFLY if brief else FaultPoint.FROZEN_TOO_LONG)
                self._freeze(worker, fault)
            case FaultKind.DRAIN_WORKER:
                worker.run(lambda: worker.drain(fault.lasting))
            case FaultKind.HANG_ENGINE:
                worker.hangs = True
            case FaultKind.FAIL_ENGINE:
                worker.fails += fault.amount
            case FaultKind.SPOIL:
                worker.spoils += fault.amount
            case FaultKind.SKIP:
                worker.skips += fault.amount
            case FaultKind.DAMAGE_TRANSFER:
                worker.damages += fault.amount
            case FaultKind.TWIN_WORKER:
                name = f"{fault.target}-twin"
                if fault.other:
                    self._network.cut(fault.target, fault.other)
                    self._later(fault, lambda: self._network.heal(fault.target, fault.other))
                if name not in self._twins or not self._twins[name].alive:
                    self._twins[name] = twin = self._worker(name, fault.target, lambda _: None)
                    self._later(fault, lambda: _kill(twin))
            case _:
                raise AssertionError(fault)

    def _fail_disk(self, fault: FaultDrawn) -> None:
        disk = self._disk
        if fault.kind is FaultKind.CORRUPT_DISK:
            disk.corrupts += fault.amount
            return
        field = {FaultKind.FAIL_DISK: "fails", FaultKind.HANG_DISK: "hangs", FaultKind.FULL_DISK: "full"}[fault.kind]
        setattr(disk, field, True)
        self._later(fault, lambda: setattr(disk, field, False))

    def _kill_router(self, fault: FaultDrawn) -> None:
        router = self._router
        if not router.alive:
            return
        self.points.reach(FaultPoint.ROUTER_KILLED, bool(self._open))
        router.kill()
        orphans, self._open = list(self._open.values()), {}
        for client in orphans:
            if client.received or client.sendings > 1:
                self._end(client, "router lost")
            else:
                self._send(client)  # the client has got no token, so its client library sends the request again
        self._later(fault, self._restart_router)

    def _restart_router(self) -> None:
        if not self._router.alive:
            self._router = self._new_router()

    def _restart_store(self) -> None:
        if not self._store.alive:
            self._store = self._new_store()

    def _freeze(self, process: VirtualProcess, fault: FaultDrawn) -> None:
        if process.alive and not process.frozen:
            process.freeze()
            if fault.lasting != FOR_GOOD:
                self._later(fault, process.thaw)

    def _later(self, fault: FaultDrawn, end: Callable[[], None]) -> None:
        """Call `end` when the duration of a fault has passed, but at the latest at `WELL_FROM`."""
        self._kernel.at(min(self._kernel.instant + fault.lasting, WELL_FROM), end)

    def _end_faults(self) -> None:
        """End the faults that `_later` does not end, so that the liveness phase can begin (rule 2)."""
        disk = self._disk
        disk.corrupts = 0
        for twin in self._twins.values():
            _kill(twin)
        for worker in list(self._workers.values()):
            worker.dies_at.clear()
            worker.stops_at.clear()
            worker.spoils = worker.skips = worker.fails = worker.damages = 0
            if worker.hangs and not worker.batch.sequences:
                worker.hangs = False  # end the hang, because nobody can notice that an engine without requests hangs
            if worker.frozen:
                worker.kill()  # the process is still frozen, so in production a liveness probe would end it


def _kill(worker: WorkerProcess) -> None:
    if worker.alive:
        worker.kill()


def _place_of(error: BaseException) -> str:
    """Return the file and the line where an error was raised, and its message."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    place = "" if traceback is None else f"{traceback.tb_frame.f_code.co_filename}:{traceback.tb_lineno}"
    return f"{place}: {error}"


def run_seed(seed: int, happenings: Sequence[Happening]) -> SeedOutcome:
    """Run the given happenings, with the delays and router settings that the seed determines, and return the outcome."""
    return SeedRun(seed, happenings).run()
