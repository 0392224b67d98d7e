"""Supervision machine: starts and stops of a local cluster."""

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fleet.core.clock import SECOND, Nanos
from fleet.local.supervision import (
    CONFIGURATION_REFUSED,
    FIRST_BACKOFF,
    HEALTHY_AFTER,
    JITTER,
    LONGEST_BACKOFF,
    AnnounceReady,
    AskToDrain,
    AskToStop,
    ChildAdded,
    ChildExited,
    ChildProcess,
    ChildReady,
    ChildRemoved,
    ChildState,
    ChildUnresponsive,
    ForgetChild,
    KillChild,
    ReportFailure,
    ReportRestart,
    SpawnChild,
    StopRequested,
    Supervision,
    SupervisionCommand,
    SupervisionEvent,
    SupervisionFinished,
    SupervisionTicked,
)

START = Nanos(1_000)
LONG = 12  # number of deaths in a row after which the pause has its maximum


def a_child(name: str, start_stage: int = 0, stop_stage: int = 0) -> ChildProcess:
    return ChildProcess(
        name=name,
        start_stage=start_stage,
        stop_stage=stop_stage,
        ready_within=Nanos(10 * SECOND),
        stop_within=Nanos(5 * SECOND),
    )


STORE = a_child("store", start_stage=0, stop_stage=2)
ROUTER = a_child("router", start_stage=1, stop_stage=0)
WORKER = a_child("worker", start_stage=1, stop_stage=1)
ANOTHER = a_child("another", start_stage=1, stop_stage=1)


class WholePauses:
    """Source of jitter that never shortens a pause."""

    def uniform(self, a: float, b: float, /) -> float:
        assert (a, b) == (1 - JITTER, 1)
        return b


def a_machine(*children: ChildProcess) -> Supervision:
    return Supervision(children, WholePauses())


def a_running_cluster() -> Supervision:
    machine = a_machine(STORE, ROUTER, WORKER)
    machine.begin(START)
    for child in (STORE, ROUTER, WORKER):
        machine.handle(ChildReady(child.name), START)
    return machine


def test_a_later_stage_starts_when_the_earlier_one_is_ready():
    machine = a_machine(STORE, ROUTER, WORKER)

    assert machine.begin(START) == [SpawnChild("store")]
    assert machine.handle(ChildReady("store"), START) == [SpawnChild("router"), SpawnChild("worker")]


def test_readiness_is_announced_once_all_children_were_ready():
    machine = a_machine(STORE, ROUTER)
    machine.begin(START)
    machine.handle(ChildReady("store"), START)

    assert machine.handle(ChildReady("router"), START) == [AnnounceReady()]

    machine.handle(ChildExited("router", 1), START)
    machine.handle(SupervisionTicked(), Nanos(START + FIRST_BACKOFF))
    assert machine.handle(ChildReady("router"), START) == []


def test_a_death_before_the_cluster_was_ready_ends_the_attempt():
    machine = a_machine(STORE, ROUTER, WORKER)
    machine.begin(START)
    machine.handle(ChildReady("store"), START)

    commands = machine.handle(ChildExited("worker", 1), START)

    assert commands == [ReportFailure("worker", "ended before the cluster was ready", 1), AskToStop("router")]


def test_child_not_ready_in_time_is_killed_and_ends_the_start():
    machine = a_machine(STORE)
    machine.begin(START)

    assert machine.handle(SupervisionTicked(), Nanos(START + 10 * SECOND - 1)) == []
    commands = machine.handle(SupervisionTicked(), Nanos(START + 10 * SECOND))

    assert commands == [ReportFailure("store", "was not ready within 10 s", None), KillChild("store")]
    assert machine.handle(ChildExited("store", -9), START) == [SupervisionFinished()]


def test_a_child_that_dies_is_started_again_alone_after_a_pause():
    machine = a_running_cluster()

    assert machine.handle(ChildExited("worker", -9), START) == [ReportRestart("worker", -9, FIRST_BACKOFF)]
    assert machine.handle(SupervisionTicked(), Nanos(START + FIRST_BACKOFF - 1)) == []
    assert machine.handle(SupervisionTicked(), Nanos(START + FIRST_BACKOFF)) == [SpawnChild("worker")]


