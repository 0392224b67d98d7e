"""When the processes of a local cluster are started, restarted, asked to stop and killed.

Rules:

1. Children start stage by stage: one starts when every child of an earlier stage has been ready. They stop stage by
   stage as well, in an order of its own: the router first, because it still owes answers that need the workers.
2. Until all children have been ready once, the death of one, or a readiness that does not come in time, ends the
   attempt: nothing is left half-started, and a wrong setting is not retried.
3. After that a child that dies is started again alone, after a pause that doubles with every death in a row. A child
   that stays ready for `HEALTHY_AFTER` has no deaths in a row any more; `MAX_DEATHS` in a row end the cluster.
4. A child that exits with `CONFIGURATION_REFUSED` is never started again: the same settings would be refused again.
5. Stopping asks, waits for the grace, then kills; a second request to stop kills at once. The cluster is over when no
   child is left.
6. When all have been ready, children come and go. One that is added starts alone, and nothing else ends with it: however often
   it dies it is started again, after the longest pause at last; only where it refuses its settings it is not. One that is removed
   is asked to drain within a time; what is left after it, or was not ready, is stopped like the others. It is forgotten when it is gone.
"""

from collections.abc import Sequence
from enum import Enum, auto
from typing import assert_never

from msgspec import Struct

from fleet.clock import MILLISECOND, SECOND, Nanos

CONFIGURATION_REFUSED = 3  # exit status, as of the command `fleet`
FIRST_PAUSE = Nanos(250 * MILLISECOND)
LONGEST_PAUSE = Nanos(10 * SECOND)
MAX_DEATHS = 5  # in a row: about eight seconds of trying
HEALTHY_AFTER = Nanos(30 * SECOND)


class Child(Struct, frozen=True, kw_only=True):
    """One process to keep running."""

    name: str
    start_stage: int
    stop_stage: int
    ready_within: Nanos
    stop_within: Nanos


class BecameReady(Struct, frozen=True):
    name: str


class Exited(Struct, frozen=True):
    """The process and all that it had started are gone."""

    name: str
    status: int  # as `subprocess` counts: negative for the number of the signal


class Added(Struct, frozen=True):
    """A child that there was not; the name may be of one that has been forgotten."""

    child: Child


class Removed(Struct, frozen=True):
    """A child that is wanted no more."""

    name: str
    within: Nanos  # for it to finish what it has


class StopRequested(Struct, frozen=True):
    pass


class Ticked(Struct, frozen=True):
    """Time passed."""


Event = BecameReady | Exited | Added | Removed | StopRequested | Ticked


class Spawn(Struct, frozen=True):
    name: str


class AskToStop(Struct, frozen=True):
    name: str


class AskToDrain(Struct, frozen=True):
    """To finish what it has, to take nothing more, and to end."""

    name: str
    within: Nanos


class Kill(Struct, frozen=True):
    """With all that it has started."""

    name: str


class AnnounceReady(Struct, frozen=True):
    """Every child has been ready; given once."""


class ReportRestart(Struct, frozen=True):
    name: str
    status: int
    pause: Nanos


class ReportRefusal(Struct, frozen=True):
    """An added child has refused its settings; it is not started again."""

    name: str


class Forget(Struct, frozen=True):
    """A removed child is gone."""

    name: str


class ReportFailure(Struct, frozen=True):
    """The cluster cannot go on; everything is being stopped because of this child."""

    name: str
    reason: str
    status: int | None  # None: it is still running


class Finish(Struct, frozen=True):
    """No child is left; nothing follows."""


Command = (
    Spawn
    | AskToDrain
    | AskToStop
    | Kill
    | AnnounceReady
    | ReportRestart
    | ReportRefusal
    | Forget
    | ReportFailure
    | Finish
)


class Condition(Enum):
    """Of one child."""

    HELD = auto()  # an earlier stage is not ready
    STARTING = auto()
    READY = auto()
    PAUSED = auto()  # died, will be started again
    DRAINING = auto()  # was removed while it was ready
    STOPPING = auto()  # was asked to
    KILLED = auto()  # its exit is awaited
    GONE = auto()


_RUNNING = (Condition.STARTING, Condition.READY)


