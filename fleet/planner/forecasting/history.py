"""History: remembers rates, lengths and latencies of requests, and changes of pools. Pure."""

from collections import deque
from collections.abc import Mapping, Sequence
from math import exp, inf, sqrt

from fleet.core.clock import SECOND, Nanos
from fleet.core.duration_counts import Counts, added, interpolated
from fleet.hardware.latency.open_loop import RequestShape
from fleet.planner.decisions import PlannedPool
from fleet.planner.demand import DemandWindow
from fleet.planner.forecasting.forecast import (
    ChosenForecaster,
    Forecaster,
    LastValue,
    LocalTrend,
    Seasonal,
    WeightedMean,
)
from fleet.planner.forecasting.level import Level
from fleet.planner.messages import Observation, PoolGapReason, PoolName
from fleet.planner.rule_settings import PlannerRuleSettings
from fleet.planner.sizing.capacity import OfferedLoad

QUIET_GAPS = 8.0
"""The load counts as ended only if no request has arrived for this many times the mean gap between requests. Only one
random gap in 3,000 is that long."""

RECENT_SECONDS = 60.0
"""Seconds for which demand windows are kept. Percentiles of latencies and the recent rate are computed from these windows."""

RECENT_ERRORS = 2.0
"""The rate of the last `RECENT_SECONDS` is used only if it exceeds the level (`DemandHistory.rate`) by more than this
many standard errors."""

ENOUGH = 20
"""Minimum number of measured requests for a percentile of latencies; with fewer requests, the percentile is unknown."""

PRIOR_COUNTS = 20.0
"""Weight of the start value of the dispersion, as a number of windows. The dispersion is the variance of the number of
arrivals, divided by the mean of this number. The start value is 1, as for Poisson arrivals."""

DISPERSION_MEMORY = 240.0
"""Number of windows after which the weight of an old sample of the dispersion has fallen to 1/e."""

MOST_SAMPLE = 9.0
"""Highest sample of the dispersion, as a multiple of the present one: three standard deviations of the number of arrivals. A step of the load
is often detected only some windows later, and must not count as a burst until then."""

LEAST_SPREAD = 0.05
"""Smallest value that is assumed for the squared coefficient of variation of lengths, when changes of the mean length
are detected."""

LEAST_CHANGE = 0.1
"""Smallest relative change of a mean length that counts as a change. With many requests, much smaller changes are
statistically significant, but they do not require another plan."""

SPREAD_MEMORY = 2000.0
"""Number of requests after which the weight of an old sample of the spread of lengths has fallen to 1/e."""

CACHED_MEMORY = 600.0
"""Seconds after which the weight of an old prompt in the share of cached tokens has fallen to 1/e. The time is long,
because a change of the pools loses cached blocks for a while, although the load stays the same."""

FIRST_SHAPE = RequestShape(prompt_tokens=1000.0, answer_tokens=200.0)
"""Lengths in tokens that are assumed for prompts until a request has arrived, and for answers until one has ended."""


