"""Admission by the router's machine: which requests wait without room, which are rejected, and which are next."""

import random

import pytest
from msgspec import structs

from fleet.core.clock import MILLISECOND, SECOND, Nanos
from fleet.core.errors import Reason
from fleet.core.ids import ModelName, WorkerId
from fleet.core.requests import Finish, Sampling
from fleet.core.roles import Placement, Role
from fleet.core.work import KvStored, LoraAdapter
from fleet.router.messages import KvChanged, PeerLeft, RouterTicked, ThresholdsChanged, WorkerDraining, WorkerJoined
from fleet.router.queueing import admission_queue as waiting_module
from fleet.router.queueing.admission import MAX_FAILED_TRIES
from fleet.router.state.departure_rate import EVIDENCE
from fleet.router.tenants import TenantSettings
from kvstore.block import chain
from tests.support.builders import BLOCK_TOKENS, a_description, a_prompt, an_arrival
from tests.support.router.machine_driver import Dispatch, Reject, RouterMachineDriver, the

GREEDY = Sampling(temperature=0.0, max_tokens=8)


class Busy(RouterMachineDriver):
    """A router with one worker that has room for one request; a request called "running" takes this room."""

    def __init__(self, **settings):
        super().__init__(oversubscribe=1.0, **settings)
        self.join("d1", Role.DECODE, max_running=1)
        self.work = the(Dispatch, self.arrive("running"))
        self.served: list[str] = []

    def arrive(self, name, tenant="", **fields):
        return self.send(an_arrival(request_id=name, tenant=tenant, sampling=GREEDY, **fields))

    def finish(self):
        """End the running request, so that the next one starts."""
        commands = self.step(self.work, 1, finish=Finish.STOP)
        if started := [command for command in commands if isinstance(command, Dispatch)]:
            (self.work,) = started
            self.served.append(self.work.start.request_id.partition("#")[0])

    def after(self, seconds):
        self.now = Nanos(self.now + round(seconds * SECOND))


def a_paced_router(**settings):
    """Return a router whose only worker has so far served a request of ten tokens each second; no request waits yet."""
    router = Busy(**settings)
    for number in range(EVIDENCE + 1):
        router.arrive(f"warm{number}")
    for _ in range(EVIDENCE + 1):
        router.after(1)
        router.finish()
    return router


def test_flooding_tenant_loses_its_own_requests():
    router = Busy(max_queued=4)
    for number in range(4):
        router.arrive(f"flood{number}", "flood")

    refusal = the(Reject, router.arrive("modest", "modest"))

    assert (refusal.request_id, refusal.reason) == ("flood3", Reason.QUEUE_FULL)
    assert refusal.retry_after_ms >= 1000
    for _ in range(4):
        router.finish()
    assert sorted(router.served) == ["flood0", "flood1", "flood2", "modest"]
    assert router.served.index("modest") <= 1


def test_queued_tenants_are_served_by_weight():
    router = Busy(tenants={"gold": TenantSettings(weight=2.0)})
    for number in range(12):
        router.arrive(f"gold{number}", "gold")
        router.arrive(f"rest{number}", "rest")
    for _ in range(12):
        router.finish()
    assert sum(name.startswith("gold") for name in router.served) == 8


@pytest.mark.parametrize(("priority_seconds", "seconds"), [(0.0, 1), (5.0, 15), (10.0, 30)])
def test_low_priority_waits_only_for_the_priority_seconds(priority_seconds, seconds):
    """Let a request with a higher priority by three arrive each second, so that one always waits; see when the low one is served."""
    router = Busy(priority_seconds=priority_seconds)
    router.arrive("low")
    for second in range(100):
        router.after(1)
        router.arrive(f"high{second}", priority=3)
        router.finish()
        if router.served[-1] == "low":
            break

    assert second + 1 == seconds


def test_request_with_too_long_predicted_wait_is_rejected():
    router = a_paced_router(max_queue_seconds=2.5)
    router.arrive("next")
    for number in range(2):
        assert not router.arrive(f"waits{number}")

    refusal = the(Reject, router.arrive("late"))

    assert (refusal.reason, refusal.request_id) == (Reason.QUEUE_FULL, "late")
    assert "about 3 s" in refusal.message
    assert 2_500 <= refusal.retry_after_ms <= 3_500