class _Track:
    """What is known of one child."""

    def __init__(self, child: Child):
        self.child = child
        self.condition = Condition.HELD
        self.until: Nanos | None = None  # when the condition has lasted too long (or, of a pause, long enough)
        self.deaths = 0  # in a row
        self.been_ready = False
        self.added = False  # after the start: its death is nobody else's
        self.leaving = False  # was removed

    def become(self, condition: Condition, until: Nanos | None = None) -> None:
        self.condition, self.until = condition, until


class Supervision:
    """The machine: `handle(event, now)` gives the commands to perform; `begin` gives the first ones."""

    def __init__(self, children: Sequence[Child]):
        assert len({child.name for child in children}) == len(children), "names must differ"
        self._tracks = {child.name: _Track(child) for child in children}
        self._announced = False
        self._stopping = False
        self._finished = False

    @property
    def announced(self) -> bool:
        """Whether every child has been ready."""
        return self._announced

    def begin(self, now: Nanos) -> list[Command]:
        return self._start_next(now)

    def handle(self, event: Event, now: Nanos) -> list[Command]:
        assert not self._finished, "an event after the end"
        return [*self._respond(event, now), *self._finish_if_over()]

    def next_instant(self) -> Nanos | None:
        """When `Ticked` is next due; None while nothing waits for time."""
        return min((track.until for track in self._tracks.values() if track.until is not None), default=None)

    def conditions(self) -> dict[str, Condition]:
        """For progress shown to a person."""
        return {name: track.condition for name, track in self._tracks.items()}

    def failing(self) -> frozenset[str]:
        """Children that have died since they were last ready, or will not be started again."""
        return frozenset(
            name
            for name, track in self._tracks.items()
            if track.condition is Condition.GONE or (track.deaths and track.condition is not Condition.READY)
        )

    def check(self) -> None:
        """Raise if a promise between calls is broken."""
        for track in self._tracks.values():
            timed = track.condition not in (Condition.HELD, Condition.READY, Condition.GONE, Condition.KILLED)
            healing = track.condition is Condition.READY and track.deaths > 0
            assert (track.until is not None) == (timed or healing), (track.child.name, track.condition)
            assert track.deaths <= MAX_DEATHS or track.added
            if self._stopping:
                assert track.condition is not Condition.PAUSED
            else:
                assert track.condition is not Condition.GONE or track.added, track.child.name

    def _respond(self, event: Event, now: Nanos) -> list[Command]:
        match event:
            case BecameReady(name):
                return self._on_ready(self._tracks[name], now)
            case Exited(name, status):
                return self._on_exit(self._tracks[name], status, now)
            case Added(child):
                return self._add(child, now)
            case Removed(name, within):
                return self._remove(self._tracks[name], within, now) if name in self._tracks else []
            case StopRequested():
                return self._kill_all() if self._stopping else self._stop(now)
            case Ticked():
                return self._on_time(now)
            case _:
                assert_never(event)

    def _on_ready(self, track: _Track, now: Nanos) -> list[Command]:
        if track.condition is not Condition.STARTING:
            return []  # it is being stopped
        track.been_ready = True
        track.become(Condition.READY, Nanos(now + HEALTHY_AFTER) if track.deaths else None)
        commands = self._start_next(now)
        if not self._announced and all(each.been_ready for each in self._tracks.values()):
            self._announced = True
            commands.append(AnnounceReady())
        return commands

    def _on_exit(self, track: _Track, status: int, now: Nanos) -> list[Command]:
        name = track.child.name
        was = track.condition
        track.become(Condition.GONE)
        if self._stopping:
            return self._stop_next(now)
        if track.leaving:
            return [self._forget(track)]
        if track.added and status == CONFIGURATION_REFUSED:
            return [ReportRefusal(name)]
        if not self._announced or status == CONFIGURATION_REFUSED:
            return [ReportFailure(name, "ended before the cluster was ready", status), *self._stop(now)]
        assert was in _RUNNING or was is Condition.KILLED, was
        track.deaths += 1
        if track.deaths >= MAX_DEATHS and not track.added:
            return [ReportFailure(name, f"died {MAX_DEATHS} times in a row", status), *self._stop(now)]
        pause = Nanos(min(FIRST_PAUSE * 2 ** (track.deaths - 1), LONGEST_PAUSE))
        track.become(Condition.PAUSED, Nanos(now + pause))
        return [ReportRestart(name, status, pause)]

    def _add(self, child: Child, now: Nanos) -> list[Command]:
        assert self._announced, "children are added to a cluster that is ready"
        assert child.name not in self._tracks, child.name
        if self._stopping:
            return [Forget(child.name)]
        track = self._tracks[child.name] = _Track(child)
        track.added = True
        return [self._spawn(track, now)]

    def _remove(self, track: _Track, within: Nanos, now: Nanos) -> list[Command]:
        if self._stopping or track.leaving:
            return []
        track.leaving = True
        if track.condition is Condition.READY:
            track.become(Condition.DRAINING, Nanos(now + within))
            return [AskToDrain(track.child.name, within)]
        if track.condition is Condition.STARTING:
            return [self._ask_to_stop(track, now)]
        return [] if track.condition is Condition.KILLED else [self._forget(track)]

    def _forget(self, track: _Track) -> Forget:
        del self._tracks[track.child.name]
        return Forget(track.child.name)

    def _on_time(self, now: Nanos) -> list[Command]:
        commands: list[Command] = []
        for track in self._tracks.values():
            if track.until is None or now < track.until:
                continue
            match track.condition:
                case Condition.STARTING:
                    commands += self._give_up_start(track, now)
                case Condition.READY:
                    track.deaths = 0
                    track.until = None
                case Condition.PAUSED:
                    commands.append(self._spawn(track, now))
                case Condition.DRAINING:
                    commands.append(self._ask_to_stop(track, now))
                case Condition.STOPPING:
                    commands.append(self._kill(track))
                case Condition.HELD | Condition.KILLED | Condition.GONE:
                    raise AssertionError(track.condition)
        return commands

    def _give_up_start(self, track: _Track, now: Nanos) -> list[Command]:
        kill = self._kill(track)
        if self._announced:
            return [kill]  # its exit counts as a death
        seconds = track.child.ready_within // SECOND
        return [ReportFailure(track.child.name, f"was not ready within {seconds} s", None), kill, *self._stop(now)]

    def _start_next(self, now: Nanos) -> list[Command]:
        if self._stopping:
            return []
        unready = [track.child.start_stage for track in self._tracks.values() if not track.been_ready]
        stage = min(unready, default=0)
        return [
            self._spawn(track, now)
            for track in self._tracks.values()
            if track.condition is Condition.HELD and track.child.start_stage <= stage
        ]

    def _spawn(self, track: _Track, now: Nanos) -> Spawn:
        track.become(Condition.STARTING, Nanos(now + track.child.ready_within))
        return Spawn(track.child.name)

    def _kill(self, track: _Track) -> Kill:
        track.become(Condition.KILLED)
        return Kill(track.child.name)

    def _kill_all(self) -> list[Command]:
        return [
            self._kill(track)
            for track in self._tracks.values()
            if track.condition in (*_RUNNING, Condition.DRAINING, Condition.STOPPING)
        ]

    def _stop(self, now: Nanos) -> list[Command]:
        self._stopping = True
        for track in self._tracks.values():
            if track.condition in (Condition.HELD, Condition.PAUSED):
                track.become(Condition.GONE)
        return self._stop_next(now)

    def _stop_next(self, now: Nanos) -> list[Command]:
        """Ask the earliest stage that still runs, once the stages before it are gone."""
        left = [track for track in self._tracks.values() if track.condition is not Condition.GONE]
        stage = min((track.child.stop_stage for track in left), default=0)
        return [
            self._ask_to_stop(track, now)
            for track in left
            if track.child.stop_stage == stage and track.condition in (*_RUNNING, Condition.DRAINING)
        ]

    def _ask_to_stop(self, track: _Track, now: Nanos) -> AskToStop:
        track.become(Condition.STOPPING, Nanos(now + track.child.stop_within))
        return AskToStop(track.child.name)

    def _finish_if_over(self) -> list[Command]:
        if not self._stopping or any(track.condition is not Condition.GONE for track in self._tracks.values()):
            return []
        self._finished = True
        return [Finish()]
