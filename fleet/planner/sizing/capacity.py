"""Capacity: computes the highest rate of requests that replicas of a pool serve within the latency goals. Pure.

Rules:

1. A pool is described by the engine of one replica (`PoolEngine`): its step model, the size of its KV cache, and the
   time to transfer the KV of a prompt.
2. The goals hold for a percentile of all requests, and not for the mean. Random arrivals, bursts
   (`OfferedLoad.dispersion`), the prompts of other requests, and the length of the request's own prompt all increase
   the TTFT. Independent increases are combined as the square root of the sum of their squares.
3. The replicas of a pool share a load, which the router balances, so a prompt waits only if all replicas are busy. For
   this reason, twice as many replicas serve more than twice the rate (`fleet.hardware.latency.open_loop`, rule 5).
4. Loads are rounded to a grid (`GRID`). So a small change of the measured lengths gives the same cached results and the
   same decision.
5. Measured latencies correct the predicted ones (`LatencyCorrection`) by a factor between `LEAST_FACTOR` and
   `MOST_FACTOR`.
"""

from collections.abc import Mapping
from functools import cached_property, lru_cache
from math import exp, isfinite, log, log1p, sqrt
from statistics import NormalDist
from typing import Protocol

from msgspec import Struct, structs

from fleet.core.roles import Role
from fleet.hardware.latency.closed_loop import BenchmarkClient
from fleet.hardware.latency.correction import Correction
from fleet.hardware.latency.limits import highest, highest_unbroken
from fleet.hardware.latency.linear import EngineLatency
from fleet.hardware.latency.open_loop import (
    BatchOccupancy,
    EngineReplica,
    RequestShape,
    aggregated_rate,
    aggregated_tpot,
    aggregated_ttft,
    decode_rate,
    decode_tpot,
    highest_concurrency,
    highest_prefill_rate,
    prefill_ttft,
)
from fleet.hardware.latency.step_model import StepModel
from fleet.planner.decisions import PlanGoals, PlannedPool
from fleet.planner.messages import PoolName
from fleet.planner.sizing.prediction_error import prediction_error

GRID = 1.02
"""Ratio of two neighbouring values on the grid to which lengths are rounded."""

DISPERSION_GRID = 1.1
MOST_DISPERSION = 50.0
LEAST_FACTOR = 0.25
MOST_FACTOR = 4.0
COARSE_STRIDE = 1.25
COARSE_HALVINGS = 16
"""Number of steps of a binary search for the highest load of an engine. The number is small, because a planner makes
hundreds of such searches in a round, and a decision needs no higher precision."""

REPLICAS_GRID = 1.2
"""Above `EXACT_REPLICAS`, the rate per replica is computed only for numbers of replicas that differ by this factor. For
a number in between, the rate of the next lower one is used."""

EXACT_REPLICAS = 8
ERROR_SAMPLES = 5
"""Weight of the latest error in the running mean of a correction's errors, as its reciprocal. It is small, because a correction
gets at most one sample a minute, and predictions that were wrong at first should not be reported for hours."""

KEPT = 4096
"""Maximum number of results in each of the two caches of a `StepCapacity`, one for rates and one for latencies."""


class OfferedLoad(Struct, frozen=True, kw_only=True):
    """Describes the requests of a model without their rate: lengths, variation of the lengths, and bursts."""

    shape: RequestShape
    prompt_spread: float = 0.0
    """Squared coefficient of variation of the prompt lengths."""

    answer_spread: float = 0.0
    dispersion: float = 1.0
    """Variance of the number of arrivals in an interval, divided by the mean of this number; 1 means Poisson
    arrivals."""

    def rounded(self) -> "OfferedLoad":
        """Return the load with its values rounded to the grid (rule 4)."""
        return _rounded(self)


class PredictedLatency(Struct, frozen=True, kw_only=True):
    """Holds the predicted latencies of a pool at a percentile, in seconds; 0 for a phase that the pool does not serve.

    The TTFT is infinite if prompts arrive faster than full steps can compute them. For any other rate above the capacity
    of a pool, the latencies are those of engines with full batches.
    """

    ttft: float = 0.0
    tpot: float = 0.0


