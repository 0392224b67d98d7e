"""Wait groups: requests are served in the same order as if each queued request were tried by itself."""

import random
from itertools import count

import pytest
from msgspec import structs

from fleet.core.clock import SECOND, Nanos
from fleet.core.errors import Reason
from fleet.core.ids import ModelName, RequestId, WorkerId
from fleet.core.requests import Finish, Sampling
from fleet.core.roles import Phase, Placement, Role
from fleet.core.work import LoraAdapter
from fleet.router.messages import (
    PeerReserved,
    ReservationTotals,
    SessionsBound,
    ThresholdsChanged,
    WorkerDraining,
    WorkerJoined,
)
from fleet.router.placement.candidate_table import WorkerSizes
from fleet.router.placement.decision import Decision, decide
from fleet.router.placement.wait_or_reject import Rejection
from fleet.router.queueing.admission_queue import AdmissionQueue, QueuedRequest
from fleet.router.queueing.wait_groups import UNKNOWN_WORKERS
from fleet.router.sessions import SessionBinding
from tests.support.builders import BLOCK_TOKENS, FINGERPRINT, a_description, a_handoff, a_prompt, an_arrival
from tests.support.router.machine_driver import Dispatch, RouterMachineDriver, the

MODEL = ModelName("tiny")
GREEDY = Sampling(temperature=0.0, max_tokens=4)
WORKERS = [WorkerId(f"w{number}") for number in range(5)]


class World:
    """A queue, and workers with room for some requests each. A group is the set of workers that a request may use."""

    def __init__(self, *, one_by_one: bool) -> None:
        self.room = AdmissionQueue({"a": 3.0, "b": 0.5})
        self.room.set_sizes(MODEL, WorkerSizes((100, 200), (1000,)))
        self.free = dict.fromkeys(WORKERS, 0)
        self.meant: dict[RequestId, frozenset[WorkerId]] = {}
        self.served: list[RequestId] = []
        self._one_by_one = one_by_one

    def arrives(self, request_id: RequestId, meant: frozenset[WorkerId], now: Nanos, **fields) -> None:
        self.meant[request_id] = meant
        wait_key = (meant, request_id) if self._one_by_one else meant
        busy = meant if not self._one_by_one and not self._roomy(meant) else UNKNOWN_WORKERS
        self.room.add(QueuedRequest(request_id=request_id, model=MODEL, wait_key=wait_key, **fields), now, busy)

    def _roomy(self, meant: frozenset[WorkerId]) -> list[WorkerId]:
        return [worker_id for worker_id in WORKERS if worker_id in meant and self.free[worker_id]]

    def has_room(self, worker_id: WorkerId, places: int, now: Nanos, most: int | None) -> None:
        self.free[worker_id] += places
        self.room.changed(MODEL, worker_id)
        if self.room.first(MODEL) is None:
            return
        search = self.room.search(MODEL, most, lambda each: self.free[each] > 0)
        while self._serve(search.candidates(), search, now):
            self.room.check()

    def _serve(self, candidates, search, now: Nanos) -> bool:
        for request_id in candidates:
            if roomy := self._roomy(self.meant[request_id]):
                self.free[roomy[0]] -= 1
                self.room.served(request_id, MODEL, 50, 50, now)
                self.served.append(request_id)
                return True
            search.mark_rejected(UNKNOWN_WORKERS if self._one_by_one else self.meant[request_id])
        return False


@pytest.mark.parametrize("seed", range(40))
def test_grouping_does_not_change_the_service_order(seed):
    dice = random.Random(seed)
    together, apart = worlds = World(one_by_one=False), World(one_by_one=True)
    known = [frozenset(dice.sample(WORKERS, dice.randrange(1, 4))) for _ in range(6)]
    for step in range(250):
        now, kind = Nanos(step * SECOND), dice.random()
        if kind < 0.6:
            fields = {"tenant": dice.choice("abc"), "rank": dice.randrange(100), "seq": step, "tokens": 50}
            fields["whole_tokens"] = dice.choice([80, 150, 300])
            meant = dice.choice(known)
            for world in worlds:
                world.arrives(RequestId(f"r{step}"), meant, now, **fields)
        elif kind < 0.75 and (waiting := list(together.room.waiting)):
            gone = dice.choice(waiting)
            assert all(world.room.discard(gone) for world in worlds)
        elif kind < 0.8:
            sizes = WorkerSizes(tuple(sorted(dice.sample([100, 120, 200], 2))), (1000,))
            for world in worlds:
                world.room.set_sizes(MODEL, sizes)
        else:
            worker_id, places = dice.choice(WORKERS), dice.choice([1, 1, 3])
            for world in worlds:
                world.has_room(worker_id, places, now, None)
        assert together.served == apart.served
        assert together.room.request_to_drop() == apart.room.request_to_drop()
        assert together.room.seconds_to_wait(MODEL, "a", now, 50) == apart.room.seconds_to_wait(MODEL, "a", now, 50)
        together.room.check()
    assert len(together.served) > 30


