"""Sessions: where they stay, for how long, and what happens when that worker is gone."""

import pytest

from fleet.clock import SECOND, Nanos
from fleet.errors import Reason
from fleet.ids import WorkerId
from fleet.roles import Role
from fleet.router import sessions as sessions_module
from fleet.router.impossible import Cause
from fleet.router.messages import SessionsBound, WorkerDraining
from fleet.router.sessions import MOST_TOLD, SessionBinding, Sessions
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


def test_what_happened_here_is_news_once_and_what_was_heard_is_none():
    sessions = Sessions(ttl_seconds=10, capacity=10, telling=True)
    sessions.bind(A, W2, at(0))
    sessions.bind(A, W1, at(1))
    sessions.bind(("", "b"), W2, at(1))
    sessions.forget(("", "b"))
    sessions.heard(SessionBinding(key=("", "c"), worker_id=W2), at(1))

    assert sessions.news() == [
        SessionBinding(key=A, worker_id=W1),
        SessionBinding(key=("", "b"), worker_id=None),
    ]
    assert sessions.news() == []
    assert sessions.bound(("", "c"), at(2)) == W2


def test_news_that_nobody_asks_for_are_bounded(monkeypatch):
    monkeypatch.setattr(sessions_module, "MOST_TOLD", 3)
    silent, telling = (Sessions(ttl_seconds=10, capacity=100, telling=telling) for telling in (False, True))
    for number in range(9):
        for sessions in (silent, telling):
            sessions.bind(("", str(number)), W1, at(0))

    assert (len(silent.news()), len(telling.news())) == (0, 3)


def test_who_is_reached_later_is_told_the_latest():
    sessions = Sessions(ttl_seconds=10, capacity=MOST_TOLD + 5)
    for number in range(MOST_TOLD + 1):
        sessions.bind(("", str(number)), W1, at(0))
    sessions.bind(("", "1"), W2, at(0))

    latest = sessions.latest()

    assert len(latest) == MOST_TOLD
    assert latest[0].key == ("", "2")
    assert latest[-1] == SessionBinding(key=("", "1"), worker_id=W2)


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


def test_a_session_stays_where_it_is_whichever_router_its_requests_come_by():
    routers = [Driver(*WORKERS, seed=seed, session_affinity="hard", replicas_listen="unix:r") for seed in range(3)]

    def tell() -> None:
        for router in routers:
            news = tuple(router.machine.sessions.news())
            for other in routers:
                if other is not router:
                    other.send(SessionsBound(bindings=news))

    def served(router: Driver, request_id: str, session: str) -> str:
        worker = worker_of(router, request_id, session)
        router.cancel(request_id)
        tell()
        return worker

    homes = {number: served(routers[number % 3], f"r{number}", f"s{number}") for number in range(8)}
    assert len(set(homes.values())) > 2, "they are spread, so that staying is no accident"
    for turn in range(1, 4):
        for number in range(8):
            assert served(routers[(number + turn) % 3], f"r{number}-{turn}", f"s{number}") == homes[number]

    for router in routers:
        router.leave(homes[0])
    assert the(Refuse, ask(routers[0], "lost", "s0")).field == "session"
    tell()
    home = served(routers[1], "again", "s0")  # refused once, and not by each of them
    assert served(routers[2], "and again", "s0") == home