def deaths_in_a_row(machine: Supervision, number: int, status: int = 1) -> list[ReportRestart]:
    """Let the worker die `number` times, restart it each time, and return the reports."""
    now, reports = START, []
    for _ in range(number):
        [report] = machine.handle(ChildExited("worker", status), now)
        assert isinstance(report, ReportRestart)
        reports.append(report)
        now = Nanos(now + report.pause)
        assert machine.handle(SupervisionTicked(), now) == [SpawnChild("worker")]
    return reports


def test_the_pause_doubles_up_to_a_ceiling_and_nothing_else_ends():
    machine = a_running_cluster()

    reports = deaths_in_a_row(machine, LONG)

    assert [each.pause for each in reports] == [min(FIRST_BACKOFF * 2**n, LONGEST_BACKOFF) for n in range(LONG)]
    assert [each.deaths for each in reports] == list(range(1, LONG + 1))
    assert machine.failing() == {"worker"}
    assert machine.child_states()["router"] is machine.child_states()["store"] is ChildState.READY


def test_a_ceiling_of_ones_own_is_kept():
    machine = Supervision([STORE, ROUTER, WORKER], WholePauses(), Nanos(SECOND))
    machine.begin(START)
    for child in (STORE, ROUTER, WORKER):
        machine.handle(ChildReady(child.name), START)

    assert max(each.pause for each in deaths_in_a_row(machine, LONG)) == SECOND


def test_pauses_of_children_that_die_together_differ():
    machine = Supervision([STORE, ROUTER, WORKER], random.Random(7))
    machine.begin(START)
    for child in (STORE, ROUTER, WORKER):
        machine.handle(ChildReady(child.name), START)

    pauses = [machine.handle(ChildExited(child.name, -9), START)[0].pause for child in (STORE, ROUTER, WORKER)]

    assert len(set(pauses)) == 3
    assert all(FIRST_BACKOFF * (1 - JITTER) <= pause <= FIRST_BACKOFF for pause in pauses)


def test_status_shows_deaths_and_next_start():
    machine = a_running_cluster()
    deaths_in_a_row(machine, 4)
    now = Nanos(100 * SECOND)
    machine.handle(ChildExited("worker", -9), now)

    shown = machine.child_statuses()["worker"]

    assert (shown.condition, shown.deaths, shown.last_status) == (ChildState.PAUSED, 5, -9)
    assert shown.starts_at == now + FIRST_BACKOFF * 2**4
    assert machine.child_statuses()["router"].deaths == 0


def test_unresponsive_child_is_killed_and_restarted():
    machine = a_running_cluster()

    assert machine.handle(ChildUnresponsive("worker"), START) == [KillChild("worker")]
    assert machine.handle(ChildUnresponsive("worker"), START) == []
    assert machine.handle(ChildExited("worker", -9), START) == [ReportRestart("worker", -9, FIRST_BACKOFF)]


def test_a_child_that_hangs_while_it_stops_is_killed_at_once():
    machine = a_running_cluster()
    machine.handle(StopRequested(), START)

    assert machine.handle(ChildUnresponsive("router"), START) == [KillChild("router")]


def test_a_hang_of_a_child_that_has_just_ended_is_ignored():
    machine = a_running_cluster()
    machine.handle(ChildExited("worker", 1), START)

    assert machine.handle(ChildUnresponsive("worker"), START) == []


def test_deaths_are_forgotten_after_a_healthy_while():
    machine = a_running_cluster()
    now = START
    for _ in range(LONG):
        assert machine.handle(ChildExited("worker", 1), now) == [ReportRestart("worker", 1, FIRST_BACKOFF)]
        now = Nanos(now + FIRST_BACKOFF)
        machine.handle(SupervisionTicked(), now)
        machine.handle(ChildReady("worker"), now)
        now = Nanos(now + HEALTHY_AFTER)
        machine.handle(SupervisionTicked(), now)


def test_restarted_child_not_ready_in_time_counts_as_a_death():
    machine = a_running_cluster()
    machine.handle(ChildExited("worker", 1), START)
    machine.handle(SupervisionTicked(), Nanos(START + FIRST_BACKOFF))
    late = Nanos(START + FIRST_BACKOFF + 10 * SECOND)

    assert machine.handle(SupervisionTicked(), late) == [KillChild("worker")]
    assert machine.handle(ChildExited("worker", -9), late) == [ReportRestart("worker", -9, Nanos(2 * FIRST_BACKOFF), 2)]