def test_blocked_group_is_tried_at_most_once():
    """Queue ten thousand requests for a full worker, and behind them a request for a worker that has room at times."""
    world, looked = World(one_by_one=False), []
    busy, free = WORKERS[:2]
    for number in range(10_000):
        fields = {"tenant": str(number % 1000), "rank": number, "seq": number, "tokens": 1}
        world.arrives(RequestId(f"r{number}"), frozenset({busy}), Nanos(0), **fields)
    fields = {"tenant": "last", "rank": 0, "seq": 10_000, "tokens": 1}
    world.arrives(RequestId("last"), frozenset({free}), Nanos(0), **fields)
    heads = world.room.queues[MODEL].heads
    world.room.queues[MODEL].heads = lambda: (looked.append(each) or each for each in heads())

    world.has_room(free, 1, Nanos(0), 32)
    assert world.served == ["last"]
    world.has_room(free, 1, Nanos(0), 32)
    assert len(looked) == 1
    world.room.all_changed(MODEL)
    world.has_room(free, 1, Nanos(0), 32)
    assert len(looked) == 2


def test_tenant_with_many_groups_keeps_its_order():
    world = World(one_by_one=False)
    for number, worker_id in enumerate(WORKERS[:3] * 3):
        world.arrives(RequestId(f"r{number}"), frozenset({worker_id}), Nanos(0), rank=9 - number, seq=number, tokens=1)

    for worker_id in WORKERS[:3]:
        world.has_room(worker_id, 3, Nanos(0), 32)

    assert world.served == ["r6", "r3", "r0", "r7", "r4", "r1", "r8", "r5", "r2"]


# Tests with a whole router.

ADAPTERS = LoraAdapter(ModelName("ada")), LoraAdapter(ModelName("bob"))