class CapacityModel(Protocol):
    """Port of a model that predicts the highest request rate that pools serve within the goals, and their latencies at a given rate."""

    def highest_rate(self, pool: PlannedPool, load: OfferedLoad, goals: PlanGoals, replicas: int) -> float:
        """Return how many requests per second the replicas serve together within the goals.

        Return 0 if even a request that is alone in its engine misses a goal.
        """
        ...

    def latency(
        self, pool: PlannedPool, load: OfferedLoad, percentile: float, replicas: int, rate: float
    ) -> PredictedLatency:
        """Return the latencies of a pool whose replicas together get `rate` requests per second, at a percentile."""
        ...


class PoolEngine(Struct, frozen=True, kw_only=True):
    """Describes the engine of one replica of a pool, and its KV transfers."""

    engine: EngineReplica
    transfer_base: float = 0.0
    """Seconds that a KV transfer takes in addition to the time for its tokens."""

    transfer_token: float = 0.0
    """Seconds that each prompt token adds to a KV transfer."""

    def transfer(self, prompt_tokens: float) -> float:
        return self.transfer_base + self.transfer_token * prompt_tokens


class StepCapacity:
    """Predicts the highest request rate that pools serve within the goals, and their latencies at a given rate.

    It uses the step models of the pools' engines. Implements `CapacityModel`.
    """

    def __init__(self, engines: Mapping[PoolName, PoolEngine], headroom: float = 0.9) -> None:
        """Create the model.

        Args:
            engines: Engine of each pool, by the name of the pool.
            headroom: Maximum share of an engine's throughput that may be used, from 0 to 1.
        """
        self._engines = dict(engines)
        self._headroom = headroom
        self._rate = lru_cache(maxsize=KEPT)(self._computed_rate)
        self._latency = lru_cache(maxsize=KEPT)(self._computed_latency)

    def highest_rate(self, pool: PlannedPool, load: OfferedLoad, goals: PlanGoals, replicas: int) -> float:
        return replicas * self._rate(
            self._engines[pool.name], pool.role, load.rounded(), goals, _fewer_on_grid(replicas)
        )

    def latency(
        self, pool: PlannedPool, load: OfferedLoad, percentile: float, replicas: int, rate: float
    ) -> PredictedLatency:
        each = _on_grid(rate / replicas, 1.005) if rate > 0.0 else 0.0
        return self._latency(self._engines[pool.name], pool.role, load.rounded(), percentile, replicas, each)

    def _computed_rate(
        self, engine: PoolEngine, role: Role, load: OfferedLoad, goals: PlanGoals, replicas: int
    ) -> float:
        """Return the highest requests per second of one replica, if `replicas` equal replicas share the load."""
        shared = _SharedEngine(engine, load, goals.percentile, replicas)
        match role:
            case Role.PREFILL:
                return shared.highest_prefill_rate(goals.ttft_seconds, self._headroom)
            case Role.DECODE:
                return shared.highest_decode_rate(goals.tpot_seconds, self._headroom)
            case Role.BOTH:
                return shared.highest_rate(goals.ttft_seconds, goals.tpot_seconds, self._headroom)

    def _computed_latency(
        self, engine: PoolEngine, role: Role, load: OfferedLoad, percentile: float, replicas: int, rate: float
    ) -> PredictedLatency:
        shared = _SharedEngine(engine, load, percentile, replicas)
        match role:
            case Role.PREFILL:
                return PredictedLatency(ttft=shared.prefill_ttft(rate))
            case Role.DECODE:
                return PredictedLatency(tpot=shared.decode_tpot(shared.running(decode_rate, rate)))
            case Role.BOTH:
                running = shared.running(aggregated_rate, rate)
                return PredictedLatency(ttft=shared.ttft(running), tpot=shared.tpot(running))