def test_refused_settings_are_retried_after_the_longest_pause():
    machine = a_running_cluster()

    [report] = machine.handle(ChildExited("worker", CONFIGURATION_REFUSED), START)

    assert report == ReportRestart("worker", CONFIGURATION_REFUSED, LONGEST_BACKOFF)
    assert machine.failing() == {"worker"}
    assert machine.child_states()["router"] is ChildState.READY


def test_refused_settings_at_the_start_end_the_attempt():
    machine = a_machine(STORE, ROUTER)
    machine.begin(START)

    commands = machine.handle(ChildExited("store", CONFIGURATION_REFUSED), START)

    assert isinstance(commands[0], ReportFailure)
    assert commands[-1] == SupervisionFinished()


def test_stop_order_is_router_workers_store():
    machine = a_running_cluster()

    assert machine.handle(StopRequested(), START) == [AskToStop("router")]
    assert machine.handle(ChildExited("router", 0), START) == [AskToStop("worker")]
    assert machine.handle(ChildExited("worker", 0), START) == [AskToStop("store")]
    assert machine.handle(ChildExited("store", 0), START) == [SupervisionFinished()]


def test_a_child_that_does_not_stop_in_time_is_killed():
    machine = a_running_cluster()
    machine.handle(StopRequested(), START)

    assert machine.handle(SupervisionTicked(), Nanos(START + 5 * SECOND)) == [KillChild("router")]


def test_a_second_request_to_stop_kills_everything_at_once():
    machine = a_running_cluster()
    machine.handle(StopRequested(), START)

    assert machine.handle(StopRequested(), START) == [KillChild("store"), KillChild("router"), KillChild("worker")]


def test_stopping_forgets_a_pending_restart():
    machine = a_running_cluster()
    machine.handle(ChildExited("worker", 1), START)
    machine.handle(StopRequested(), START)

    assert machine.handle(SupervisionTicked(), Nanos(START + FIRST_BACKOFF)) == []


def test_added_child_starts_alone_and_stops_with_its_stage():
    machine = a_running_cluster()

    assert machine.handle(ChildAdded(ANOTHER), START) == [SpawnChild("another")]
    assert machine.handle(ChildReady("another"), START) == []
    assert machine.handle(StopRequested(), START) == [AskToStop("router")]
    assert machine.handle(ChildExited("router", 0), START) == [AskToStop("worker"), AskToStop("another")]


def test_an_added_child_that_keeps_dying_is_failing_until_ready():
    machine = a_running_cluster()
    machine.handle(ChildAdded(ANOTHER), START)
    now = START
    for _ in range(LONG):
        [report] = machine.handle(ChildExited("another", 1), now)
        assert isinstance(report, ReportRestart)
        assert machine.failing() == {"another"}
        now = Nanos(now + report.pause)
        assert machine.handle(SupervisionTicked(), now) == [SpawnChild("another")]

    assert report.pause == LONGEST_BACKOFF
    machine.handle(ChildReady("another"), now)
    assert machine.failing() == frozenset()


def test_an_added_child_that_refuses_its_settings_may_be_removed():
    machine = a_running_cluster()
    machine.handle(ChildAdded(ANOTHER), START)

    assert machine.handle(ChildExited("another", CONFIGURATION_REFUSED), START) == [
        ReportRestart("another", CONFIGURATION_REFUSED, LONGEST_BACKOFF)
    ]
    assert machine.handle(ChildRemoved("another", Nanos(SECOND)), START) == [ForgetChild("another")]
    assert machine.handle(ChildAdded(ANOTHER), START) == [SpawnChild("another")]


def test_removed_child_drains_then_stops_then_is_killed():
    machine = a_running_cluster()
    within = Nanos(100 * SECOND)

    assert machine.handle(ChildRemoved("worker", within), START) == [AskToDrain("worker", within)]
    assert machine.handle(ChildRemoved("worker", within), START) == []
    assert machine.handle(SupervisionTicked(), Nanos(START + within - 1)) == []
    assert machine.handle(SupervisionTicked(), Nanos(START + within)) == [AskToStop("worker")]
    assert machine.handle(SupervisionTicked(), Nanos(START + within + 5 * SECOND)) == [KillChild("worker")]
    assert machine.handle(ChildExited("worker", -9), START) == [ForgetChild("worker")]
    assert set(machine.child_states()) == {"store", "router"}