def test_retry_hint_of_dropped_request_is_of_its_own_model():
    router = a_paced_router()
    router.send(ThresholdsChanged(thresholds=structs.replace(router.machine.thresholds(), max_queued=4)))
    for number in range(4):
        router.arrive(f"waits{number}")
    other = ModelName("other")
    router.join("d2", max_running=1, model=other)
    router.arrive("runs", model=other)

    refusal = the(Reject, router.arrive("newcomer", model=other))

    assert refusal.request_id == "waits3"
    assert 2500 <= refusal.retry_after_ms <= 4500


def test_high_priority_request_ignores_the_backlog_behind_it():
    router = a_paced_router(max_queue_seconds=2.5)
    router.arrive("next")
    for number in range(2):
        router.arrive(f"waits{number}")
    deadline = Nanos(router.now + SECOND)

    assert the(Reject, router.arrive("plain")).reason is Reason.QUEUE_FULL
    assert not router.arrive("urgent", priority=1)
    assert not router.arrive("late", priority=2, deadline=deadline)
    assert the(Reject, router.arrive("again", priority=1, deadline=deadline)).reason is Reason.QUEUE_FULL
    for _ in range(3):
        router.finish()
    assert router.served[-3:] == ["late", "urgent", "next"]


def test_predicted_wait_counts_cached_tokens_of_departures():
    """Send prompts of 3,200 tokens, all but 32 of which the worker has cached; a request leaves the queue each second."""
    prompt = a_prompt(3200)
    router = Busy(max_queue_seconds=4.5)
    held = tuple(chain(prompt[: 4 * (3200 - BLOCK_TOKENS)], BLOCK_TOKENS))
    router.send(KvChanged(worker_id=WorkerId("d1"), events=(KvStored(held),)))
    for number in range(EVIDENCE + 1):
        router.arrive(f"warm{number}", tokens=prompt)
    for _ in range(EVIDENCE + 1):
        router.after(1)
        router.finish()

    router.arrive("next", tokens=prompt)
    assert [router.arrive(f"waits{number}", tokens=prompt) for number in range(4)] == [[]] * 4
    assert 3500 <= the(Reject, router.arrive("late", tokens=prompt)).retry_after_ms <= 5500


def test_request_that_would_miss_its_deadline_is_rejected():
    router = a_paced_router()
    for number in range(4):
        router.arrive(f"waits{number}")
    tight = Nanos(router.now + 2 * SECOND)
    loose = Nanos(router.now + 20 * SECOND)

    refusal = the(Reject, router.arrive("tight", deadline=tight))

    assert refusal.reason is Reason.QUEUE_FULL
    assert "deadline" in refusal.message
    assert not router.arrive("loose", deadline=loose)


def test_request_waits_until_its_deadline_without_evidence():
    router = Busy()
    deadline = Nanos(router.now + 50 * MILLISECOND)
    assert not router.arrive("hopeful", deadline=deadline)
    router.after(0.05)
    assert the(Reject, router.send(RouterTicked())).reason is Reason.DEADLINE_PASSED


def test_request_of_lost_worker_stays_in_a_full_queue():
    router = Busy(max_queued=1)
    router.join("d2", Role.DECODE, max_running=1)
    second = the(Dispatch, router.arrive("second"))
    router.step(second, 7)
    router.arrive("waits")
    router.leave("d2")  # "second" waits again, so one request too many waits

    refusal = the(Reject, router.arrive("new"))

    assert refusal.request_id == "new"
    router.finish()
    assert router.served == ["second"]


def test_changed_thresholds_apply_to_the_next_request():
    router = Busy(max_queued=1)
    router.arrive("a")
    tuned = structs.replace(router.machine.thresholds(), max_queued=2)

    router.send(ThresholdsChanged(thresholds=tuned))

    assert router.machine.thresholds() == tuned
    assert not router.arrive("b")
    assert the(Reject, router.arrive("c")).reason is Reason.QUEUE_FULL


def test_raised_limit_moves_queue_and_survives_rejoin():
    router = Busy(max_queued=9)
    for name in "abcd":
        router.arrive(name)

    started = router.send(ThresholdsChanged(thresholds=structs.replace(router.machine.thresholds(), oversubscribe=3.0)))

    assert [command.start.request_id.partition("#")[0] for command in started] == ["a", "b"]
    joined = router.join("d2", Role.DECODE, max_running=1)
    assert [command.start.request_id.partition("#")[0] for command in joined] == ["c", "d"]


# Requests that only some of the workers can serve.

ADA = LoraAdapter(ModelName("ada"))
PARTICULAR = [
    {"pin": WorkerId("busy")},
    {"labels": ("gold",)},
    {"among": (WorkerId("busy"),)},
    {"adapter": ADA},
    {"session": "kept"},
    {"placement": Placement.DISAGGREGATED},
    {"tokens": 3000},
]


