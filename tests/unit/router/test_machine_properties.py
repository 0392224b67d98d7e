"""Property: in any interleaving of events, reservations return to zero and every request ends exactly once."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec import structs

from fleet.core.clock import SECOND, Nanos
from fleet.core.errors import Reason
from fleet.core.ids import StoreId, WorkerId
from fleet.core.requests import Finish, Sampling
from fleet.core.roles import KvPath, Phase, Placement, Role
from fleet.core.work import KvRemoved, KvStored
from fleet.router.kv_index.peer_prompts import PlacedPrompt, marks
from fleet.router.messages import (
    KvChanged,
    KvPathsChanged,
    PeerLeft,
    PeerPlaced,
    PeerReserved,
    ReservationTotals,
    RouterTicked,
    ThresholdsChanged,
    WorkerDraining,
)
from fleet.router.placement.decision import Decision
from fleet.router.state.live_requests import hash_prompt
from kvstore.block import chain
from tests.support.builders import BLOCK_TOKENS, a_handoff, a_kv_report, a_prompt, an_arrival, token_ids
from tests.support.router.machine_driver import CancelAttempt, Complete, Dispatch, Emit, Reject, RouterMachineDriver

ROLES = {"p1": Role.PREFILL, "p2": Role.PREFILL, "d1": Role.DECODE, "d2": Role.DECODE, "b1": Role.BOTH}
PATHS = (KvPath.STORE, KvPath.DIRECT)
SAMPLINGS = st.sampled_from(
    [
        Sampling(temperature=0.0, max_tokens=4),
        Sampling(temperature=0.0, max_tokens=1),
        Sampling(temperature=1.0, seed=3, max_tokens=4),
    ]
)
REJECTIONS = st.sampled_from([Reason.DRAINING, Reason.INTERNAL, Reason.KV_MISMATCH, Reason.INVALID_ARGUMENT])


class AnyInterleaving(RuleBasedStateMachine):
    """Workers, clients and the clock act in any order; the driver checks the invariants.

    The model plays the workers: it knows the attempts on each worker from the router's commands alone. Its tokens count up
    from the length of the prompt, so that a lost or repeated token is noticed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.router = RouterMachineDriver(
            replicas_listen="unix:r",
            max_queued=3,
            oversubscribe=1.0,
            remote_prefill_min_tokens=64,
            max_attempts=3,
            prefill_window_tokens=100,
            prefill_size_seconds=5.0,
        )
        self.up: dict[str, int] = {}  # incarnation by worker
        self.incarnations = 0
        self.running: dict[str, Dispatch] = {}  # by attempt id
        self.arrivals = 0
        self.open: dict[str, int] = {}  # tokens that a client got so far
        self.ended: dict[str, str] = {}
        self.prompts: dict[str, int] = {}

    def perform(self, commands) -> None:
        for command in commands:
            match command:
                case Dispatch():
                    assert command.worker_id in self.up, "work for a worker that is not there"
                    assert command.start.request_id not in self.running
                    self.running[command.start.request_id] = command
                case CancelAttempt():
                    self.running.pop(command.request_id, None)
                case Emit():
                    for token in command.progress.token_ids:
                        position = self.prompts[command.request_id] + self.open[command.request_id]
                        assert token == position, "a token was lost or sent twice"
                        self.open[command.request_id] += 1
                case Complete() | Reject():
                    self.finish(command.request_id, type(command).__name__)

    def finish(self, request_id: str, how: str) -> None:
        assert request_id not in self.ended, "ended twice"
        self.ended[request_id] = how
        del self.open[request_id]

    def some_work(self, data) -> Dispatch:
        return self.running[data.draw(st.sampled_from(sorted(self.running)))]

    def next_token(self, work: Dispatch) -> int:
        """Return the token of a deterministic engine: it depends on the prompt and on the tokens generated so far."""
        return len(token_ids(work.start.tokens)) + self.made.get(work.start.request_id, 0)

    @initialize()
    def start(self) -> None:
        self.made: dict[str, int] = {}
        self.join("d1")
        self.join("p1")

    def join(self, worker_id: str) -> None:
        self.incarnations += 1
        self.up[worker_id] = self.incarnations
        self.drop_work_of(worker_id)
        self.perform(
            self.router.join(
                worker_id,
                ROLES[worker_id],
                incarnation=str(self.incarnations),
                max_running=2,
                kv_paths=PATHS,
                fingerprint="odd" if worker_id == "p2" else "even",
            )
        )

    def drop_work_of(self, worker_id: str) -> None:
        self.running = {name: work for name, work in self.running.items() if work.worker_id != worker_id}

    @rule(worker_id=st.sampled_from(sorted(ROLES)))
    def worker_joins(self, worker_id: str) -> None:
        self.join(worker_id)

    @precondition(lambda self: self.up)
    @rule(data=st.data())
    def worker_leaves(self, data) -> None:
        worker_id = data.draw(st.sampled_from(sorted(self.up)))
        del self.up[worker_id]
        self.drop_work_of(worker_id)
        self.perform(self.router.leave(worker_id))

    @precondition(lambda self: self.up)
    @rule(data=st.data())
    def worker_drains(self, data) -> None:
        worker_id = data.draw(st.sampled_from(sorted(self.up)))
        self.perform(self.router.send(WorkerDraining(worker_id=WorkerId(worker_id))))

    @precondition(lambda self: self.up)
    @rule(data=st.data(), joined=st.booleans())
    def ways_change(self, data, joined: bool) -> None:
        worker_id = WorkerId(data.draw(st.sampled_from(sorted(self.up))))
        paths, store_id = (PATHS, StoreId("store-1")) if joined else ((), None)
        self.perform(self.router.send(KvPathsChanged(worker_id=worker_id, kv_paths=paths, store_id=store_id)))

    @precondition(lambda self: self.up)
    @rule(data=st.data(), blocks=st.integers(1, 6), stored=st.booleans())
    def cache_changes(self, data, blocks: int, stored: bool) -> None:
        worker_id = WorkerId(data.draw(st.sampled_from(sorted(self.up))))
        hashes = tuple(chain(a_prompt(blocks * BLOCK_TOKENS), BLOCK_TOKENS))
        event = KvStored(hashes) if stored else KvRemoved(hashes[-1:])
        self.perform(self.router.send(KvChanged(worker_id=worker_id, events=(event,))))

    @rule(
        length=st.sampled_from([5, 63, 64, 200]),
        sampling=SAMPLINGS,
        priority=st.integers(-1, 1),
        deadline=st.none() | st.integers(1, 5),
        placement=st.sampled_from(list(Placement)),
        kv_path=st.sampled_from([None, *PATHS]),
        pin=st.sampled_from([None, None, None, "d1", "b1"]),
        others=st.fixed_dictionaries(
            {
                "tenant": st.sampled_from(["", "acme"]),
                "session": st.sampled_from(["", "", "s1", "s2"]),
                "expected_tokens": st.sampled_from([0, 0, 1, 100]),
            }
        ),
    )
    def client_asks(self, length, sampling, priority, deadline, placement, kv_path, pin, others) -> None:
        self.arrivals += 1
        request_id = f"r{self.arrivals}"
        self.open[request_id] = 0
        self.prompts[request_id] = length
        self.perform(
            self.router.send(
                an_arrival(
                    request_id=request_id,
                    tokens=length,
                    sampling=sampling,
                    priority=priority,
                    deadline=None if deadline is None else Nanos(self.router.now + deadline * SECOND),
                    placement=placement,
                    kv_path=kv_path,
                    pin=None if pin is None else WorkerId(pin),
                    **others,
                )
            )
        )

    @rule(
        oversubscribe=st.sampled_from([0.5, 1.0, 3.0]),
        max_queued=st.integers(0, 4),
        remote_prefill_min_tokens=st.sampled_from([0, 64, 1000]),
        priority_seconds=st.sampled_from([0.0, 10.0]),
    )
    def thresholds_are_set(self, **changes) -> None:
        self.perform(
            self.router.send(ThresholdsChanged(thresholds=structs.replace(self.router.machine.thresholds(), **changes)))
        )
        assert structs.asdict(self.router.machine.thresholds()).items() >= changes.items()

    @rule(replica=st.sampled_from(["r2", "r3"]), requests=st.integers(0, 3))
    def another_router_books(self, replica: str, requests: int) -> None:
        booked = {
            WorkerId(worker_id): ReservationTotals(100 * requests, 3.0 * requests, requests)
            for worker_id in ("d1", "b1")
        }
        self.perform(self.router.send(PeerReserved(replica=replica, booked=booked if requests else {})))

    @rule(
        replica=st.sampled_from(["r2", "r3"]),
        number=st.integers(0, 4),
        length=st.integers(1, 300),
        age_ms=st.sampled_from([0, 1, 30_000]),
        over=st.lists(st.integers(1, 4)),
    )
    def another_router_places(self, replica: str, number: int, length: int, age_ms: int, over: list[int]) -> None:
        keys = marks(hash_prompt(a_prompt(length + BLOCK_TOKENS), BLOCK_TOKENS, b""))
        placed = tuple(
            PlacedPrompt(worker_id=WorkerId(name), number=number, keys=keys, age_ms=age_ms) for name in ("d1", "p1")
        )
        self.perform(self.router.send(PeerPlaced(replica=replica, placed=placed, over=tuple(over))))

    @rule(replica=st.sampled_from(["r2", "r3"]))
    def another_router_leaves(self, replica: str) -> None:
        self.perform(self.router.send(PeerLeft(replica=replica)))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def client_leaves(self, data) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.open)))
        commands = self.router.cancel(request_id)
        self.finish(request_id, "cancelled")
        self.perform(commands)

    @rule(seconds=st.integers(1, 3))
    def time_passes(self, seconds: int) -> None:
        self.router.now = Nanos(self.router.now + seconds * SECOND)
        self.perform(self.router.send(RouterTicked()))
        due = self.router.machine.next_deadline()
        assert due is None or due > self.router.now

    @precondition(lambda self: self.running)
    @rule(data=st.data(), stop=st.booleans(), handoff=st.integers(0, 9))
    def work_advances(self, data, stop: bool, handoff: int) -> None:
        """Generate one token; finish the attempt after its last token, if `stop`, or after a prefill."""
        work = self.some_work(data)
        name = work.start.request_id
        token = self.next_token(work)
        self.made[name] = self.made.get(name, 0) + 1
        last = self.made[name] == work.start.sampling.max_tokens
        finish = Finish.STOP if stop else Finish.LENGTH if last else None
        prompt_tokens = len(work.start.tokens) // 4
        handed = None
        if work.start.phase is Phase.PREFILL and handoff:  # in one of ten cases, nothing is handed over
            handed = a_handoff(kv_path=work.start.kv_path, prefill_worker=work.worker_id, num_tokens=prompt_tokens)
        if finish is not None:
            del self.running[name]
        kv = a_kv_report(prompt_tokens) if finish else None
        self.perform(self.router.step(work, token, finish=finish, kv=kv, handoff=handed))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), reason=REJECTIONS)
    def work_is_rejected(self, data, reason: Reason) -> None:
        work = self.some_work(data)
        del self.running[work.start.request_id]
        self.perform(self.router.reject(work, reason))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def work_cannot_be_delivered(self, data) -> None:
        work = self.some_work(data)
        del self.running[work.start.request_id]
        self.perform(self.router.fail_to_deliver(work))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def work_is_given_up_by_its_worker(self, data) -> None:
        work = self.some_work(data)
        del self.running[work.start.request_id]
        self.perform(self.router.step(work, finish=Finish.CANCELLED))

    @invariant()
    def the_router_knows_exactly_the_open_requests(self) -> None:
        snapshot = self.router.machine.snapshot()
        assert snapshot.active == len(self.open)
        assert snapshot.counters.ended == len(self.ended)
        assert snapshot.queued + len(self.running) == snapshot.active

    @invariant()
    def nobody_waits_whom_somebody_could_serve(self) -> None:
        machine = self.router.machine
        for request_id in machine.queue.waiting:
            live = machine.live_requests[request_id]
            assert not isinstance(
                machine.placer.choose(live, machine.registry.candidate_table(live), self.router.now), Decision
            )

    def teardown(self) -> None:
        """Cancel all remaining requests, and check that the router has no request and no reservation left."""
        if not self.up:
            self.join("d1")
        for request_id in sorted(self.open):
            if request_id in self.open:  # a cancellation moves the queue, which may reject other requests
                commands = self.router.cancel(request_id)
                self.finish(request_id, "cancelled")
                self.perform(commands)
        snapshot = self.router.machine.snapshot()
        assert (snapshot.active, snapshot.queued) == (0, 0)
        assert not self.running
        assert len(self.ended) == self.arrivals
        assert self.router.machine.prompts.latest() == []
        for pool in snapshot.pools:
            for worker in pool.workers:
                booked = (worker.booked_requests, worker.booked_blocks, worker.booked_prefill_tokens)
                assert booked == (0, 0, 0), worker
        assert self.router.machine.next_deadline() is None


AnyInterleaving.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestAnyInterleaving = AnyInterleaving.TestCase
