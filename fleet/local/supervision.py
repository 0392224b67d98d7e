"""Supervision machine: starts, restarts, stops and kills the processes of a local cluster.

Rules:

1. Children start in stages: a child starts when every child of the earlier stages has been ready. Children also stop in
   stages, in another order: the router stops first, because it needs the workers to finish its running answers.
2. Until all children have been ready once, the death of one child, or a readiness timeout, ends the whole cluster. So
   no part of a cluster stays after a failed start, and wrong settings are not tried again. Later, only a stop request
   ends the cluster.
3. After all children have been ready once, a child that dies is restarted alone, after a pause. The pause doubles with
   every death in a row, from `FIRST_BACKOFF` up to `Supervision.longest_pause`. The pause is shortened by a random share
   of at most `JITTER`, so that children that died together do not always restart together. A dying child never stops the
   others. If a child stays ready for `HEALTHY_AFTER`, its deaths are counted from zero again.
4. A child that exits with `CONFIGURATION_REFUSED` after the cluster was ready is restarted after the longest pause,
   shortened at random as in rule 3. Its settings have not changed, but the reason for the refusal may have gone: a port
   may be free again, or a file may exist again.
5. To stop a child, the machine asks it to end, waits for the grace period, and then kills it. A second stop request
   kills all children at once. The cluster has ended when no child is left.
6. After the cluster was ready, children can be added and removed. An added child starts without regard to stages. A
   removed child drains within a time limit. If it has not ended by then, or was still starting, it is stopped as in
   rule 5. When it has ended, the machine forgets it.
7. A child that runs but does not respond is killed, which counts as a death. `fleet.local.liveness` decides when a child
   does not respond.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol, assert_never

from msgspec import Struct

from fleet.core.clock import MILLISECOND, SECOND, Nanos

CONFIGURATION_REFUSED = 3  # exit status of the command `fleet` after it has refused its configuration
FIRST_BACKOFF = Nanos(250 * MILLISECOND)
LONGEST_BACKOFF = Nanos(30 * SECOND)
# Maximum number of doublings of the first pause, so that the doubled pause cannot grow without limit before it is cut
# to `longest_pause`. After so many doublings the pause is three days, which is more than any `longest_pause`.
MOST_DOUBLINGS = 20
JITTER = 0.5  # maximum part of a pause that is left out ("equal jitter")
HEALTHY_AFTER = Nanos(30 * SECOND)


class JitterSource(Protocol):
    """Random source for pauses; `random.Random` implements it."""

    def uniform(self, a: float, b: float, /) -> float: ...


class ChildProcess(Struct, frozen=True, kw_only=True):
    """A process that the supervision machine keeps running, with its stages and its time limits."""

    name: str
    start_stage: int
    stop_stage: int
    ready_within: Nanos
    stop_within: Nanos


class ChildReady(Struct, frozen=True):
    name: str


class ChildExited(Struct, frozen=True):
    """Event: a child and all processes that it had started have ended."""

    name: str
    status: int  # exit status; if a signal ended the child, the negative number of the signal, as in `subprocess`


class ChildUnresponsive(Struct, frozen=True):
    """Event: a child still runs, but was stopped or silent for too long."""

    name: str


class ChildAdded(Struct, frozen=True):
    """Event: a child has to be added. Its name may be that of a forgotten child."""

    child: ChildProcess


class ChildRemoved(Struct, frozen=True):
    """Event: a child has to be removed."""

    name: str
    within: Nanos  # time limit for the drain of the child


class StopRequested(Struct, frozen=True):
    pass


class SupervisionTicked(Struct, frozen=True):
    """Event: the time that `next_instant` returned has been reached."""


SupervisionEvent = (
    ChildReady | ChildExited | ChildUnresponsive | ChildAdded | ChildRemoved | StopRequested | SupervisionTicked
)


class SpawnChild(Struct, frozen=True):
    name: str


class AskToStop(Struct, frozen=True):
    name: str


class AskToDrain(Struct, frozen=True):
    """Command: ask a child to drain, that is to take no more requests, finish the running ones, and end."""

    name: str
    within: Nanos


class KillChild(Struct, frozen=True):
    """Command: kill a child and everything that it started."""

    name: str


class AnnounceReady(Struct, frozen=True):
    """Command: announce that every child has been ready. It is given only once."""


class ReportRestart(Struct, frozen=True):
    """Command: report that a child has died and will be restarted after a pause."""

    name: str
    status: int
    pause: Nanos
    deaths: int = 1  # number of deaths in a row, including this one


class ForgetChild(Struct, frozen=True):
    """Command: forget a child that was removed and does not run any more, or that was added while the cluster stops."""

    name: str


class ReportFailure(Struct, frozen=True):
    """Command: report that the cluster cannot continue because of this child. Other commands stop all children."""

    name: str
    reason: str
    status: int | None  # exit status; None: the child has not ended by itself, but was not ready in time


class SupervisionFinished(Struct, frozen=True):
    """Command: report that no child is left. It is the last command."""


SupervisionCommand = (
    SpawnChild
    | AskToDrain
    | AskToStop
    | KillChild
    | AnnounceReady
    | ReportRestart
    | ForgetChild
    | ReportFailure
    | SupervisionFinished
)


class ChildState(StrEnum):
    """The states of a child, from before its first start to its end."""

    HELD = "held"  # the child has not been started, because an earlier stage is not ready yet
    STARTING = "starting"
    READY = "ready"
    PAUSED = "paused"  # the child has died, and waits for its restart
    DRAINING = "draining"  # the child was removed while it was ready, and finishes its requests
    STOPPING = "stopping"  # the child was asked to end, and has not ended yet
    KILLED = "killed"  # the child was killed, and has not ended yet
    GONE = "gone"


class ChildStatus(Struct, frozen=True, kw_only=True):
    """Status of one child: its state, its deaths and its next restart, as commands show it to people."""

    condition: ChildState
    deaths: int  # number of deaths since the child last stayed ready for `HEALTHY_AFTER`
    last_status: int | None = None  # exit status of the child at its last death; None: it has not died
    starts_at: Nanos | None = None  # instant of the planned restart; None: no restart is planned


_RUNNING = (ChildState.STARTING, ChildState.READY)


class _ChildRecord:
    """Everything that the machine knows of one child: its state, its deaths, and the end of its time limit."""

    def __init__(self, child: ChildProcess):
        self.child = child
        self.condition = ChildState.HELD
        # Instant at which the time limit of the current state ends: of the start, the drain or the stop, or of the pause before a restart.
        # For a ready child that has died before, it is the instant at which its deaths are reset. None: the state has no time limit.
        self.until: Nanos | None = None
        self.deaths = 0  # number of deaths since the child last stayed ready for `HEALTHY_AFTER`
        self.last_status: int | None = None
        self.been_ready = False
        self.leaving = False  # True if the child has to be removed (`ChildRemoved`), and has not ended yet

    def become(self, condition: ChildState, until: Nanos | None = None) -> None:
        self.condition, self.until = condition, until


class Supervision:
    """The supervision machine.

    `begin` returns the first commands, and `handle` returns the commands that follow from an event.
    """

    def __init__(self, children: Sequence[ChildProcess], chance: JitterSource, longest_pause: Nanos = LONGEST_BACKOFF):
        """Start with children that do not run yet.

        Args:
            children: The processes to keep running; each name occurs once.
            chance: Random source by which pauses are shortened (rule 3).
            longest_pause: Maximum pause before a restart.
        """
        assert len({child.name for child in children}) == len(children), "names must differ"
        self._chance = chance
        self.longest_pause = longest_pause
        self._tracks = {child.name: _ChildRecord(child) for child in children}
        self._announced = False
        self._stopping = False
        self._finished = False

    @property
    def announced(self) -> bool:
        """True after every child with which the cluster started has been ready."""
        return self._announced

    def begin(self, now: Nanos) -> list[SupervisionCommand]:
        return self._start_next(now)

    def handle(self, event: SupervisionEvent, now: Nanos) -> list[SupervisionCommand]:
        assert not self._finished, "an event after the end"
        return [*self._respond(event, now), *self._finish_if_over()]

    def next_instant(self) -> Nanos | None:
        """Return the instant at which the event `SupervisionTicked` is due; None if no time limit is running."""
        return min((track.until for track in self._tracks.values() if track.until is not None), default=None)

    def child_states(self) -> dict[str, ChildState]:
        """Return the state of each child, for progress messages."""
        return {name: track.condition for name, track in self._tracks.items()}

    def failing(self) -> frozenset[str]:
        """Return the names of the children that have died and are not ready again; none while the cluster stops."""
        return frozenset(
            name
            for name, track in self._tracks.items()
            if track.deaths and track.condition is not ChildState.READY and not self._stopping
        )

    def child_statuses(self) -> dict[str, ChildStatus]:
        """Return the status of each child."""
        return {
            name: ChildStatus(
                condition=track.condition,
                deaths=track.deaths,
                last_status=track.last_status,
                starts_at=track.until if track.condition is ChildState.PAUSED else None,
            )
            for name, track in self._tracks.items()
        }

    def check(self) -> None:
        """Assert the invariants that hold between two calls."""
        for track in self._tracks.values():
            timed = track.condition not in (ChildState.HELD, ChildState.READY, ChildState.GONE, ChildState.KILLED)
            healing = track.condition is ChildState.READY and track.deaths > 0
            assert (track.until is not None) == (timed or healing), (track.child.name, track.condition)
            assert self._announced or not track.deaths, track.child.name
            assert track.condition is not (ChildState.PAUSED if self._stopping else ChildState.GONE), track.child.name

    def _respond(self, event: SupervisionEvent, now: Nanos) -> list[SupervisionCommand]:
        match event:
            case ChildReady(name):
                return self._on_ready(self._tracks[name], now)
            case ChildExited(name, status):
                return self._on_exit(self._tracks[name], status, now)
            case ChildUnresponsive(name):
                return self._on_hang(name)
            case ChildAdded(child):
                return self._add(child, now)
            case ChildRemoved(name, within):
                return self._remove(self._tracks[name], within, now) if name in self._tracks else []
            case StopRequested():
                return self._kill_all() if self._stopping else self._stop(now)
            case SupervisionTicked():
                return self._on_time(now)
            case _:
                assert_never(event)

    def _on_ready(self, track: _ChildRecord, now: Nanos) -> list[SupervisionCommand]:
        if track.condition is not ChildState.STARTING:
            return []  # the child is being stopped or killed, so this event changes nothing
        track.been_ready = True
        track.become(ChildState.READY, Nanos(now + HEALTHY_AFTER) if track.deaths else None)
        commands = self._start_next(now)
        if not self._announced and all(each.been_ready for each in self._tracks.values()):
            self._announced = True
            commands.append(AnnounceReady())
        return commands

    def _on_exit(self, track: _ChildRecord, status: int, now: Nanos) -> list[SupervisionCommand]:
        name = track.child.name
        was = track.condition
        track.become(ChildState.GONE)
        if self._stopping:
            return self._stop_next(now)
        if track.leaving:
            return [self._forget(track)]
        if not self._announced:
            return [ReportFailure(name, "ended before the cluster was ready", status), *self._stop(now)]
        assert was in _RUNNING or was is ChildState.KILLED, was
        track.deaths += 1
        track.last_status = status
        pause = self._pause(track.deaths, refused=status == CONFIGURATION_REFUSED)
        track.become(ChildState.PAUSED, Nanos(now + pause))
        return [ReportRestart(name, status, pause, track.deaths)]

    def _pause(self, deaths: int, *, refused: bool) -> Nanos:
        doubled = FIRST_BACKOFF << min(deaths - 1, MOST_DOUBLINGS)
        longest = self.longest_pause if refused else min(doubled, self.longest_pause)
        return Nanos(round(longest * self._chance.uniform(1 - JITTER, 1)))

    def _on_hang(self, name: str) -> list[SupervisionCommand]:
        track = self._tracks.get(name)
        if track is None or track.condition not in (*_RUNNING, ChildState.DRAINING, ChildState.STOPPING):
            return []  # the child has ended meanwhile, or is being killed already
        return [self._kill(track)]

    def _add(self, child: ChildProcess, now: Nanos) -> list[SupervisionCommand]:
        assert self._announced, "children are added to a cluster that is ready"
        assert child.name not in self._tracks, child.name
        if self._stopping:
            return [ForgetChild(child.name)]
        track = self._tracks[child.name] = _ChildRecord(child)
        return [self._spawn(track, now)]

    def _remove(self, track: _ChildRecord, within: Nanos, now: Nanos) -> list[SupervisionCommand]:
        if self._stopping or track.leaving:
            return []
        track.leaving = True
        if track.condition is ChildState.READY:
            track.become(ChildState.DRAINING, Nanos(now + within))
            return [AskToDrain(track.child.name, within)]
        if track.condition is ChildState.STARTING:
            return [self._ask_to_stop(track, now)]
        return [] if track.condition is ChildState.KILLED else [self._forget(track)]

    def _forget(self, track: _ChildRecord) -> ForgetChild:
        del self._tracks[track.child.name]
        return ForgetChild(track.child.name)

    def _on_time(self, now: Nanos) -> list[SupervisionCommand]:
        commands: list[SupervisionCommand] = []
        for track in self._tracks.values():
            if track.until is None or now < track.until:
                continue
            match track.condition:
                case ChildState.STARTING:
                    commands += self._give_up_start(track, now)
                case ChildState.READY:
                    track.deaths = 0
                    track.until = None
                case ChildState.PAUSED:
                    commands.append(self._spawn(track, now))
                case ChildState.DRAINING:
                    commands.append(self._ask_to_stop(track, now))
                case ChildState.STOPPING:
                    commands.append(self._kill(track))
                case ChildState.HELD | ChildState.KILLED | ChildState.GONE:
                    raise AssertionError(track.condition)
        return commands

    def _give_up_start(self, track: _ChildRecord, now: Nanos) -> list[SupervisionCommand]:
        kill = self._kill(track)
        if self._announced:
            return [
                kill
            ]  # the end of the killed child counts as a death, so it is started again unless the run stops or removes it
        seconds = track.child.ready_within // SECOND
        return [ReportFailure(track.child.name, f"was not ready within {seconds} s", None), kill, *self._stop(now)]

    def _start_next(self, now: Nanos) -> list[SupervisionCommand]:
        if self._stopping:
            return []
        unready = [track.child.start_stage for track in self._tracks.values() if not track.been_ready]
        stage = min(unready, default=0)
        return [
            self._spawn(track, now)
            for track in self._tracks.values()
            if track.condition is ChildState.HELD and track.child.start_stage <= stage
        ]

    def _spawn(self, track: _ChildRecord, now: Nanos) -> SpawnChild:
        track.become(ChildState.STARTING, Nanos(now + track.child.ready_within))
        return SpawnChild(track.child.name)

    def _kill(self, track: _ChildRecord) -> KillChild:
        track.become(ChildState.KILLED)
        return KillChild(track.child.name)

    def _kill_all(self) -> list[SupervisionCommand]:
        return [
            self._kill(track)
            for track in self._tracks.values()
            if track.condition in (*_RUNNING, ChildState.DRAINING, ChildState.STOPPING)
        ]

    def _stop(self, now: Nanos) -> list[SupervisionCommand]:
        self._stopping = True
        for track in self._tracks.values():
            if track.condition in (ChildState.HELD, ChildState.PAUSED):
                track.become(ChildState.GONE)
        return self._stop_next(now)

    def _stop_next(self, now: Nanos) -> list[SupervisionCommand]:
        """Return commands that stop the next stage, if all children of the stages that stop earlier have ended."""
        left = [track for track in self._tracks.values() if track.condition is not ChildState.GONE]
        stage = min((track.child.stop_stage for track in left), default=0)
        return [
            self._ask_to_stop(track, now)
            for track in left
            if track.child.stop_stage == stage and track.condition in (*_RUNNING, ChildState.DRAINING)
        ]

    def _ask_to_stop(self, track: _ChildRecord, now: Nanos) -> AskToStop:
        track.become(ChildState.STOPPING, Nanos(now + track.child.stop_within))
        return AskToStop(track.child.name)

    def _finish_if_over(self) -> list[SupervisionCommand]:
        if not self._stopping or any(track.condition is not ChildState.GONE for track in self._tracks.values()):
            return []
        self._finished = True
        return [SupervisionFinished()]