def a_half_busy_router() -> tuple[RouterMachineDriver, Dispatch]:
    """Return a router with two workers, and the work that fills one of them.

    Only the full worker has a LoRA adapter, a label, a larger context, a prefill partner and a session.
    """
    router = RouterMachineDriver(oversubscribe=1.0, session_affinity="hard")
    router.join("other", max_running=2, max_model_len=2000, fingerprint="of its own")
    description = a_description(worker_id="busy", max_running=1)
    description = structs.replace(description, labels=("gold",), adapters=(ADA,), adapter_slots=1)
    router.send(WorkerJoined(description=description, address="unix:/busy"))
    router.join("partner", Role.PREFILL)
    arrival = an_arrival(request_id="first", sampling=GREEDY, pin=WorkerId("busy"), session="kept")
    return router, the(Dispatch, router.send(arrival))


@pytest.mark.parametrize("particular", PARTICULAR)
def test_request_for_a_busy_worker_delays_no_other(particular):
    router, running = a_half_busy_router()
    assert not router.send(an_arrival(request_id="waits", sampling=GREEDY, **particular))
    assert not router.send(an_arrival(request_id="waits too", sampling=GREEDY, **particular))

    works = [the(Dispatch, router.send(an_arrival(request_id=name, sampling=GREEDY))) for name in ("plain", "more")]
    assert {work.worker_id for work in works} == {"other"}
    assert not router.send(an_arrival(request_id="last", sampling=GREEDY))
    session_moved = the(Dispatch, router.step(works[0], 7, finish=Finish.STOP))
    assert (session_moved.start.request_id.partition("#")[0], session_moved.worker_id) == ("last", "other")

    own = the(Dispatch, router.step(running, 7, finish=Finish.STOP))
    assert own.start.request_id.partition("#")[0] == "waits", "it came before all others"


@pytest.mark.parametrize(
    ("go", "refused"), [("leave", {"first", "pinned", "tried"}), ("drain", {"pinned", "tried", "bound"})]
)
def test_pinned_request_is_rejected_when_its_worker_leaves(go, refused):
    """Remove a full worker: requests that only this worker could serve are rejected; the next request of its session waits."""
    router, _ = a_half_busy_router()
    router.send(an_arrival(request_id="tried", sampling=GREEDY, pin=WorkerId("busy"), labels=("gold",)))
    for name in ("plain", "more", "waits"):
        router.send(an_arrival(request_id=name, sampling=GREEDY))
    router.send(an_arrival(request_id="pinned", sampling=GREEDY, pin=WorkerId("busy")))
    router.send(an_arrival(request_id="bound", sampling=GREEDY, session="kept"))

    gone = router.leave("busy") if go == "leave" else router.send(WorkerDraining(worker_id=WorkerId("busy")))

    assert {each.request_id for each in gone if isinstance(each, Reject)} == refused


def asked_of(router: RouterMachineDriver, monkeypatch) -> list[str]:
    """Return a list that gets the id of each request that the router tries to place from now on."""
    asked = []
    choose = router.machine.placer.choose
    monkeypatch.setattr(
        router.machine.placer, "choose", lambda live, *rest: asked.append(live.id) or choose(live, *rest)
    )
    return asked


def test_blocked_groups_are_not_tried_for_other_workers(monkeypatch):
    router, running = a_half_busy_router()
    for number in range(100):
        router.send(an_arrival(request_id=f"waits{number}", sampling=GREEDY, pin=WorkerId("busy")))
    works = [the(Dispatch, router.send(an_arrival(request_id=name, sampling=GREEDY))) for name in ("plain", "more")]
    router.send(an_arrival(request_id="last", sampling=GREEDY))
    asked = asked_of(router, monkeypatch)

    router.step(works[0], 7, finish=Finish.STOP)
    assert asked == ["last"]
    router.step(works[1], 7, finish=Finish.STOP)
    assert asked == ["last"]
    router.step(running, 7, finish=Finish.STOP)
    assert asked == ["last", "waits0"]


def test_one_group_is_tried_once_after_each_change(monkeypatch):
    router, _ = a_half_busy_router()
    for number in range(100):
        router.send(an_arrival(request_id=f"waits{number}", sampling=GREEDY, pin=WorkerId("busy")))
    asked = asked_of(router, monkeypatch)

    router.join("new")

    assert asked == ["waits0"]