class _SharedEngine:
    """Computes rates and latencies of one engine in a pool of equal engines that share a load."""

    def __init__(self, engine: PoolEngine, load: OfferedLoad, percentile: float, replicas: int) -> None:
        self._engine = engine.engine
        self._shape = load.shape
        self._long = _longer(load, percentile)
        self._transfer = engine.transfer(load.shape.prompt_tokens)
        self._occupancy = BatchOccupancy(
            percentile=percentile,
            waiting_clients=False,
            replicas=float(replicas),
            dispersion=load.dispersion,
            spread=load.prompt_spread,
        )

    @cached_property
    def room(self) -> float:
        return highest_concurrency(self._engine, self._shape)

    def highest_rate(self, ttft: float, tpot: float, headroom: float) -> float:
        """Return the most requests per second that an aggregated engine serves within the goals `ttft` and `tpot`.

        The engine uses at most the share `headroom` of its throughput.
        """
        most = headroom * aggregated_rate(self._engine, self._shape, self.room)

        def kept(running: float) -> bool:
            return (
                self._has_room(running)
                and aggregated_rate(self._engine, self._shape, running) <= most
                and self.tpot(running) <= tpot
                and self.ttft(running) <= ttft
            )

        running = highest_unbroken(kept, 0.0, self.room, COARSE_STRIDE, COARSE_HALVINGS)
        return aggregated_rate(self._engine, self._shape, running) if running else 0.0

    def highest_decode_rate(self, tpot: float, headroom: float) -> float:
        most = headroom * decode_rate(self._engine, self._shape, self.room)

        def kept(running: float) -> bool:
            return (
                self._has_room(running)
                and decode_rate(self._engine, self._shape, running) <= most
                and self.decode_tpot(running) <= tpot
            )

        running = highest(kept, 0.0, self.room, COARSE_HALVINGS)
        return decode_rate(self._engine, self._shape, running) if running else 0.0

    def highest_prefill_rate(self, ttft: float, headroom: float) -> float:
        most = headroom * highest_prefill_rate(self._engine, self._shape)
        return highest(lambda rate: self.prefill_ttft(rate) <= ttft, 0.0, most, COARSE_HALVINGS)

    @cached_property
    def _prefilled_alone(self) -> tuple[float, float]:
        """TTFT in seconds of a lone request in a prefill engine, and the seconds that a long prompt adds.

        The length of the long prompt is a percentile of all prompt lengths: the one for which this object was created.
        """
        alone = prefill_ttft(self._engine, self._shape, self._occupancy, 0.0)
        return alone, prefill_ttft(self._engine, self._long, self._occupancy, 0.0) - alone

    @cached_property
    def _answered_alone(self) -> tuple[float, float]:
        """TTFT in seconds of a lone request in an aggregated engine, and the seconds that a long prompt adds.

        The length of the long prompt is a percentile of all prompt lengths: the one for which this object was created.
        """
        alone = aggregated_ttft(self._engine, self._shape, self._occupancy, 0.0)
        return alone, aggregated_ttft(self._engine, self._long, self._occupancy, 0.0) - alone

    def prefill_ttft(self, rate: float) -> float:
        alone, long = self._prefilled_alone
        wait = prefill_ttft(self._engine, self._shape, self._occupancy, rate) - alone
        return alone + sqrt(long * long + wait * wait)

    def decode_tpot(self, running: float) -> float:
        return decode_tpot(self._engine, self._shape, self._occupancy, running, self._transfer)

    def ttft(self, running: float) -> float:
        alone, long = self._answered_alone
        wait = aggregated_ttft(self._engine, self._shape, self._occupancy, running) - alone
        return alone + sqrt(long * long + wait * wait)

    def tpot(self, running: float) -> float:
        return aggregated_tpot(self._engine, self._shape, self._occupancy, running)

    def running(self, rates: "_EngineRate", rate: float) -> float:
        """Return the number of requests that run in the engine at once if it gets `rate` requests per second."""
        return highest(
            lambda running: rates(self._engine, self._shape, running) <= rate, 0.0, self.room, COARSE_HALVINGS
        )

    def _has_room(self, running: float) -> bool:
        return self._occupancy.others(running) + 1.0 <= max(1.0, self.room)


class _EngineRate(Protocol):
    def __call__(self, engine: EngineReplica, request: RequestShape, running: float) -> float: ...


class LatencyCorrection:
    """Learns how the measured values of one latency differ from the predicted ones, and detects changes of this difference."""

    def __init__(self) -> None:
        self._correction = Correction()
        self._has_learnt = False
        self._compared = 0
        self._error = 0.0

    def observe(self, predicted: float, measured: float) -> bool:
        """Learn from one pair of latencies in seconds; return True if the ratio has changed (a drift alarm).

        Ignore the pair if one of the latencies is not above 0 or not finite.
        """
        if not (isfinite(predicted) and isfinite(measured) and predicted > 0.0 and measured > 0.0):
            return False
        predicted, measured = _bounded(predicted), _bounded(measured)
        if self._has_learnt:
            self._compared += 1
            wrong = prediction_error(self._correction.predict(predicted), measured)
            self._error += (wrong - self._error) / min(self._compared, ERROR_SAMPLES)
        self._has_learnt = True
        return self._correction.observe(predicted, measured)

    def factor(self, predicted: float) -> float:
        """Return the learnt ratio of the measured to the predicted latency, for a predicted latency in seconds.

        The ratio is limited by `LEAST_FACTOR` and `MOST_FACTOR`. It is 1 if the predicted latency is not above 0 or not finite.
        """
        if not isfinite(predicted) or predicted <= 0.0:
            return 1.0
        predicted = _bounded(predicted)
        return min(max(self._correction.predict(predicted) / predicted, LEAST_FACTOR), MOST_FACTOR)

    @property
    def error(self) -> float | None:
        """Running mean of the errors of the corrected predictions (`fleet.planner.sizing.prediction_error`), from 0 to 1.

        The first pair of latencies does not count, because nothing had corrected its prediction. None before the second pair.
        The corrected predictions are those of the learnt correction without limits. Plans use a factor that is limited to the
        range from 0.8 to 4 (`fleet.planner.sizing.corrected`), so their error may be larger if the engine differs more.
        """
        return self._error if self._compared else None

    @property
    def samples(self) -> int:
        return self._correction.learnt.samples


