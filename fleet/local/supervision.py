"""Supervision of the processes of a local cluster: when they are started, restarted, asked to stop and killed.

Rules:

1. Children start stage by stage: a child starts when every child of an earlier stage has been ready. They stop stage by
   stage as well, in an order of its own: the router first, because it still owes answers that need the workers.
2. Until all children have been ready once, the death of one, or a readiness that does not come in time, ends the
   attempt: nothing is left half-started, and a wrong setting is not retried. Nothing else but a request ends the cluster.
3. After that a child that dies is started again alone, after a pause. The pause doubles with every death in a row, from
   `FIRST_BACKOFF` up to `Supervision.longest_pause`; a random part of it, at most `JITTER`, is left out, so that children
   that died together do not start together for ever. However often a child dies, the others go on. A child that stays
   ready for `HEALTHY_AFTER` has no deaths in a row any more.
4. A child that exits with `CONFIGURATION_REFUSED` after the cluster was ready is started again after the longest pause. Its
   settings have not changed, but what they name may have: a port that somebody else took, a file that was moved.
5. Stopping asks, waits for the grace, then kills; a second request to stop kills at once. The cluster is over when no
   child is left.
6. When all have been ready, children come and go. A child that is added starts alone. A child that is removed is asked to drain
   within a time; what is left after it, or was not ready, is stopped like the others. It is forgotten when it is gone.
7. A child that runs but does not respond is killed; that is a death like any other. `fleet.local.liveness` says when.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol, assert_never

from msgspec import Struct

from fleet.core.clock import MILLISECOND, SECOND, Nanos

CONFIGURATION_REFUSED = 3  # exit status, as of the command `fleet`
FIRST_BACKOFF = Nanos(250 * MILLISECOND)
LONGEST_BACKOFF = Nanos(30 * SECOND)
MOST_DOUBLINGS = 20  # of the first pause: three days, beyond any ceiling
JITTER = 0.5  # of a pause, at most: "equal jitter"
HEALTHY_AFTER = Nanos(30 * SECOND)


class RandomSource(Protocol):
    """A source of random numbers; `random.Random` is one."""

    def uniform(self, a: float, b: float, /) -> float: ...


class ChildProcess(Struct, frozen=True, kw_only=True):
    """One process to keep running."""

    name: str
    start_stage: int
    stop_stage: int
    ready_within: Nanos
    stop_within: Nanos


class ChildReady(Struct, frozen=True):
    name: str


class ChildExited(Struct, frozen=True):
    """The process and all that it had started are gone."""

    name: str
    status: int  # as `subprocess` counts: negative for the number of the signal


class ChildUnresponsive(Struct, frozen=True):
    """The process lives, but it was stopped or said nothing for too long."""

    name: str


class ChildAdded(Struct, frozen=True):
    """A child that there was not; the name may be of one that has been forgotten."""

    child: ChildProcess


class ChildRemoved(Struct, frozen=True):
    """A child that is wanted no more."""

    name: str
    within: Nanos  # for it to finish what it has


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
    """To finish what it has, to take nothing more, and to end."""

    name: str
    within: Nanos


class KillChild(Struct, frozen=True):
    """With all that it has started."""

    name: str


class AnnounceReady(Struct, frozen=True):
    """Every child has been ready; given once."""


class ReportRestart(Struct, frozen=True):
    """A child has died, and will be started again after the pause."""

    name: str
    status: int
    pause: Nanos
    deaths: int = 1  # in a row, this one included


class ForgetChild(Struct, frozen=True):
    """A removed child is gone."""

    name: str


class ReportFailure(Struct, frozen=True):
    """The cluster cannot go on; everything is being stopped because of this child."""

    name: str
    reason: str
    status: int | None  # None: it is still running


class SupervisionFinished(Struct, frozen=True):
    """No child is left; nothing follows."""


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
    """The activity of a child."""

    HELD = "held"  # an earlier stage is not ready
    STARTING = "starting"
    READY = "ready"
    PAUSED = "paused"  # it died, and will be started again
    DRAINING = "draining"  # it was removed while it was ready
    STOPPING = "stopping"  # it was asked to
    KILLED = "killed"  # its exit is awaited
    GONE = "gone"


class ChildStatus(Struct, frozen=True, kw_only=True):
    """The state of one child, for people."""

    condition: ChildState
    deaths: int  # in a row, without having been ready for `HEALTHY_AFTER` after the last one
    last_status: int | None = None  # with which it ended the last time; None: it has not died
    starts_at: Nanos | None = None  # when it is to be started again; None: it runs, or will not be


_RUNNING = (ChildState.STARTING, ChildState.READY)


class _ChildRecord:
    """What is known of one child."""

    def __init__(self, child: ChildProcess):
        self.child = child
        self.condition = ChildState.HELD
        self.until: Nanos | None = None  # when the condition has lasted too long (or, of a pause, long enough)
        self.deaths = 0  # in a row
        self.last_status: int | None = None
        self.been_ready = False
        self.leaving = False  # was removed

    def become(self, condition: ChildState, until: Nanos | None = None) -> None:
        self.condition, self.until = condition, until


class Supervision:
    """The machine: `handle(event, now)` gives the commands to perform; `begin` gives the first ones."""

    def __init__(self, children: Sequence[ChildProcess], chance: RandomSource, longest_pause: Nanos = LONGEST_BACKOFF):
        """A cluster of which nothing runs yet.

        Args:
            children: The processes to keep running; their names differ.
            chance: The source of the jitter of pauses.
            longest_pause: The ceiling of the pause before a child is started again.
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
        """Whether every child has been ready."""
        return self._announced

    def begin(self, now: Nanos) -> list[SupervisionCommand]:
        return self._start_next(now)

    def handle(self, event: SupervisionEvent, now: Nanos) -> list[SupervisionCommand]:
        assert not self._finished, "an event after the end"
        return [*self._respond(event, now), *self._finish_if_over()]

    def next_instant(self) -> Nanos | None:
        """When `SupervisionTicked` is next due; None while nothing waits for time."""
        return min((track.until for track in self._tracks.values() if track.until is not None), default=None)

    def child_states(self) -> dict[str, ChildState]:
        """For progress shown to a person."""
        return {name: track.condition for name, track in self._tracks.items()}

    def failing(self) -> frozenset[str]:
        """Return the children that have died since they were last ready."""
        return frozenset(
            name
            for name, track in self._tracks.items()
            if track.deaths and track.condition is not ChildState.READY and not self._stopping
        )

    def child_statuses(self) -> dict[str, ChildStatus]:
        """Return what each child does and how it fares."""
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
        """Raise if a promise between calls is broken."""
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
            return []  # it is being stopped
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
            return []  # it has just ended, or is being killed
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
        """Ask the earliest stage that still runs, once the stages before it are gone."""
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