def test_failed_tries_per_event_are_bounded(monkeypatch):
    monkeypatch.setattr(waiting_module, "MAX_FIRST_TRIES", 3)
    router = RouterMachineDriver(("free", Role.DECODE), oversubscribe=1.0)
    count = MAX_FAILED_TRIES + 8
    for number in range(count):
        router.join(f"w{number}", max_running=1)
        for name in ("a", "b"):
            router.send(an_arrival(request_id=f"{name}{number}", sampling=GREEDY, pin=WorkerId(f"w{number}")))
    asked = asked_of(router, monkeypatch)

    router.join("new")
    assert len(asked) == 3 + MAX_FAILED_TRIES

    plain = the(Dispatch, router.send(an_arrival(request_id="plain", sampling=GREEDY)))
    router.step(plain, 7, finish=Finish.STOP)
    asked.remove("plain")
    assert sorted(asked) == sorted(f"b{number}" for number in range(count)), "then those who were not tried yet"


def a_router_with_more_wishes_than_are_tried(**settings) -> tuple[RouterMachineDriver, int]:
    """Return a router whose workers are all full, and their number; for each worker, a request that is pinned to it waits."""
    router, count = RouterMachineDriver(oversubscribe=1.0, **settings), 3 * MAX_FAILED_TRIES
    for number in range(count):
        pin = WorkerId(f"w{number}")
        router.join(pin, max_running=1)
        for name in ("runs", "waits"):
            router.send(an_arrival(request_id=f"{name}{number}", sampling=GREEDY, pin=pin))
    return router, count


