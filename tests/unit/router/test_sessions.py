"""Sessions: their workers, their time to live, and what happens when a worker leaves."""

import pytest

from fleet.core.clock import SECOND, Nanos
from fleet.core.errors import Reason
from fleet.core.ids import WorkerId
from fleet.core.roles import Role
from fleet.router import sessions as sessions_module
from fleet.router.messages import SessionsBound, WorkerDraining
from fleet.router.placement.wait_or_reject import RejectionCause
from fleet.router.sessions import MAX_SESSION_NEWS, SessionBinding, SessionTable
from tests.support.builders import an_arrival
from tests.support.router.machine_driver import Dispatch, Reject, RouterMachineDriver, the

WORKERS = tuple((f"w{number}", Role.BOTH) for number in range(4))
A = ("tenant", "a")
W1, W2 = WorkerId("w1"), WorkerId("w2")


def at(seconds: float) -> Nanos:
    return Nanos(int(seconds * SECOND))


def test_binding_lasts_while_it_is_used():
    sessions = SessionTable(ttl_seconds=10, capacity=10)
    sessions.bind(A, W1, at(0))

    assert sessions.bound(A, at(10)) == W1
    sessions.bind(A, W1, at(10))
    assert sessions.bound(A, at(20)) == W1
    assert sessions.bound(A, at(20.001)) is None
    assert len(sessions) == 0


def test_longest_idle_sessions_are_forgotten_first():
    sessions = SessionTable(ttl_seconds=10, capacity=2)
    for number, instant in ((1, 0), (2, 1), (1, 2), (3, 3)):
        sessions.bind(("", str(number)), W1, at(instant))

    assert [sessions.bound(("", str(number)), at(3)) for number in (1, 2, 3)] == [W1, None, W1]
    sessions.bind(("", "4"), W2, at(14))
    assert len(sessions) == 1, "the idle ones have left without being asked for"


def test_tenants_have_separate_session_names():
    sessions = SessionTable(ttl_seconds=10, capacity=10)
    sessions.bind(("x", "a"), W1, at(0))

    assert sessions.bound(("y", "a"), at(0)) is None


def test_own_bindings_are_news_once_and_heard_ones_never():
    sessions = SessionTable(ttl_seconds=10, capacity=10, telling=True)
    sessions.bind(A, W2, at(0))
    sessions.bind(A, W1, at(1))
    sessions.bind(("", "b"), W2, at(1))
    sessions.forget(("", "b"), at(1))
    sessions.apply(SessionBinding(key=("", "c"), worker_id=W2), at(1))

    assert [(told.key, told.worker_id) for told in sessions.news()] == [(A, W1), (("", "b"), None)]
    assert sessions.news() == []
    assert sessions.bound(("", "c"), at(2)) == W2


def test_unread_news_are_bounded(monkeypatch):
    monkeypatch.setattr(sessions_module, "MAX_SESSION_NEWS", 3)
    silent, telling = (SessionTable(ttl_seconds=10, capacity=100, telling=telling) for telling in (False, True))
    for number in range(9):
        for sessions in (silent, telling):
            sessions.bind(("", str(number)), W1, at(0))

    assert (len(silent.news()), len(telling.news())) == (0, 3)


def test_late_peer_gets_the_latest_bindings():
    sessions = SessionTable(ttl_seconds=10, capacity=MAX_SESSION_NEWS + 5)
    for number in range(MAX_SESSION_NEWS + 1):
        sessions.bind(("", str(number)), W1, at(0))
    sessions.bind(("", "1"), W2, at(0))

    latest = sessions.latest()

    assert len(latest) == MAX_SESSION_NEWS
    assert latest[0].key == ("", "2")
    assert latest[-1] == SessionBinding(key=("", "1"), worker_id=W2)


def routers_sessions(*clocks: float) -> list[tuple[SessionTable, Nanos]]:
    """Return the session tables of routers that know each other's clocks, each with the time of its clock at time 0."""
    met = [(SessionTable(ttl_seconds=10, capacity=10, telling=True), at(clock)) for clock in clocks]
    for one, now in met:
        for _, clock in met:
            one.advance_clock(clock, now)
    return met


@pytest.mark.parametrize("clocks", [(0, 0, 0), (0, 1000, 5), (7, 3, 0)])
def test_all_routers_agree_on_the_latest_binding(clocks):
    routers = routers_sessions(*clocks)
    told = []
    for number, second in ((1, 1), (0, 2), (2, 3), (1, 4), (0, 5)):
        one, clock = routers[number]
        one.bind(A, WorkerId(f"w{second}"), Nanos(clock + at(second)))
        told += one.news()

    for number, (one, clock) in enumerate(routers):
        for binding in told[number:] + told[:number]:
            one.apply(binding, Nanos(clock + at(6)))
        assert one.bound(A, Nanos(clock + at(6))) == "w5"


def test_simultaneous_bindings_settle_alike_everywhere():
    (one, _), (other, _) = routers_sessions(0, 0)
    one.bind(A, W1, at(1))
    other.bind(A, W2, at(1))
    for each, news in ((one, other.news()), (other, one.news())):
        each.apply(news[0], at(1))

    assert one.bound(A, at(1)) == other.bound(A, at(1)) == W2


def test_later_binding_wins_over_a_heard_one():
    one = SessionTable(ttl_seconds=10, capacity=10, telling=True)
    one.apply(SessionBinding(key=A, worker_id=W2, stamp=at(1000)), at(1))
    one.bind(A, W1, at(1))

    (told,) = one.news()
    assert told.stamp > at(1000)
    assert one.bound(A, at(1)) == W1


