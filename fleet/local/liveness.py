"""Liveness of a child process: decides from its heartbeats and from the kernel's counters when a running child counts as hung.

Rules:

1. A ready child sends a heartbeat from its event loop every `HEARTBEAT_INTERVAL`. A child hangs if it was stopped
   (SIGSTOP) for `LivenessLimits.stopped`, or sent no heartbeat for `LivenessLimits.silent`.
2. Time in which the child waited for a core does not count as silence: where other processes use all cores, the machine
   is slow, not the child.
3. Time in which no sample was taken does not count, because the supervisor or the whole machine was stopped in it.
   Afterwards all time limits of the child begin again.
4. A child that a debugger traces never counts as hung.
5. Before its first heartbeat a child may be silent for any time, because loading may block its event loop for minutes.
   `fleet.local.supervision.ChildProcess.ready_within` limits the loading time. The limit for a stopped child also holds
   before its first heartbeat.
"""

from msgspec import Struct

from fleet.core.clock import MILLISECOND, SECOND, Nanos

HEARTBEAT_INTERVAL = Nanos(500 * MILLISECOND)
SAMPLE_INTERVAL = Nanos(500 * MILLISECOND)
SUPERVISOR_PAUSE = 4 * SAMPLE_INTERVAL
"""If at least this time has passed between two samples, the supervisor itself did not run in between (rule 3)."""


class LivenessLimits(Struct, frozen=True, kw_only=True):
    """Limits after which an unresponsive child is killed (rules 1 to 3)."""

    stopped: Nanos = Nanos(3 * SECOND)
    # Maximum time without a heartbeat; None: the child sends none, so only `stopped` applies.
    silent: Nanos | None = None


class ProcessSample(Struct, frozen=True, kw_only=True):
    """State of a process and its main thread, as the kernel reports it."""

    stopped: bool = False  # True if a signal such as SIGSTOP has stopped the process
    traced: bool = False  # True if a debugger traces the process
    runnable: bool = False  # True if the process runs or waits for a core; False on a kernel that does not report `ran`
    ran: Nanos = Nanos(0)  # time on a core since its start
    waited: Nanos = Nanos(0)  # time spent waiting for a core since its start, without the current wait


class HangDetected(Struct, frozen=True):
    """Result of a check: the child does not respond and has to be killed."""

    why: str  # reason, as the end of a sentence that begins with "the child"


class Liveness:
    """Detects that one run of a child hangs, from samples and heartbeats."""

    def __init__(self, limits: LivenessLimits, now: Nanos):
        self._limits = limits
        self._looked_at = now
        self._before = ProcessSample()
        self._beats = False  # True after the first heartbeat
        self._stopped = Nanos(0)
        self._silent = Nanos(0)

    def observe(self, look: ProcessSample, *, heartbeat: bool, now: Nanos) -> HangDetected | None:
        """Record one sample of the child, and return whether it hangs: the reason, or None if it does not hang.

        Args:
            look: The state that the kernel reports now.
            heartbeat: True if a heartbeat came since the last sample.
            now: Monotonic time.
        """
        passed, before = Nanos(now - self._looked_at), self._before
        self._looked_at, self._before = now, look
        self._beats = self._beats or heartbeat
        if look.traced or passed >= SUPERVISOR_PAUSE:
            self._stopped = self._silent = Nanos(0)
            return None
        self._stopped = Nanos(self._stopped + passed) if look.stopped else Nanos(0)
        self._silent = (
            Nanos(0) if heartbeat else Nanos(self._silent + passed - _time_without_core(look, before, passed))
        )
        if self._stopped >= self._limits.stopped:
            return HangDetected(f"has been stopped for {_seconds(self._limits.stopped)} s")
        if self._beats and self._limits.silent is not None and self._silent >= self._limits.silent:
            return HangDetected(f"has said nothing for {_seconds(self._limits.silent)} s")
        return None


def _time_without_core(look: ProcessSample, before: ProcessSample, passed: Nanos) -> Nanos:
    """Return the time that the child has waited for a core since the last sample.

    It is at most `passed`, the time since that sample.
    """
    if look.runnable and look.ran == before.ran:
        return passed
    return min(Nanos(look.waited - before.waited), passed)


def _seconds(span: Nanos) -> str:
    return f"{span / SECOND:g}"
