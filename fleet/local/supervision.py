"""Supervision machine: starts, restarts, stops and kills the processes of a local cluster.

Rules:

1. Children start in stages: a child starts when every child of an earlier stage has been ready. They stop in stages of
   another order: the router first, because its unfinished answers need the workers.
2. Until all children have been ready once, the death of one, or a readiness timeout, ends the whole start: nothing
   stays half-started, and wrong settings are not retried. Otherwise only a stop request ends the cluster.
3. After that, a child that dies is restarted alone, after a pause. The pause doubles with every death in a row, from
   `FIRST_BACKOFF` up to `Supervision.longest_pause`. A random part of it, at most `JITTER`, is left out, so that
   children that died together do not always restart together. A dying child never stops the others. A child that stays
   ready for `HEALTHY_AFTER` starts counting deaths from zero again.
4. A child that exits with `CONFIGURATION_REFUSED` after the cluster was ready is restarted after the longest pause. Its
   settings are the same, but their surroundings may have changed: a port that became free, a file that came back.
5. A stop asks, waits for the grace period, then kills; a second stop request kills at once. The cluster ends when no
   child is left.
6. After the cluster was ready, children can be added and removed. An added child starts alone. A removed child drains
   within a time limit; if it still runs then, or was not ready, it is stopped like the others. It is forgotten when it
   has ended.
7. A child that runs but does not respond is killed, which counts as a death. `fleet.local.liveness` decides that.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol, assert_never

from msgspec import Struct

from fleet.core.clock import MILLISECOND, SECOND, Nanos

CONFIGURATION_REFUSED = 3  # exit status of the command `fleet`
FIRST_BACKOFF = Nanos(250 * MILLISECOND)
LONGEST_BACKOFF = Nanos(30 * SECOND)
MOST_DOUBLINGS = 20  # Most doublings of the first pause: this is three days, above any ceiling.
JITTER = 0.5  # largest part of a pause that is left out ("equal jitter")
HEALTHY_AFTER = Nanos(30 * SECOND)


class JitterSource(Protocol):
    """Random source for pauses; `random.Random` implements it."""

    def uniform(self, a: float, b: float, /) -> float: ...


class ChildProcess(Struct, frozen=True, kw_only=True):
    """A process to keep running."""

    name: str
    start_stage: int
    stop_stage: int
    ready_within: Nanos
    stop_within: Nanos


class ChildReady(Struct, frozen=True):
    name: str


class ChildExited(Struct, frozen=True):
    """The process and everything that it started have ended."""

    name: str
    status: int  # as in `subprocess`: a negative signal number after a signal


class ChildUnresponsive(Struct, frozen=True):
    """The process lives, but was stopped or silent for too long."""

    name: str


class ChildAdded(Struct, frozen=True):
    """Add a child; its name may be that of a forgotten child."""

    child: ChildProcess


class ChildRemoved(Struct, frozen=True):
    """Remove a child."""

    name: str
    within: Nanos  # time limit for finishing the requests of the child


class StopRequested(Struct, frozen=True):
    pass


class SupervisionTicked(Struct, frozen=True):
    """Time passed."""


SupervisionEvent = (
    ChildReady | ChildExited | ChildUnresponsive | ChildAdded | ChildRemoved | StopRequested | SupervisionTicked
)


class SpawnChild(Struct, frozen=True):
    name: str


class AskToStop(Struct, frozen=True):
    name: str


class AskToDrain(Struct, frozen=True):
    """Ask a child to take no more requests, finish the running ones, and end."""

    name: str
    within: Nanos


class KillChild(Struct, frozen=True):
    """Kill a child and everything that it started."""

    name: str


class AnnounceReady(Struct, frozen=True):
    """Every child has been ready; given once."""


class ReportRestart(Struct, frozen=True):
    """A child has died and will be restarted after the pause."""

    name: str
    status: int
    pause: Nanos
    deaths: int = 1  # deaths in a row, including this one


class ForgetChild(Struct, frozen=True):
    """A removed child has ended."""

    name: str


class ReportFailure(Struct, frozen=True):
    """The cluster cannot continue, because of this child; everything is being stopped."""

    name: str
    reason: str
    status: int | None  # exit status; None: the child still runs


class SupervisionFinished(Struct, frozen=True):
    """No child is left; no command follows."""


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
    """State of a child."""

    HELD = "held"  # waits until an earlier stage is ready
    STARTING = "starting"
    READY = "ready"
    PAUSED = "paused"  # died, and waits for its restart
    DRAINING = "draining"  # was ready when it was removed
    STOPPING = "stopping"  # was asked to stop
    KILLED = "killed"  # was killed, and has not ended yet
    GONE = "gone"


class ChildStatus(Struct, frozen=True, kw_only=True):
    """State of one child, for people."""

    condition: ChildState
    deaths: int  # deaths in a row, without `HEALTHY_AFTER` of readiness in between
    last_status: int | None = None  # exit status of the last death; None: it has not died
    starts_at: Nanos | None = None  # time of the planned restart; None: it runs, or will not be restarted


_RUNNING = (ChildState.STARTING, ChildState.READY)


class _ChildRecord:
    """State of one child in the machine."""

    def __init__(self, child: ChildProcess):
        self.child = child
        self.condition = ChildState.HELD
        self.until: Nanos | None = None  # end of the time limit (or of the pause)
        self.deaths = 0  # deaths in a row
        self.last_status: int | None = None
        self.been_ready = False
        self.leaving = False  # True: the child was removed

    def become(self, condition: ChildState, until: Nanos | None = None) -> None:
        self.condition, self.until = condition, until


class Supervision:
    """The machine: `begin` returns the first commands, `handle` those that follow an event."""

    def __init__(self, children: Sequence[ChildProcess], chance: JitterSource, longest_pause: Nanos = LONGEST_BACKOFF):
        """Start with children that do not run yet.

        Args:
            children: The processes to keep running; their names differ.
            chance: Random source for the jitter.
            longest_pause: Longest pause before a restart.
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
        """True if every child has been ready."""
        return self._announced

    def begin(self, now: Nanos) -> list[SupervisionCommand]:
        return self._start_next(now)

    def handle(self, event: SupervisionEvent, now: Nanos) -> list[SupervisionCommand]:
        assert not self._finished, "an event after the end"
        return [*self._respond(event, now), *self._finish_if_over()]

    def next_instant(self) -> Nanos | None:
        """Return the time at which `SupervisionTicked` is due; None if nothing waits for time."""
        return min((track.until for track in self._tracks.values() if track.until is not None), default=None)

    def child_states(self) -> dict[str, ChildState]:
        """Return the state of each child, for progress messages."""
        return {name: track.condition for name, track in self._tracks.items()}

    def failing(self) -> frozenset[str]:
        """Return the children that have died since they were last ready."""
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
            return []  # the child is being stopped
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
            return []  # the child has just ended, or is being killed
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
            return [kill]  # its exit counts as a death
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
        """Ask the earliest remaining stage to stop, once the stages before it have ended."""
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
