"""Step watchdog: decides from an engine's steps whether the engine is healthy or hangs. `workers.server` calls the watchdog.

If the engine hangs, `workers.server` ends the routers' streams, and each router continues its requests on other workers. Hung
processes of `fleet up` are noticed by `fleet.local.liveness`, silent streams of workers by `fleet.backends.workers.streams`.

Rules:

1. Progress is a step of the engine's scheduler, and not a token: while a long prompt is computed chunk by chunk, there are steps
   all the time, but no token for minutes. A scheduler that has no work makes no progress and does not hang.
2. The patience is the time without progress after which an engine with work counts as hung. It is `step_factor` times
   the slowest recent step of the same size, but at least `floor_seconds` and at most `ceiling_seconds`.
3. Steps are distinguished by size, because a step that computes 4,096 prompt tokens may take a thousand times as long
   as one that decodes. Sizes are powers of two: all steps whose tokens round to the same power have the same size. For
   a size without an observed step there are two upper bounds: the time of a larger step, and the time of a smaller step
   in proportion to the tokens. The smaller of these two bounds is used. If no step was observed at all, the patience is
   the ceiling.
4. Slow steps are forgotten: the remembered time of a size's slowest step halves with each `HALF_LIFE` of watched time.
   The time of a first compilation therefore does not count for ever.
5. If there is work of a kind that the engine has not done before (an adapter to load, a kernel to compile), the
   patience is the ceiling, and the time of the step is not learned. Only work that was present when the step began
   counts. Requests that arrive while the engine hangs therefore do not extend the patience.
6. A step may wait for a KV transfer from another engine. While work that was present when the step began waits for a transfer, the
   patience is at least the transfer's own time limit, and the step's time is not learned.
7. The time between two calls of `Watchdog.look` counts as at most a tenth of the patience. The watchdog sees nothing
   while its process is stopped, the machine is suspended, or the event loop is blocked. Such a gap does not mean that
   the engine hangs. A hang is therefore detected after at least ten calls without progress. The time of a step with a
   longer gap is not learned.
8. The state of an engine is the worst state of its schedulers.
"""

from collections.abc import Sequence
from enum import StrEnum
from itertools import islice
from typing import Annotated

from msgspec import Meta, Struct

from fleet.core.clock import SECOND, Nanos
from workers.ports import Pulse

# Watched time in which a remembered step time halves (rule 4): long enough to remember recent slow steps, and short enough to
# forget a compilation within an hour.
HALF_LIFE = 600 * SECOND
SHARE_OF_A_LOOK = 10  # the time between two calls of `look` counts as at most the patience / this number (rule 7)
SIZES = 32  # number of step sizes (rule 3); enough, because no step has 2**31 tokens


class WatchdogSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the watchdog: when an engine without progress on its work counts as hung, by the rules of this module.

    A worker whose engine hangs leaves service at once, kills the engine and ends, so that its supervisor starts
    another one.
    """

    enabled: bool = True
    """If off, a hung engine keeps its requests and gets new ones until somebody ends it. Switch it off for debuggers
    that the operating system does not show, and for engines whose steps have no bound."""

    floor_seconds: Annotated[float, Meta(gt=0, le=3600)] = 10.0
    """The shortest patience, however fast the steps were. Steps of deployed engines take from milliseconds to a second;
    10 s is above the pauses of a busy machine, and short enough for waiting clients."""

    ceiling_seconds: Annotated[float, Meta(gt=0, le=86_400)] = 300.0
    """The longest patience. It also applies to first steps and to work of a new kind, because such steps may compile
    kernels or load an adapter. vLLM has the same limit for a step that several processes compute."""

    step_factor: Annotated[float, Meta(ge=2, le=1000)] = 20.0
    """Between `floor_seconds` and `ceiling_seconds`, the patience is this factor times the slowest recent step of the
    same size. The default is 20 = 4 x 5. A step over a context of 100,000 tokens takes about 4 times as long as a step
    without context. If four other processes share the core, a step takes 5 times as long."""

    def __post_init__(self) -> None:
        if self.ceiling_seconds < self.floor_seconds:
            raise ValueError(
                f"ceiling_seconds: {self.ceiling_seconds:g} is below floor_seconds, {self.floor_seconds:g}"
            )


class EngineHealth(StrEnum):
    HEALTHY = "healthy"
    SUSPECT = "suspect"  # a scheduler has work, and half of its patience or more has passed without a step
    HUNG = "hung"


class Watchdog:
    """Watches the steps of one engine, which may have several schedulers."""

    def __init__(self, settings: WatchdogSettings) -> None:
        self._settings = settings
        self._schedulers: list[_Scheduler] = []
        self._looked_at: Nanos | None = None

    def look(self, pulses: Sequence[Pulse], now: Nanos) -> EngineHealth:
        """Compare the pulses of the engine's schedulers with the pulses of the previous call; return the engine's health.

        Args:
            pulses: One pulse for each scheduler, always in the same order; empty: the engine does not report its steps,
                and is not watched.
            now: The current instant, never earlier than in the previous call.
        """
        if not self._settings.enabled:
            return EngineHealth.HEALTHY
        since = Nanos(0) if self._looked_at is None else Nanos(now - self._looked_at)
        self._looked_at = now
        while len(self._schedulers) < len(pulses):
            self._schedulers.append(_Scheduler(self._settings))
        found = [scheduler.look(pulse, since) for scheduler, pulse in zip(self._schedulers, pulses, strict=False)]
        return max(found, key=list(EngineHealth).index, default=EngineHealth.HEALTHY)

    def excuse(self) -> None:
        """Count the time without progress from zero again, because something else (a debugger) stopped the engine."""
        for scheduler in self._schedulers:
            scheduler.waited = Nanos(0)

    @property
    def waited(self) -> Nanos:
        """The longest time for which a scheduler with work has made no progress until the latest `look` (gaps count as in rule 7)."""
        return max((scheduler.waited for scheduler in self._schedulers), default=Nanos(0))


class _Scheduler:
    """Watches the steps of one scheduler of an engine, and decides whether this scheduler hangs."""

    def __init__(self, settings: WatchdogSettings) -> None:
        self.waited = Nanos(0)
        self._floor = Nanos(round(settings.floor_seconds * SECOND))
        self._ceiling = Nanos(round(settings.ceiling_seconds * SECOND))
        self._factor = settings.step_factor
        self._pulse: Pulse | None = None
        self._slowest: list[_Slowest | None] = [None] * SIZES
        self._watched = Nanos(0)
        self._novel = False  # True if work of a new kind was present when the current step began
        self._fetch_limit = Nanos(0)  # time limit of the transfers for which work waited when the current step began
        self._slept = False  # True if a gap between two calls since the last step did not count in full (rule 7)

    def look(self, pulse: Pulse, since: Nanos) -> EngineHealth:
        before, self._pulse = self._pulse, pulse
        if before is None or not before.working:  # the scheduler had no work, and idle time is not part of a step
            self.waited = Nanos(0)
            self._begin(pulse)
            return EngineHealth.HEALTHY
        patience = self._patience(before)
        counted = min(since, Nanos(patience // SHARE_OF_A_LOOK))
        self._slept = self._slept or counted < since
        self._watched = Nanos(self._watched + counted)
        if pulse.steps != before.steps:
            if not (self._novel or before.novel or self._fetch_limit or before.fetch_limit or self._slept):
                self._learn(before.tokens, Nanos(self.waited + counted))
            self.waited = Nanos(0)
            self._begin(pulse)
            self._slept = False
            return EngineHealth.HEALTHY
        if not pulse.working:
            self.waited = Nanos(0)
            return EngineHealth.HEALTHY
        self.waited = Nanos(self.waited + counted)
        if self.waited >= patience:
            return EngineHealth.HUNG
        return EngineHealth.SUSPECT if 2 * self.waited >= patience else EngineHealth.HEALTHY

    def _begin(self, pulse: Pulse) -> None:
        """Note at the beginning of a step whether there is work of a new kind, or work that waits for a transfer (rules 5 and 6)."""
        self._novel = pulse.novel
        self._fetch_limit = pulse.fetch_limit

    def _learn(self, tokens: int, took: Nanos) -> None:
        """Remember the time of a step for its size (rule 4).

        If a step began and ended between two calls of `look`, the time between the two calls counts as its duration.
        """
        size = _size_of(tokens)
        known = self._slowest[size]
        before = 0.0 if known is None else known.took * 0.5 ** ((self._watched - known.at) / HALF_LIFE)
        self._slowest[size] = _Slowest(took=max(float(took), before), at=self._watched)

    def _patience(self, pulse: Pulse) -> Nanos:
        """Return the patience for a step (rules 2, 3, 5 and 6)."""
        expected = None if self._novel else self._expected(_size_of(pulse.tokens))
        if expected is None:
            return self._ceiling
        return Nanos(round(min(max(self._factor * expected, self._floor, self._fetch_limit), self._ceiling)))

    def _expected(self, size: int) -> float | None:
        """Return the expected longest time of a step of this size in nanoseconds (rule 3); None if no step was observed."""
        if (seen := self._slowest[size]) is not None:
            return seen.took
        larger = (seen.took for seen in self._slowest[size:] if seen is not None)
        smaller = (
            seen.took * float(2 ** (size - known))
            for known, seen in reversed(list(enumerate(self._slowest[:size])))
            if seen is not None
        )
        return min((bound for bounds in (larger, smaller) for bound in islice(bounds, 1)), default=None)


class _Slowest(Struct, frozen=True):
    """Remembers the slowest step of one size. The remembered time halves while no slower step comes (rule 4)."""

    took: float  # duration of the step in nanoseconds
    at: Nanos  # instant of the step, by a clock that counts only watched time


def _size_of(tokens: int) -> int:
    return min(tokens.bit_length(), SIZES - 1)