class DemandHistory:
    """Learns the rate, the mean lengths, the dispersion and the forecast of the demand from each demand window."""

    def __init__(self, settings: PlannerRuleSettings) -> None:
        self._settings = settings
        self.dispersion = 1.0
        self._dispersion_weight = PRIOR_COUNTS
        self._prompts = _Lengths(settings.threshold)
        self._answers = _Lengths(settings.threshold)
        self._rate = Level(lambda mean: mean * self.dispersion, settings.threshold)
        # sums of tokens, in which old windows lose weight (`CACHED_MEMORY`)
        self._prompt_tokens = self._cached_tokens = 0.0
        self._recent: deque[DemandWindow] = deque()
        self._since_arrival = 0.0
        # sums of arrivals and of seconds since the load began, in which old windows lose weight
        self._arrivals = self._seconds = 0.0
        self._step_arrivals = self._step_seconds = 0.0
        self._steps = 0
        self.since_shape_change = inf
        """Seconds of observed demand since a change of the mean length of prompts or answers was last detected; infinite before."""

        self.since_fall = inf
        """Seconds of observed demand since a fall of the rate was last detected (`Level`); infinite before the first one."""

        self.ended: Nanos | None = None
        """Instant at which the last window ended; None before the first window."""

        self.forecaster = ChosenForecaster(_methods(settings), settings.step_seconds, 60.0)

    @property
    def rate(self) -> float:
        """Mean arrivals per second since the last detected change of the rate (the level, see `fleet.planner.forecasting.level`)."""
        return self._rate.mean

    @property
    def shape_changes(self) -> int:
        """Number of changes of the mean length of prompts or of answers that were detected so far."""
        return self._prompts.level.changes + self._answers.level.changes

    @property
    def cached_share(self) -> float:
        """Share of the prompt tokens that workers did not compute, because their KV was in a cache; older prompts count less."""
        return min(1.0, self._cached_tokens / self._prompt_tokens) if self._prompt_tokens else 0.0

    @property
    def recent_rate(self) -> float:
        """Arrivals per second in the last `RECENT_SECONDS` if these exceed the level (`rate`) by more than `RECENT_ERRORS`, or the level.

        The level alone would not do: it changes only after a large difference, so it follows a slow rise too late.
        """
        seconds = sum(each.seconds for each in self._recent)
        arrivals = sum(each.arrivals for each in self._recent)
        expected = self.rate * seconds
        chance = RECENT_ERRORS * sqrt(expected * self.dispersion)
        return arrivals / seconds if seconds and arrivals > expected + chance else self.rate

    @property
    def forecastable(self) -> bool:
        return self._steps >= 4

    @property
    def load(self) -> OfferedLoad:
        prompt = self._prompts.level.mean or FIRST_SHAPE.prompt_tokens
        shape = RequestShape(
            prompt_tokens=prompt,
            answer_tokens=self._answers.level.mean or FIRST_SHAPE.answer_tokens,
            cached_tokens=min(self.cached_share * prompt, prompt - 1.0) if prompt > 1.0 else 0.0,
        )
        return OfferedLoad(
            shape=shape,
            prompt_spread=self._prompts.spread,
            answer_spread=self._answers.spread,
            dispersion=self.dispersion,
        )

    @property
    def quiet(self) -> bool:
        """Return whether no request has arrived for the cool-down, and for `QUIET_GAPS` mean gaps between requests."""
        gap = self._seconds / self._arrivals if self._arrivals else 0.0
        return self._since_arrival >= max(self._settings.cool_down_seconds, QUIET_GAPS * gap)

    def absorb(self, demand: DemandWindow) -> None:
        """Learn from the next demand window; the caller must have checked that its numbers are possible."""
        self.ended = demand.ended
        if demand.seconds <= 0.0:
            return
        self._absorb_rate(demand.seconds, float(demand.arrivals))
        count, finished, changed = demand.arrivals, demand.finished, []
        if count:
            changed.append(self._prompts.add(count, demand.prompt_tokens, demand.prompt_squares))
            kept = exp(-demand.seconds / CACHED_MEMORY)
            self._prompt_tokens = kept * self._prompt_tokens + demand.prompt_tokens
            self._cached_tokens = kept * self._cached_tokens + demand.cached_tokens
        if finished:
            changed.append(self._answers.add(finished, demand.answer_tokens, demand.answer_squares))
        self.since_shape_change = 0.0 if any(changed) else self.since_shape_change + demand.seconds
        self._recent.append(demand)
        while self._recent[0].ended < demand.ended - RECENT_SECONDS * SECOND:
            self._recent.popleft()

    def latencies(self, share: float, seconds: float = RECENT_SECONDS) -> tuple[float | None, float | None]:
        """Return the percentiles of TTFT and TPOT over the last `seconds`; `share` is the percentile, from 0 to 1.

        A value is None if fewer than `ENOUGH` requests were measured.
        """
        found: list[float | None] = []
        for field in ("ttft", "tpot"):
            counts: Counts = ()
            for each in self._recent:
                if self.ended is not None and each.ended > self.ended - seconds * SECOND:
                    counts = added(counts, getattr(each, field))
            found.append(interpolated(counts, share) if sum(counts) >= ENOUGH else None)
        return found[0], found[1]

    def _absorb_rate(self, seconds: float, arrivals: float) -> None:
        expected = self._rate.mean * seconds
        changed = self._rate.add(seconds, arrivals)
        self.since_fall = 0.0 if changed and self._rate.mean * seconds < expected else self.since_fall + seconds
        if not changed and expected >= 0.5:
            self._dispersion_weight = min(self._dispersion_weight + 1.0, DISPERSION_MEMORY)
            observed = min((arrivals - expected) ** 2 / expected, MOST_SAMPLE * self.dispersion)
            self.dispersion = max(1.0, self.dispersion + (observed - self.dispersion) / self._dispersion_weight)
        self._since_arrival = 0.0 if arrivals else self._since_arrival + seconds
        if arrivals or not self.quiet:
            kept = 1.0 - min(1.0, seconds / 3600.0)
            self._arrivals, self._seconds = kept * self._arrivals + arrivals, kept * self._seconds + seconds
        else:
            self._arrivals = self._seconds = 0.0
        self._step_arrivals += arrivals
        self._step_seconds += seconds
        if self._step_seconds >= self._settings.step_seconds * 0.999:
            self.forecaster.update(self._step_arrivals / self._step_seconds)
            self._steps += 1
            self._step_arrivals = self._step_seconds = 0.0


