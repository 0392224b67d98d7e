"""Sessions: where they stay, for how long, and what happens when that worker is gone (row R14)."""

import pytest

from fleet.clock import SECOND, Nanos
from fleet.errors import Reason
from fleet.ids import WorkerId
from fleet.roles import Role
from fleet.router.impossible import Cause
from fleet.router.messages import WorkerDraining
from fleet.router.sessions import Sessions
from tests.builders import an_arrival
from tests.unit.router.driver import Dispatch, Driver, Refuse, the

WORKERS = tuple((f"w{number}", Role.BOTH) for number in range(4))
A = ("tenant", "a")
W1, W2 = WorkerId("w1"), WorkerId("w2")


def at(seconds: float) -> Nanos:
    return Nanos(int(seconds * SECOND))


def test_a_binding_lives_as_long_as_it_is_used():
    sessions = Sessions(ttl_seconds=10, capacity=10)
    sessions.bind(A, W1, at(0))

    assert sessions.bound(A, at(10)) == W1
    sessions.bind(A, W1, at(10))
    assert sessions.bound(A, at(20)) == W1
    assert sessions.bound(A, at(20.001)) is None
    assert len(sessions) == 0


def test_idle_ones_go_first_and_no_more_than_so_many_are_remembered():
    sessions = Sessions(ttl_seconds=10, capacity=2)
    for number, instant in ((1, 0), (2, 1), (1, 2), (3, 3)):
        sessions.bind(("", str(number)), W1, at(instant))

    assert [sessions.bound(("", str(number)), at(3)) for number in (1, 2, 3)] == [W1, None, W1]
    sessions.bind(("", "4"), W2, at(14))
    assert len(sessions) == 1, "the idle ones have left without being asked for"


def test_tenants_do_not_share_their_sessions_names():
    sessions = Sessions(ttl_seconds=10, capacity=10)
    sessions.bind(("x", "a"), W1, at(0))

    assert sessions.bound(("y", "a"), at(0)) is None


def ask(router: Driver, request_id: str, session: str = "s"):
    return router.send(an_arrival(request_id=request_id, session=session, tokens=10))


def worker_of(router: Driver, request_id: str, session: str = "s") -> str:
    return the(Dispatch, ask(router, request_id, session)).worker_id


@pytest.mark.parametrize("fields", [{"policy": "sticky"}, {"session_affinity": "hard"}])
def test_a_session_stays_where_it_is(fields):
    router = Driver(*WORKERS, **fields)
    first = worker_of(router, "r0")

    assert {worker_of(router, f"r{number}") for number in range(1, 10)} == {first}


def test_the_default_policy_keeps_a_session_among_equals_and_lets_it_go_for_load():
    router = Driver(*WORKERS)
    first = worker_of(router, "r0")
    router.cancel("r0")
    assert {worker_of(router, f"r{number}") for number in range(1, 2)} == {first}
    for number in range(2, 12):
        worker_of(router, f"r{number}")

    assert router.booked(first)[0] < 11


def test_a_soft_binding_moves_on_when_its_worker_is_lost():
    router = Driver(*WORKERS, policy="sticky")
    first = worker_of(router, "r0")
    router.cancel("r0")
    router.leave(first)

    second = worker_of(router, "r1")

    assert second != first
    assert worker_of(router, "r2") == second


@pytest.mark.parametrize("how", ["left", "draining"])
def test_a_hard_binding_fails_at_once_when_its_worker_is_gone_and_begins_anew(how):
    router = Driver(*WORKERS, session_affinity="hard")
    first = worker_of(router, "r0")
    router.cancel("r0")
    if how == "left":
        router.leave(first)
    else:
        router.send(WorkerDraining(worker_id=WorkerId(first)))

    refusal = the(Refuse, ask(router, "r1"))

    assert (refusal.reason, refusal.field) == (Reason.WORKER_LOST, "session")
    assert router.machine.snapshot().counters.impossible == {Cause.SESSION_LOST: 1}
    assert worker_of(router, "r2") != first


def test_a_hard_binding_waits_for_its_worker_when_that_is_busy():
    router = Driver(session_affinity="hard", oversubscribe=1.0)
    for name in ("w1", "w2"):
        router.join(name, Role.BOTH, max_running=1)
    first = worker_of(router, "r0")

    assert ask(router, "r1") == []
    commands = router.cancel("r0")

    assert the(Dispatch, commands).worker_id == first


def test_a_session_that_was_idle_for_too_long_starts_anew():
    router = Driver(*WORKERS, session_affinity="hard", session_ttl_seconds=5.0)
    first = worker_of(router, "r0")
    router.cancel("r0")
    router.leave(first)
    router.now = Nanos(router.now + 6 * SECOND)

    assert worker_of(router, "r1") != first


def test_without_affinity_sessions_are_not_looked_at():
    router = Driver(*WORKERS, session_affinity="off", policy="sticky")

    assert len({worker_of(router, f"r{number}") for number in range(4)}) == 4