def a_router_with_small_and_large(**settings) -> tuple[RouterMachineDriver, Dispatch, Dispatch]:
    """Return a router with a worker for 320 tokens and a larger one, and the request that fills each of them."""
    router = RouterMachineDriver(oversubscribe=1.0, **settings)
    router.join("small", max_running=1, kv_blocks=320 // BLOCK_TOKENS)
    router.join("large", max_running=1)
    on_large = router.send(an_arrival(request_id="runs", sampling=GREEDY, pin=WorkerId("large")))
    on_small = router.send(an_arrival(request_id="plain", sampling=GREEDY))
    return router, the(Dispatch, on_small), the(Dispatch, on_large)


def who(commands) -> tuple[str, str]:
    work = the(Dispatch, commands)
    return work.start.request_id.partition("#")[0], work.worker_id


def test_long_prompt_does_not_block_a_slightly_shorter_one():
    router, on_small, _ = a_router_with_small_and_large()
    for name, tokens in (("long", 500), ("short", 300)):
        assert not router.send(an_arrival(request_id=name, tokens=a_prompt(tokens), sampling=GREEDY))

    assert who(router.step(on_small, 7, finish=Finish.STOP)) == ("short", "small")


def test_groups_split_by_sizes_of_later_workers():
    router, on_small, on_large = a_router_with_small_and_large()
    router.step(on_small, 7, finish=Finish.STOP)
    for name, tokens in (("long", 3000), ("middle", 1000)):
        assert not router.send(an_arrival(request_id=name, tokens=a_prompt(tokens), sampling=GREEDY))

    assert who(router.join("middle", max_running=1, max_model_len=2000)) == ("middle", "middle")
    router.leave("small")
    router.leave("middle")  # now all requests fit all remaining workers
    assert who(router.step(on_large, 7, finish=Finish.STOP)) == ("long", "large")


def test_resumed_request_does_not_block_unrestricted_ones():
    router = RouterMachineDriver(oversubscribe=1.0)
    router.join("same", max_running=1)
    router.join("other", max_running=1, fingerprint="other weights")
    router.send(an_arrival(request_id="runs", sampling=GREEDY, pin=WorkerId("same")))
    on_other = router.send(an_arrival(request_id="plain", sampling=GREEDY))
    resumed = {"answered": (11,), "fingerprint": FINGERPRINT}
    assert not router.send(an_arrival(request_id="resumed", sampling=GREEDY, **resumed))
    assert not router.send(an_arrival(request_id="free", sampling=GREEDY))

    assert who(router.step(the(Dispatch, on_other), 7, finish=Finish.STOP)) == ("free", "other")


def a_worker(dice: random.Random, worker_id: WorkerId, incarnation: int) -> WorkerJoined:
    description = a_description(
        worker_id=worker_id,
        incarnation=str(incarnation),
        role=dice.choice([Role.DECODE, Role.BOTH, Role.BOTH, Role.PREFILL]),
        max_running=dice.choice([1, 1, 2]),
        max_model_len=dice.choice([400, 4096]),
        kv_blocks=dice.choice([320 // BLOCK_TOKENS, 1024]),
    )
    adapters = tuple(dice.sample(ADAPTERS, dice.randrange(3)))
    labels = tuple(dice.sample(["gold", "eu"], dice.randrange(3)))
    description = structs.replace(description, labels=labels, adapters=adapters, adapter_slots=len(adapters))
    return WorkerJoined(description=description, address=f"unix:/{worker_id}")


def an_arrival_of_any_kind(dice: random.Random, request_id: str):
    particulars = [
        {},
        {},
        {"pin": dice.choice(WORKERS)},
        {"labels": dice.choice([("gold",), ("eu",), ("gold", "eu")])},
        {"among": tuple(dice.sample(WORKERS, 2))},
        {"adapter": dice.choice(ADAPTERS)},
        {"placement": Placement.DISAGGREGATED},
    ]
    return an_arrival(
        request_id=request_id,
        tokens=a_prompt(dice.choice([10, 300, 330, 1000])),
        sampling=GREEDY,
        tenant=dice.choice("abc"),
        priority=dice.randrange(3),
        session=dice.choice(["", "", "s1", "s2"]),
        **dice.choice(particulars),
    )


def could_be_served(router: RouterMachineDriver, request_id: str) -> bool:
    machine = router.machine
    live = machine.live_requests[request_id]
    request = machine.placer.with_session(live, router.now)
    candidate_table, settings = machine.registry.candidate_table(live), machine.settings
    outcome = decide(request, candidate_table, machine.policy, settings, random.Random(0))
    if isinstance(outcome, Rejection) and live.failures:  # after a failure, demands of the client do not count
        request = structs.replace(request, placement=Placement.AUTO, kv_path=None, pin=None)
        outcome = decide(request, candidate_table, machine.policy, settings, random.Random(0))
    return isinstance(outcome, Decision)


@pytest.mark.parametrize("seed", range(40))
def test_no_request_waits_for_available_capacity(seed):
    """Simulate requests of all kinds, and workers that join, leave, drain, fail and are reserved by peer routers."""
    dice, incarnations = random.Random(seed), count()
    router = RouterMachineDriver(oversubscribe=1.0, max_queued=25, max_queue_seconds=1e6, session_affinity="hard")
    running: dict[str, Dispatch] = {}
    gated = 0

    def note(commands):
        running.update({each.start.request_id: each for each in commands if isinstance(each, Dispatch)})

    for worker_id in WORKERS[1:]:
        note(router.send(a_worker(dice, worker_id, next(incarnations))))
    for step in range(200):
        router.now = Nanos(router.now + SECOND // 10)
        running = {name: work for name, work in running.items() if router.machine.attempts.get(name) is not None}
        kind = dice.random()
        if kind < 0.55:
            note(router.send(an_arrival_of_any_kind(dice, f"r{step}")))
        elif kind < 0.85 and running:
            work = running.pop(dice.choice(sorted(running)))
            start = work.start
            if dice.random() < 0.15:
                note(router.reject(work, dice.choice([Reason.INTERNAL, Reason.DRAINING])))
            elif start.phase is Phase.PREFILL:
                handed = a_handoff(prefill_worker=work.worker_id, num_tokens=len(start.tokens) // 4)
                note(router.step(work, 7, finish=Finish.LENGTH, handoff=handed))
            else:
                note(router.step(work, 7, finish=Finish.STOP))
        elif kind < 0.89 and (waiting := list(router.machine.queue.waiting)):
            note(router.cancel(dice.choice(waiting)))
        elif kind < 0.93:
            note(router.send(a_worker(dice, dice.choice(WORKERS), next(incarnations))))
        elif kind < 0.95:
            note(router.leave(dice.choice(WORKERS)))
        elif kind < 0.96:
            note(router.send(WorkerDraining(worker_id=dice.choice(WORKERS))))
        elif kind < 0.99:
            booked = {each: ReservationTotals(100, 3.0, dice.randrange(3)) for each in dice.sample(WORKERS, 3)}
            note(router.send(PeerReserved(replica="other", booked=booked)))
        elif kind < 0.995:
            key = (dice.choice("abc"), dice.choice(["s1", "s2"]))
            binding = SessionBinding(key=key, worker_id=dice.choice([None, *WORKERS]))
            note(router.send(SessionsBound(bindings=(binding,))))
        else:
            tuned = structs.replace(router.machine.thresholds(), oversubscribe=dice.choice([1.0, 2.0]))
            note(router.send(ThresholdsChanged(thresholds=tuned)))
        assert not [each for each in router.machine.queue.waiting if could_be_served(router, each)], step
        gated += any(queue.groups.blockages for queue in router.machine.queue.queues.values())
    assert gated > 5