@pytest.mark.parametrize(
    ("before", "commands"),
    [
        ([], [AskToStop("another")]),
        ([ChildExited("another", 1)], [ForgetChild("another")]),
        ([SupervisionTicked()], []),  # the child was not ready in time, and is being killed
    ],
    ids=["starting", "paused", "killed"],
)
def test_removed_child_that_was_not_ready_does_not_drain(before, commands):
    machine = a_running_cluster()
    machine.handle(ChildAdded(ANOTHER), START)
    late = Nanos(START + 10 * SECOND)
    for event in before:
        machine.handle(event, late)

    assert machine.handle(ChildRemoved("another", Nanos(100 * SECOND)), late) == commands


def test_stop_does_not_wait_for_drains():
    machine = a_running_cluster()
    machine.handle(ChildRemoved("worker", Nanos(100 * SECOND)), START)

    assert machine.handle(StopRequested(), START) == [AskToStop("router")]
    assert machine.handle(ChildExited("router", 0), START) == [AskToStop("worker")]
    assert machine.handle(SupervisionTicked(), Nanos(START + 5 * SECOND)) == [KillChild("worker")]


def test_names_must_differ():
    with pytest.raises(AssertionError):
        a_machine(STORE, STORE)


class World:
    """Child processes that may do anything that is possible after the supervisor's commands."""

    def __init__(self) -> None:
        self.machine = Supervision([STORE, ROUTER, WORKER], random.Random(0))
        self.now = START
        self.alive: set[str] = set()
        self.finished = self.failed = False
        self.obey(self.machine.begin(self.now))

    def obey(self, commands: list[SupervisionCommand]) -> None:
        for command in commands:
            match command:
                case SpawnChild(name):
                    assert name not in self.alive, "started twice"
                    self.alive.add(name)
                case AskToStop(name) | AskToDrain(name) | KillChild(name):
                    assert name in self.alive, "signalled a dead process"
                case ForgetChild(name):
                    assert name not in self.alive, "forgot a child that runs"
                case ReportFailure():
                    self.failed = True
                case SupervisionFinished():
                    assert not self.alive, "finished with children left"
                    self.finished = True
        self.machine.check()

    def tell(self, event: SupervisionEvent) -> None:
        if not self.finished:
            self.obey(self.machine.handle(event, self.now))

    def step(self, choice: tuple[str, str, int]) -> None:
        kind, name, number = choice
        self.now = Nanos(self.now + number * SECOND // 4)
        match kind:
            case "ready" if name in self.alive:
                if self.machine.child_states()[name] is ChildState.STARTING:
                    self.tell(ChildReady(name))
            case "exit" if name in self.alive:
                self.alive.discard(name)
                self.tell(ChildExited(name, number % 4))
            case "hang":
                self.tell(ChildUnresponsive(name))
            case "tick":
                self.tell(SupervisionTicked())
            case "add" if self.machine.announced and ANOTHER.name not in self.machine.child_states():
                self.tell(ChildAdded(ANOTHER))
            case "remove" if self.machine.announced:
                self.tell(ChildRemoved(name, Nanos(number * SECOND)))
            case "stop":
                self.tell(StopRequested())


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ready", "ready", "ready", "exit", "hang", "tick", "add", "remove", "stop"]),
        st.sampled_from([child.name for child in (STORE, ROUTER, WORKER, ANOTHER)]),
        st.integers(0, 60),
    ),
    max_size=60,
)


@given(STEPS)
@example([("ready", "store", 0), ("ready", "worker", 0), ("hang", "router", 0)])  # killed while it stops
@settings(max_examples=300, deadline=None)
def test_random_events_never_start_a_child_twice_and_all_end(steps):
    world = World()
    for step in steps:
        world.step(step)
    world.step(("stop", "", 0))
    for _ in range(20):  # no child obeys a stop request; every child dies when it is killed
        for name, condition in world.machine.child_states().items():
            if condition is ChildState.KILLED and name in world.alive:
                world.alive.discard(name)
                world.tell(ChildExited(name, -9))
        if world.finished:
            break
        if (instant := world.machine.next_instant()) is not None:
            world.now = max(world.now, instant)
            world.tell(SupervisionTicked())

    assert world.finished


@given(STEPS)
@settings(max_examples=300, deadline=None)
def test_a_ready_cluster_ends_for_no_other_reason_than_a_request(steps):
    world = World()
    for name in ("store", "router", "worker"):
        world.step(("ready", name, 0))
    assert world.machine.announced

    for step in steps:
        if step[0] != "stop":
            world.step(step)

    assert not world.failed
    assert not world.finished