def test_forget_affects_only_older_bindings():
    (one, _), (other, _) = routers_sessions(0, 0)
    one.bind(A, W1, at(1))
    other.forget(A, at(2))
    (forgotten,) = other.news()
    one.apply(forgotten, at(2))
    assert one.bound(A, at(2)) is None
    one.bind(A, W2, at(3))
    one.apply(forgotten, at(3))
    assert one.bound(A, at(3)) == W2


def test_unstamped_binding_counts_when_it_is_heard():
    (one, _) = routers_sessions(0)[0]
    one.bind(A, W1, at(1))
    one.apply(SessionBinding(key=A, worker_id=W2), at(2))

    assert one.bound(A, at(2)) == W2


def ask(router: RouterMachineDriver, request_id: str, session: str = "s"):
    return router.send(an_arrival(request_id=request_id, session=session, tokens=10))


def worker_of(router: RouterMachineDriver, request_id: str, session: str = "s") -> str:
    return the(Dispatch, ask(router, request_id, session)).worker_id


@pytest.mark.parametrize("fields", [{"policy": "sticky"}, {"session_affinity": "hard"}])
def test_session_stays_on_its_worker(fields):
    router = RouterMachineDriver(*WORKERS, **fields)
    first = worker_of(router, "r0")

    assert {worker_of(router, f"r{number}") for number in range(1, 10)} == {first}


def test_default_policy_moves_a_session_only_for_load():
    router = RouterMachineDriver(*WORKERS)
    first = worker_of(router, "r0")
    router.cancel("r0")
    assert {worker_of(router, f"r{number}") for number in range(1, 2)} == {first}
    for number in range(2, 12):
        worker_of(router, f"r{number}")

    assert router.booked(first)[0] < 11


def test_soft_binding_moves_when_its_worker_is_lost():
    router = RouterMachineDriver(*WORKERS, policy="sticky")
    first = worker_of(router, "r0")
    router.cancel("r0")
    router.leave(first)

    second = worker_of(router, "r1")

    assert second != first
    assert worker_of(router, "r2") == second


@pytest.mark.parametrize("how", ["left", "draining"])
def test_hard_binding_is_rejected_once_then_moves(how):
    router = RouterMachineDriver(*WORKERS, session_affinity="hard")
    first = worker_of(router, "r0")
    router.cancel("r0")
    if how == "left":
        router.leave(first)
    else:
        router.send(WorkerDraining(worker_id=WorkerId(first)))

    refusal = the(Reject, ask(router, "r1"))

    assert (refusal.reason, refusal.field) == (Reason.WORKER_LOST, "session")
    assert router.machine.snapshot().counters.impossible == {RejectionCause.SESSION_LOST: 1}
    assert worker_of(router, "r2") != first


def test_hard_binding_waits_for_its_busy_worker():
    router = RouterMachineDriver(session_affinity="hard", oversubscribe=1.0)
    for name in ("w1", "w2"):
        router.join(name, Role.BOTH, max_running=1)
    first = worker_of(router, "r0")

    assert ask(router, "r1") == []
    commands = router.cancel("r0")

    assert the(Dispatch, commands).worker_id == first


def test_expired_session_starts_anew():
    router = RouterMachineDriver(*WORKERS, session_affinity="hard", session_ttl_seconds=5.0)
    first = worker_of(router, "r0")
    router.cancel("r0")
    router.leave(first)
    router.now = Nanos(router.now + 6 * SECOND)

    assert worker_of(router, "r1") != first


def test_affinity_off_ignores_sessions():
    router = RouterMachineDriver(*WORKERS, session_affinity="off", policy="sticky")

    assert len({worker_of(router, f"r{number}") for number in range(4)}) == 4


def test_session_stays_across_peer_routers():
    routers = [
        RouterMachineDriver(*WORKERS, seed=seed, session_affinity="hard", replicas_listen="unix:r") for seed in range(3)
    ]

    def tell() -> None:
        for router in routers:
            news = tuple(router.machine.sessions.news())
            for other in routers:
                if other is not router:
                    other.send(SessionsBound(bindings=news))

    def served(router: RouterMachineDriver, request_id: str, session: str) -> str:
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
    assert the(Reject, ask(routers[0], "lost", "s0")).field == "session"
    tell()
    home = served(routers[1], "again", "s0")  # the session was rejected once; other routers do not reject it again
    assert served(routers[2], "and again", "s0") == home


@pytest.mark.parametrize(
    "settings", [{"max_sessions": 1}, {"session_ttl_seconds": 5.0}], ids=["crowded out", "too old"]
)
@pytest.mark.parametrize("heard", [False, True])
def test_queued_request_moves_when_its_session_is_forgotten(settings, heard):
    router = RouterMachineDriver(oversubscribe=1.0, session_affinity="hard", **settings)
    for worker_id in ("w0", "w1"):
        router.join(worker_id, max_running=2)
    for name in ("first", "second"):
        router.send(an_arrival(request_id=name, session="s", pin=WorkerId("w0")))
    assert not router.send(an_arrival(request_id="waits", session="s"))
    router.now = Nanos(router.now + 6 * SECOND)

    if heard:
        moved = router.send(SessionsBound(bindings=(SessionBinding(key=("", "other"), worker_id=W1),)))
    else:
        moved = router.send(an_arrival(request_id="other", session="other"))[-1:]

    sent = the(Dispatch, moved)
    assert (sent.start.request_id.partition("#")[0], sent.worker_id) == ("waits", "w1")