class PoolHistory:
    """Learns the start-up time of each pool, the instants of changes, and which pools cannot grow at present."""

    def __init__(self, retry_seconds: float, pools: Sequence[PlannedPool]) -> None:
        self._retry = retry_seconds
        self._pools = {each.name: each for each in pools}
        self._start = {each.name: each.start_seconds for each in pools}
        self._blocked: dict[PoolName, float] = {}
        self._stuck: dict[PoolName, float] = {}
        self._asked: dict[PoolName, tuple[float, int]] = {}
        self._wanted: dict[PoolName, int] = {}
        self._ready: dict[PoolName, int] = {}
        self._decided: dict[PoolName, int] = {}
        self._written: dict[PoolName, int] = {}
        self.last_growth = 0.0
        """Instant, in seconds since the start of the planner, at which the requested number of a pool last grew. The
        start of the planner (0) counts as such an instant, because earlier changes are unknown."""

        self.has_grown = False
        """True if the requested number of a pool has grown since the start of the planner."""

        self.last_change = -inf
        """Instant, in seconds since the start of the planner, at which the number of ready replicas of any pool last
        changed; minus infinity before the first change."""

    def start_seconds(self, pool: PlannedPool) -> float:
        """Return the expected start-up time of a replica: the one in the settings, moved halfway to each observed start-up time."""
        return self._start[pool.name]

    def blocked(self, name: PoolName, now: float) -> bool:
        """Return whether the pool counts as unable to grow at the instant `now`; `absorb` lists the possible reasons."""
        return self._blocked.get(name, -inf) > now

    def decided(self, replicas: Mapping[PoolName, int]) -> None:
        self._decided = dict(replicas)

    def absorb(self, now: float, seen: Observation) -> None:
        """Learn from an observation of the pools.

        In three cases, a pool counts as unable to grow for `retry_seconds`:

        - Its missing replicas have found no room, or have failed, for at least the start-up time in the settings.
        - The orchestrator's bounds forbid the requested number.
        - A plan was rolled back: the number that the planner decided was written, and the requested number is lower
          now, although nobody has pinned the pool.
        """
        for each in seen.pools:
            if (pool := self._pools.get(each.name)) is None:
                continue
            name = each.name
            was, was_ready = self._wanted.get(name), self._ready.get(name)
            if was is not None and each.wanted > was:
                self.last_growth, self.has_grown = now, True
                self._asked[name] = (now, each.wanted)
            if was_ready is not None and each.ready != was_ready:
                self.last_change = now
            self._measure_start(name, each.wanted, each.ready, now)
            if each.pending and each.why in {PoolGapReason.NO_ROOM, PoolGapReason.FAILING}:
                since = self._stuck.setdefault(name, now)
                if now - since >= pool.start_seconds:
                    self._block(name, now)
            else:
                self._stuck.pop(name, None)
            if each.why is PoolGapReason.LIMITED:
                self._block(name, now)
            decided = self._decided.get(name)
            rolled_back = self._written.get(name) is not None and each.wanted < self._written[name] == decided
            if rolled_back and not each.pinned:
                self._block(name, now)
            if decided is not None and each.wanted == decided:
                self._written[name] = each.wanted
            else:
                self._written.pop(name, None)
            self._wanted[name], self._ready[name] = each.wanted, each.ready

    def _block(self, name: PoolName, now: float) -> None:
        if not self.blocked(name, now):
            self._blocked[name] = now + self._retry

    def _measure_start(self, name: PoolName, wanted: int, ready: int, now: float) -> None:
        """Learn the start-up time of a pool: from the instant when replicas are requested until the last one serves."""
        asked = self._asked.get(name)
        if asked is None:
            return
        since, count = asked
        if wanted < count:
            del self._asked[name]
        elif ready >= count:
            self._start[name] += 0.5 * (max(1.0, now - since) - self._start[name])
            del self._asked[name]


class _Lengths:
    """Learns the mean and the spread of the lengths of prompts or answers, and detects changes of the mean."""

    def __init__(self, threshold: float) -> None:
        self._weight = 0.0
        self.spread = 0.0
        """Squared coefficient of variation of the lengths, or 0 if it is unknown. The spread is computed within each window,
        so that a change of the mean does not increase the spread."""

        self.level = Level(lambda mean: mean * mean * max(LEAST_SPREAD, self.spread or 1.0), threshold, LEAST_CHANGE)

    def add(self, count: float, total: float, squares: float) -> bool:
        """Add the lengths of the requests in a window; return True if a change of the mean length is detected."""
        if squares and total and count > 1.0:
            weight = count - 1.0
            mean = total / count
            within = max(0.0, (squares / count / (mean * mean) - 1.0) * count / weight)
            self._weight = min(self._weight + weight, SPREAD_MEMORY)
            self.spread += (within - self.spread) * min(1.0, weight / self._weight)
        return self.level.add(count, total)


def _methods(settings: PlannerRuleSettings) -> dict[str, Forecaster]:
    step = settings.step_seconds
    known: dict[str, Forecaster] = {
        "mean": WeightedMean(half_life_steps=max(1.0, 60.0 / step)),
        "last": LastValue(step),
        "trend": LocalTrend(step),
    }
    if settings.season_seconds:
        known["seasonal"] = Seasonal(step, settings.season_seconds)
    if settings.forecast in {"chosen", "level"}:
        return known
    if settings.forecast not in known:
        raise ValueError("forecast: seasonal needs season_seconds above 0")
    return {settings.forecast: known[settings.forecast]}