def linear_engine(
    latency: EngineLatency,
    role: Role,
    *,
    capacity_tokens: float,
    most_running: float,
    budget_tokens: float,
    kv_bytes_per_token: float = 0.0,
) -> PoolEngine:
    """Return the engine whose step times follow a linear latency model, such as that of simulated workers."""
    token = latency.prefill_ms_per_token * 1e-3
    step = StepModel(
        base=(latency.prefill_base_ms if role is Role.PREFILL else latency.step_base_ms) * 1e-3,
        # the step model adds the time of a token for each decoding sequence, so this time is subtracted here
        sequence=latency.step_ms_per_sequence * 1e-3 - token,
        token=token,
        dense_read=0.0,
        dense_token=0.0,
        experts_read=0.0,
        experts_token=0.0,
        missed=0.0,
        groups=1.0,
        pair=latency.prefill_ms_per_token_and_context * 1e-3,
        context=latency.step_ms_per_context_token * 1e-3,
        most_attended=float(1 << 40),
    )
    return PoolEngine(
        engine=EngineReplica(
            step=step,
            client=BenchmarkClient(),
            capacity_tokens=capacity_tokens,
            most_running=most_running,
            budget_tokens=budget_tokens,
        ),
        transfer_base=latency.transfer_base_ms * 1e-3,
        transfer_token=latency.transfer_ms_per_mib * 1e-3 * kv_bytes_per_token / (1 << 20),
    )


def _longer(load: OfferedLoad, percentile: float) -> RequestShape:
    """Return a request whose prompt length is at this percentile; prompt lengths are assumed to be log-normally distributed."""
    variance = log1p(load.prompt_spread)
    factor = max(1.0, exp(NormalDist().inv_cdf(percentile) * sqrt(variance) - 0.5 * variance))
    return structs.replace(
        load.shape,
        prompt_tokens=load.shape.prompt_tokens * factor,
        cached_tokens=load.shape.cached_tokens * factor,
    )


def _fewer_on_grid(replicas: int) -> int:
    if replicas <= EXACT_REPLICAS:
        return replicas
    steps = int(log(replicas / EXACT_REPLICAS) / log(REPLICAS_GRID) + 1e-9)
    return int(EXACT_REPLICAS * REPLICAS_GRID**steps)


@lru_cache(maxsize=64)
def _rounded(load: OfferedLoad) -> OfferedLoad:
    """Return the load with its values rounded to the grid.

    The result is cached, because the planner needs the same load thousands of times for one decision.
    """
    prompt = _on_grid(max(1.0, load.shape.prompt_tokens), GRID)
    new = _on_grid(max(1.0, load.shape.new_tokens), GRID)
    shape = RequestShape(
        prompt_tokens=prompt,
        answer_tokens=_on_grid(max(1.0, load.shape.answer_tokens), GRID),
        cached_tokens=max(0.0, prompt - new),
    )
    return OfferedLoad(
        shape=shape,
        prompt_spread=_on_grid(1.0 + max(0.0, load.prompt_spread), DISPERSION_GRID) - 1.0,
        answer_spread=_on_grid(1.0 + max(0.0, load.answer_spread), DISPERSION_GRID) - 1.0,
        dispersion=_on_grid(min(max(1.0, load.dispersion), MOST_DISPERSION), DISPERSION_GRID),
    )


def _on_grid(value: float, ratio: float) -> float:
    return ratio ** round(log(value) / log(ratio))


def _bounded(seconds: float) -> float:
    return min(max(seconds, 1e-6), 1e5)