@pytest.mark.parametrize("happens", ["nothing", "anything"])
def test_group_behind_many_others_gets_a_turn(monkeypatch, happens):
    """Queue a request behind many groups that are blocked, or that have to be tried again each time: its group gets a turn."""
    monkeypatch.setattr(waiting_module, "MAX_FIRST_TRIES", 0)
    router, count = a_router_with_more_wishes_than_are_tried()
    router.join("free", max_running=1)
    running = the(Dispatch, router.send(an_arrival(request_id="plain", sampling=GREEDY)))
    router.send(an_arrival(request_id="last", sampling=GREEDY, pin=WorkerId("free")))

    session_moved = router.step(running, 7, finish=Finish.STOP)[2:]
    for _ in range(2 * count // MAX_FAILED_TRIES):
        if session_moved:
            break
        nothing = PeerLeft(replica="any")
        session_moved = router.send(
            nothing if happens == "nothing" else ThresholdsChanged(thresholds=router.machine.thresholds())
        )

    assert the(Dispatch, session_moved).start.request_id.partition("#")[0] == "last"


def test_request_for_the_free_worker_passes_blocked_groups():
    router = RouterMachineDriver(oversubscribe=1.0)
    count = 3 * MAX_FAILED_TRIES
    for number in range(count):
        router.join(f"w{number}", max_running=1)
    sent = []
    for name in ("runs", "waits"):  # "waits" comes when no worker has room, and is not tried
        for number in range(count):
            pin = WorkerId(f"w{number}")
            sent += router.send(an_arrival(request_id=f"{name}{number}", sampling=GREEDY, pin=pin))

    session_moved = the(Dispatch, router.step(sent[-1], 7, finish=Finish.STOP)[2:])

    assert (session_moved.start.request_id.partition("#")[0], session_moved.worker_id) == (
        f"waits{count - 1}",
        f"w{count - 1}",
    )


def test_request_for_a_joining_worker_passes_blocked_groups():
    router, _ = a_router_with_more_wishes_than_are_tried()
    labelled = [
        structs.replace(a_description(worker_id=f"new{number}", max_running=1), labels=("new",)) for number in (1, 2)
    ]
    router.send(WorkerJoined(description=labelled[0], address="unix:/new1"))
    for name in ("labelled1", "labelled2"):
        router.send(an_arrival(request_id=name, sampling=GREEDY, labels=("new",)))

    session_moved = the(Dispatch, router.send(WorkerJoined(description=labelled[1], address="unix:/new2")))

    assert (session_moved.start.request_id.partition("#")[0], session_moved.worker_id) == ("labelled2", "new2")


def test_request_of_a_leaving_worker_is_rejected_behind_others():
    router, count = a_router_with_more_wishes_than_are_tried()

    gone = router.send(WorkerDraining(worker_id=WorkerId(f"w{count - 1}")))

    assert the(Reject, gone).request_id == f"waits{count - 1}"


def test_long_prompt_does_not_block_short_prompt_in_small_caches():
    router = RouterMachineDriver(oversubscribe=1.0)
    router.join("small", max_running=1, kv_blocks=2000 // BLOCK_TOKENS)
    router.join("busy", max_running=1)
    router.send(an_arrival(request_id="runs", sampling=GREEDY, pin=WorkerId("busy")))
    running = the(Dispatch, router.send(an_arrival(request_id="plain", sampling=GREEDY)))
    for name, prompt, answer in (("long", 3000, 100), ("short", 100, 3000)):
        sampling = structs.replace(GREEDY, max_tokens=answer)
        assert not router.send(an_arrival(request_id=name, tokens=a_prompt(prompt), sampling=sampling))

    session_moved = the(Dispatch, router.step(running, 7, finish=Finish.STOP))

    assert (session_moved.start.request_id.partition("#")[0], session_moved.worker_id) == ("short", "small")


def test_failed_requests_do_not_block_their_free_worker():
    router = RouterMachineDriver(oversubscribe=1.0)
    router.join("fails", max_running=1)
    router.join("busy", max_running=1)
    router.send(an_arrival(request_id="runs", sampling=GREEDY, pin=WorkerId("busy")))
    for number in range(MAX_FAILED_TRIES + 1):
        failing = the(Dispatch, router.send(an_arrival(request_id=f"failed{number}", sampling=GREEDY)))
        assert not router.reject(failing, Reason.INTERNAL)
    running = the(Dispatch, router.send(an_arrival(request_id="plain", sampling=GREEDY)))
    assert not router.send(an_arrival(request_id="last", sampling=GREEDY))

    session_moved = the(Dispatch, router.step(running, 7, finish=Finish.STOP))

    assert (session_moved.start.request_id.partition("#")[0], session_moved.worker_id) == ("last", "fails")


def test_retried_request_is_in_a_group_of_its_own():
    router = RouterMachineDriver(oversubscribe=1.0)
    for name, labels in (("lost", ("gold",)), ("busy", ("gold",)), ("plain", ())):
        description = structs.replace(a_description(worker_id=name, max_running=1), labels=labels)
        router.send(WorkerJoined(description=description, address=f"unix:/{name}"))
    pinned = {"sampling": GREEDY, "pin": WorkerId("lost"), "labels": ("gold",)}
    router.send(an_arrival(request_id="runs", sampling=GREEDY, pin=WorkerId("busy")))
    router.send(an_arrival(request_id="first", **pinned))
    running = the(Dispatch, router.send(an_arrival(request_id="plain", sampling=GREEDY)))
    assert not router.leave("lost")
    assert not router.send(an_arrival(request_id="second", **pinned))

    ended = router.step(running, 7, finish=Finish.STOP)

    assert the(Reject, ended).request_id == "second"


@pytest.mark.parametrize("seed", range(20))
def test_no_worker_idles_while_it_could_serve_a_queued_request(seed):
    """Simulate three workers with room for one request each, requests for one worker or for any, ends and cancellations."""
    dice = random.Random(seed)
    router = RouterMachineDriver(oversubscribe=1.0, max_queued=1000, max_queue_seconds=1e6)
    names = ["w0", "w1", "w2"]
    for name in names:
        router.join(name, max_running=1)
    running: dict[str, Dispatch] = {}  # by worker
    waiting: dict[str, str] = {}  # the demanded worker, by request

    def note(commands):
        for command in commands:
            if isinstance(command, Dispatch):
                running[command.worker_id] = command
                wanted = waiting.pop(command.start.request_id.partition("#")[0])
                assert wanted in ("", command.worker_id)

    for step in range(150):
        if not running or dice.random() < 0.55:
            name, wanted = f"r{step}", dice.choice(["", "", *names])
            waiting[name] = wanted
            note(
                router.send(
                    an_arrival(
                        request_id=name,
                        sampling=GREEDY,
                        tenant=dice.choice("abc"),
                        priority=dice.randrange(3),
                        pin=WorkerId(wanted) if wanted else None,
                    )
                )
            )
        elif waiting and dice.random() < 0.3:
            name = dice.choice(sorted(waiting))
            del waiting[name]
            note(router.cancel(name))
        else:
            worker = dice.choice(sorted(running))
            note(router.step(running.pop(worker), 7, finish=Finish.STOP))
        for idle in set(names) - set(running):
            assert not [name for name, wanted in waiting.items() if wanted in ("", idle)], (step, idle)
