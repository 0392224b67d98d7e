"""What the router's machine does with requests that find no room: who waits, who is refused, who is next."""

from msgspec import structs

from fleet.clock import MILLISECOND, SECOND, Nanos
from fleet.errors import Reason
from fleet.requests import Finish, Sampling
from fleet.roles import Role
from fleet.router.messages import Ticked, Tuned
from fleet.router.tenants import TenantSettings
from fleet.router.waiting import EVIDENCE
from tests.builders import an_arrival
from tests.unit.router.driver import Dispatch, Driver, Refuse, the

GREEDY = Sampling(temperature=0.0, max_tokens=8)


class Busy(Driver):
    """One worker with room for one request, which is taken by a request called "running"."""

    def __init__(self, **settings):
        super().__init__(oversubscribe=1.0, **settings)
        self.join("d1", Role.DECODE, max_running=1)
        self.work = the(Dispatch, self.arrive("running"))
        self.served: list[str] = []

    def arrive(self, name, tenant="", **fields):
        return self.send(an_arrival(request_id=name, tenant=tenant, sampling=GREEDY, **fields))

    def finish(self):
        """End what runs; the next one starts."""
        commands = self.step(self.work, 1, finish=Finish.STOP)
        if started := [command for command in commands if isinstance(command, Dispatch)]:
            (self.work,) = started
            self.served.append(self.work.start.request_id.partition("#")[0])

    def after(self, seconds):
        self.now = Nanos(self.now + round(seconds * SECOND))


def a_paced_router(**settings):
    """A router whose one worker has been seen to take a request of ten tokens each second; nobody waits yet."""
    router = Busy(**settings)
    for number in range(EVIDENCE + 1):
        router.arrive(f"warm{number}")
    for _ in range(EVIDENCE + 1):
        router.after(1)
        router.finish()
    return router


def test_tenants_that_flood_the_queue_lose_their_own_places():
    router = Busy(max_queued=4)
    for number in range(4):
        router.arrive(f"flood{number}", "flood")

    refusal = the(Refuse, router.arrive("modest", "modest"))

    assert (refusal.request_id, refusal.reason) == ("flood3", Reason.QUEUE_FULL)
    assert refusal.retry_after_ms >= 1000
    for _ in range(4):
        router.finish()
    assert sorted(router.served) == ["flood0", "flood1", "flood2", "modest"]
    assert router.served.index("modest") <= 1


def test_tenants_take_turns_by_weight_while_requests_wait():
    router = Busy(tenants={"gold": TenantSettings(weight=2.0)})
    for number in range(12):
        router.arrive(f"gold{number}", "gold")
        router.arrive(f"rest{number}", "rest")
    for _ in range(12):
        router.finish()
    assert sum(name.startswith("gold") for name in router.served) == 8


def test_a_request_that_would_wait_longer_than_the_limit_is_refused_at_once_with_a_hint():
    router = a_paced_router(max_queue_seconds=2.5)
    router.arrive("next")
    for number in range(2):
        assert not router.arrive(f"waits{number}")

    refusal = the(Refuse, router.arrive("late"))

    assert (refusal.reason, refusal.request_id) == (Reason.QUEUE_FULL, "late")
    assert "about 3 s" in refusal.message
    assert 2_500 <= refusal.retry_after_ms <= 3_500


def test_a_request_that_would_wait_past_its_deadline_is_refused_at_once():
    router = a_paced_router()
    for number in range(4):
        router.arrive(f"waits{number}")
    tight = Nanos(router.now + 2 * SECOND)
    loose = Nanos(router.now + 20 * SECOND)

    refusal = the(Refuse, router.arrive("tight", deadline=tight))

    assert refusal.reason is Reason.QUEUE_FULL
    assert "deadline" in refusal.message
    assert not router.arrive("loose", deadline=loose)


def test_without_evidence_of_the_pace_a_request_waits_and_its_deadline_ends_it():
    router = Busy()
    deadline = Nanos(router.now + 50 * MILLISECOND)
    assert not router.arrive("hopeful", deadline=deadline)
    router.after(0.05)
    assert the(Refuse, router.send(Ticked())).reason is Reason.DEADLINE_PASSED


def test_a_request_whose_worker_was_lost_keeps_its_place_when_the_queue_is_full():
    router = Busy(max_queued=1)
    router.join("d2", Role.DECODE, max_running=1)
    second = the(Dispatch, router.arrive("second"))
    router.step(second, 7)
    router.arrive("waits")
    router.leave("d2")  # "second" waits again, as one too many

    refusal = the(Refuse, router.arrive("new"))

    assert refusal.request_id == "new"
    router.finish()
    assert router.served == ["second"]


def test_thresholds_that_are_set_count_for_the_next_request_and_read_back():
    router = Busy(max_queued=1)
    router.arrive("a")
    tuned = structs.replace(router.machine.thresholds(), max_queued=2)

    router.send(Tuned(thresholds=tuned))

    assert router.machine.thresholds() == tuned
    assert not router.arrive("b")
    assert the(Refuse, router.arrive("c")).reason is Reason.QUEUE_FULL


def test_a_higher_limit_moves_who_waits_at_once_and_survives_workers_that_leave_and_join():
    router = Busy(max_queued=9)
    for name in "abcd":
        router.arrive(name)

    started = router.send(Tuned(thresholds=structs.replace(router.machine.thresholds(), oversubscribe=3.0)))

    assert [command.start.request_id.partition("#")[0] for command in started] == ["a", "b"]
    joined = router.join("d2", Role.DECODE, max_running=1)
    assert [command.start.request_id.partition("#")[0] for command in joined] == ["c", "d"]
