"""Liveness of a child process: when one that runs counts as hung, by what is seen of it from outside.

Rules:

1. A child that is ready sends a beat from its event loop every `HEARTBEAT_INTERVAL`. One that was stopped (SIGSTOP) for
   `LivenessLimits.stopped`, or that sent no beat for `LivenessLimits.silent`, hangs.
2. Only time counts in which the child could have spoken. Time in which it was ready to run and had no core does not: on a
   machine where others take every core, it is the machine that is slow and not the child.
3. Time in which nobody looked does not count, and all that was counted before is void: the supervisor was stopped as well,
   or the machine was suspended, and then the child begins anew.
4. A child that a debugger traces does not hang, whatever it does.
5. Before its first beat a child may be silent for as long as it likes: it loads, which may block its event loop for minutes. It must
   not be stopped then either. How long loading may take is `Child.ready_within`.
"""

from msgspec import Struct

from fleet.core.clock import MILLISECOND, SECOND, Nanos

HEARTBEAT_INTERVAL = Nanos(500 * MILLISECOND)
SAMPLE_INTERVAL = Nanos(500 * MILLISECOND)
SUPERVISOR_PAUSE = 4 * SAMPLE_INTERVAL
"""A look that comes so late says that the one who looks did not run (rule 3)."""


class LivenessLimits(Struct, frozen=True, kw_only=True):
    """The limits after which a child that does not respond is killed."""

    stopped: Nanos = Nanos(3 * SECOND)
    silent: Nanos | None = None  # None: it sends no beats


class ProcessSample(Struct, frozen=True, kw_only=True):
    """The state of a process and its main thread, as the kernel tells it."""

    stopped: bool = False  # by a signal
    traced: bool = False  # by a debugger
    runnable: bool = False  # it runs, or would if it had a core
    ran: Nanos = Nanos(0)  # on a core, since its start
    waited: Nanos = Nanos(0)  # for a core, since its start; what it waits now is not in it


class HangDetected(Struct, frozen=True):
    """A child does not respond."""

    why: str  # completes "the child ..."


class Liveness:
    """The observations of one run of a child; `observe` says when they show a hang."""

    def __init__(self, limits: LivenessLimits, now: Nanos):
        self._limits = limits
        self._looked_at = now
        self._before = ProcessSample()
        self._beats = False  # whether there has been one
        self._stopped = Nanos(0)
        self._silent = Nanos(0)

    def observe(self, look: ProcessSample, *, heard: bool, now: Nanos) -> HangDetected | None:
        """Take in one look at the child.

        Args:
            look: What the kernel says now.
            heard: Whether a beat has come since the last look.
            now: Monotonic time.
        """
        passed, before = Nanos(now - self._looked_at), self._before
        self._looked_at, self._before = now, look
        self._beats = self._beats or heard
        if look.traced or passed >= SUPERVISOR_PAUSE:
            self._stopped = self._silent = Nanos(0)
            return None
        self._stopped = Nanos(self._stopped + passed) if look.stopped else Nanos(0)
        self._silent = Nanos(0) if heard else Nanos(self._silent + passed - _time_without_core(look, before, passed))
        if self._stopped >= self._limits.stopped:
            return HangDetected(f"has been stopped for {_seconds(self._limits.stopped)} s")
        if self._beats and self._limits.silent is not None and self._silent >= self._limits.silent:
            return HangDetected(f"has said nothing for {_seconds(self._limits.silent)} s")
        return None


def _time_without_core(look: ProcessSample, before: ProcessSample, passed: Nanos) -> Nanos:
    """Return how much of the passed time the child waited for a core."""
    if look.runnable and look.ran == before.ran:
        return passed
    return min(Nanos(look.waited - before.waited), passed)


def _seconds(span: Nanos) -> str:
    return f"{span / SECOND:g}"
