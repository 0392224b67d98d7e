"""Faults of a simulated cluster: which work is lost or repeated, and that no request is lost."""

from functools import partial

import pytest
from msgspec import structs

from fleet.core.clock import MILLISECOND, SECOND, Nanos
from fleet.core.ids import StoreId, WorkerId
from fleet.core.roles import Phase, Role
from fleet.router.messages import CacheAssumed, Dispatch, WorkerDraining, WorkerJoined, WorkerLeft, WorkerStepped
from fleet.sim.cluster.faults import Fault, NetworkCut, NodeLost, RoleFlip, WorkerLost, WorkerSlow
from fleet.sim.kernel import Kernel
from fleet.sim.results.outcomes import EndedRequest
from fleet.sim.run import RunPlan
from fleet.sim.world import World
from kvstore.eviction.trace_replay import TraceRequest
from tests.support.sim.worlds import BLOCK, a_plan, a_pool, a_world

FIRST = WorkerId("both-0")
AT = Nanos(3 * SECOND)


class Watched:
    """A run with all events and commands of its router."""

    def __init__(self, plan: RunPlan, requests: int = 200, prompt: int = 300, output: int = 40):
        self.heard: list[tuple[float, object]] = []
        self.sent: list[tuple[float, Dispatch]] = []
        self.kernel = Kernel(plan.seed)
        self.world: World
        self.ended: list[EndedRequest]
        self.world, self.ended = a_world(self.kernel, plan, self._record)
        for fault in plan.faults:
            self.world.fail(fault)
        for number in range(requests):
            chain = tuple(1000 * number + index for index in range(prompt // BLOCK))
            at = Nanos(number * SECOND // 20 + 7)
            self.kernel.at(at, partial(self.world.send, TraceRequest(at, prompt, chain, output)))
        self.kernel.run()
        self.world.check()

    def _record(self, now: Nanos, event: object, commands: list[object]) -> None:
        self.heard.append((now / SECOND, event))
        self.sent.extend((now / SECOND, command) for command in commands if isinstance(command, Dispatch))

    def instants(self, kind: type, worker: WorkerId) -> list[float]:
        """Return the instants, in seconds, at which the router got an event of this kind from a worker."""
        return [at for at, event in self.heard if isinstance(event, kind) and _worker(event) == worker]

    @property
    def retried(self) -> int:
        return self.world.machine.snapshot().counters.retried

    def nothing_is_lost(self) -> None:
        assert len(self.ended) == 200
        assert not [each.refused for each in self.ended if each.refused]
        assert {each.output_tokens for each in self.ended} == {40}


def _worker(event: object) -> WorkerId:
    return event.description.worker_id if isinstance(event, WorkerJoined) else event.worker_id


def test_requests_of_lost_node_continue_elsewhere():
    pool = structs.replace(a_pool(workers=4), gpus=4)  # two workers per node
    run = Watched(a_plan(pool, faults=(NodeLost(at=AT, node=StoreId("both-node-0"), down=Nanos(SECOND)),)))
    run.nothing_is_lost()
    assert run.retried > 0
    for number, gone in enumerate([True, True, False, False]):
        assert bool(run.instants(WorkerLeft, WorkerId(f"both-{number}"))) is gone
    # The worker is down for one second, and needs two seconds to start.
    assert run.instants(WorkerJoined, FIRST)[1] == pytest.approx(6.0, abs=0.01)


def test_slow_start_delays_successor():
    fault = WorkerLost(at=AT, worker=FIRST, down=Nanos(SECOND), start=Nanos(5 * SECOND))
    run = Watched(a_plan(faults=(fault,)))
    run.nothing_is_lost()
    assert run.instants(WorkerJoined, FIRST)[1] == pytest.approx(9.0, abs=0.01)


def test_slow_worker_gets_fewer_requests_and_loses_none():
    fault = WorkerSlow(at=Nanos(0), worker=FIRST, factor=5.0, lasting=Nanos(100 * SECOND))
    run = Watched(a_plan(faults=(fault,)))
    run.nothing_is_lost()
    assert run.retried == 0
    to_it = sum(command.worker_id == FIRST for _, command in run.sent)
    assert to_it < 0.4 * len(run.sent)


def test_slow_worker_recovers_its_speed():
    answers = {}
    for name, lasting in (("never", 0.0), ("over", 1.0), ("on", 100.0)):
        fault = WorkerSlow(at=Nanos(0), worker=FIRST, factor=5.0, lasting=Nanos(round(lasting * SECOND)))
        kernel = Kernel(1)
        world, ended = a_world(kernel, a_plan(a_pool(workers=1), faults=()))
        world.fail(fault)
        at = Nanos(2 * SECOND)
        kernel.at(at, partial(world.send, TraceRequest(at, 300, tuple(range(18)), 40)))
        kernel.run()
        answers[name] = ended[0].end - at
    assert answers["over"] == answers["never"]
    assert answers["on"] == pytest.approx(5 * answers["never"], rel=0.05)  # apart from message delays


def test_short_cut_only_delays():
    run = Watched(a_plan(faults=(NetworkCut(at=AT, worker=FIRST, lasting=Nanos(SECOND)),)))
    run.nothing_is_lost()
    assert run.retried == 0
    assert not run.instants(WorkerLeft, FIRST)
    steps = run.instants(WorkerStepped, FIRST)
    assert not [at for at in steps if 3.001 < at < 4.0]
    assert [at for at in steps if 4.0 <= at < 4.01]  # held messages arrive at once


def test_long_cut_loses_attempts_but_not_cache():
    run = Watched(a_plan(faults=(NetworkCut(at=AT, worker=FIRST, lasting=Nanos(5 * SECOND)),)))
    run.nothing_is_lost()
    assert run.retried > 0
    assert run.world.machine.snapshot().counters.late_messages == 0  # held messages are dropped
    assert run.instants(WorkerLeft, FIRST) == [pytest.approx(6.0)]  # the heartbeat timeout is three seconds
    back = run.instants(WorkerJoined, FIRST)[1]
    assert back == pytest.approx(8.0, abs=0.01)
    told = [
        event for at, event in run.heard if isinstance(event, CacheAssumed) and at == back and event.worker_id == FIRST
    ]
    assert len(told) == 1
    assert len(told[0].stored) > 100
    assert [at for at, command in run.sent if command.worker_id == FIRST and at > back]


def test_worker_that_dies_in_cut_is_replaced():
    faults = (
        NetworkCut(at=AT, worker=FIRST, lasting=Nanos(5 * SECOND)),
        WorkerLost(at=Nanos(4 * SECOND), worker=FIRST, down=Nanos(SECOND)),
    )
    run = Watched(a_plan(faults=faults))
    run.nothing_is_lost()
    assert len(run.instants(WorkerLeft, FIRST)) == 1
    assert len(run.instants(WorkerJoined, FIRST)) == 2


def test_role_change_drains_and_keeps_cache():
    fault = RoleFlip(at=AT, worker=FIRST, role=Role.PREFILL)
    run = Watched(a_plan(a_pool(workers=3), faults=(fault,), remote_prefill_min_tokens=100))
    run.nothing_is_lost()
    assert run.retried == 1  # the attempt that was on its way to the worker
    (drained,) = run.instants(WorkerDraining, FIRST)
    flipped = run.instants(WorkerJoined, FIRST)[1]
    assert 0.0005 < flipped - drained < 1.0  # running requests have ended
    to_it = [(at, command.start.phase) for at, command in run.sent if command.worker_id == FIRST]
    assert {phase for at, phase in to_it if at < drained} == {Phase.AGGREGATED}
    assert not [at for at, _ in to_it if drained <= at < flipped]
    assert {phase for at, phase in to_it if at > flipped} == {Phase.PREFILL}
    told = [event for at, event in run.heard if isinstance(event, CacheAssumed) and at == flipped]
    assert [len(event.stored) > 100 for event in told if event.worker_id == FIRST] == [True]


def test_successor_after_role_change_has_new_role():
    faults = (
        RoleFlip(at=AT, worker=FIRST, role=Role.PREFILL),
        WorkerLost(at=Nanos(5 * SECOND), worker=FIRST, down=Nanos(SECOND)),
        RoleFlip(at=Nanos(9 * SECOND), worker=FIRST, role=Role.PREFILL),  # the role that it has
    )
    run = Watched(a_plan(a_pool(workers=3), faults=faults, remote_prefill_min_tokens=100))
    run.nothing_is_lost()
    roles = [
        event.description.role for _, event in run.heard if isinstance(event, WorkerJoined) and _worker(event) == FIRST
    ]
    assert roles == [Role.BOTH, Role.PREFILL, Role.PREFILL]


def test_draining_worker_changes_role_after_cut():
    faults = (
        RoleFlip(at=AT, worker=FIRST, role=Role.PREFILL),
        NetworkCut(at=Nanos(AT + 1000), worker=FIRST, lasting=Nanos(5 * SECOND)),
        NetworkCut(at=Nanos(4 * SECOND), worker=FIRST, lasting=Nanos(SECOND)),  # while it drains
    )
    run = Watched(a_plan(a_pool(workers=3), faults=faults, remote_prefill_min_tokens=100))
    run.nothing_is_lost()
    roles = [
        event.description.role for _, event in run.heard if isinstance(event, WorkerJoined) and _worker(event) == FIRST
    ]
    assert roles[-1] is Role.PREFILL


def test_idle_worker_changes_role_at_once():
    fault = RoleFlip(at=AT, worker=FIRST, role=Role.DECODE)
    run = Watched(a_plan(faults=(fault,)), requests=1)
    assert run.instants(WorkerJoined, FIRST)[1] == pytest.approx(3.0012, abs=1e-4)  # six message delays


def slow_links(*faults: Fault) -> RunPlan:
    """Return the plan of a prefill and two decode workers; the transfer of a prompt's blocks between them takes 50 ms."""
    pools = [structs.replace(pool, bandwidth=6e6) for pool in (a_pool(Role.PREFILL, 1), a_pool(Role.DECODE, 2))]
    return a_plan(*pools, faults=faults, remote_prefill_min_tokens=100)


def test_decode_worker_computes_blocks_of_dead_prefill_worker():
    first = Watched(slow_links(), requests=1)
    done = next(at for at, event in first.heard if isinstance(event, WorkerStepped))  # end of the prefill
    fault = WorkerLost(
        at=Nanos(round(done * SECOND) + 20 * MILLISECOND), worker=WorkerId("prefill-0"), down=Nanos(SECOND)
    )
    run = Watched(slow_links(fault), requests=1)
    assert [each.output_tokens for each in run.ended] == [40]
    assert run.retried == 0  # the decode worker computes the blocks
    assert run.ended[0].ttft_ms < first.ended[0].ttft_ms


@pytest.mark.parametrize("worker", ["prefill-0", "decode-0"])
def test_worker_lost_during_transfer_loses_no_request(worker):
    run = Watched(slow_links(WorkerLost(at=AT, worker=WorkerId(worker), down=Nanos(SECOND))))
    run.nothing_is_lost()


def test_many_faults_at_once_lose_no_request():
    faults = (
        WorkerLost(at=Nanos(2 * SECOND), worker=WorkerId("decode-1"), down=Nanos(SECOND)),
        NetworkCut(at=AT, worker=WorkerId("decode-0"), lasting=Nanos(4 * SECOND)),
        WorkerSlow(at=AT, worker=WorkerId("prefill-0"), factor=4.0, lasting=Nanos(2 * SECOND)),
        RoleFlip(at=Nanos(5 * SECOND), worker=WorkerId("prefill-0"), role=Role.BOTH),
    )
    for seed in range(1, 4):
        run = Watched(structs.replace(slow_links(*faults), seed=seed))
        run.nothing_is_lost()


def test_two_slowdowns_end_separately():
    def last_end(*lasting: int) -> float:
        slow = [WorkerSlow(at=AT, worker=FIRST, factor=4.0, lasting=Nanos(each * SECOND)) for each in lasting]
        run = Watched(a_plan(a_pool(), faults=tuple(slow)))
        return run.world.last_end / SECOND

    assert last_end(20, 1) >= last_end(20) > last_end(1)


def test_worker_that_restarts_at_once_rejoins():
    run = Watched(a_plan(a_pool(), faults=(WorkerLost(at=AT, worker=FIRST, down=Nanos(0), start=Nanos(0)),)))
    run.nothing_is_lost()
    assert run.instants(WorkerLeft, FIRST)[-1] < run.instants(WorkerJoined, FIRST)[-1]
    assert any(at > AT / SECOND and sent.worker_id == FIRST for at, sent in run.sent)
