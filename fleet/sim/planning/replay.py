"""Replay of a planner: lets a scaling rule size the pools of a simulated cluster while recorded or drawn requests arrive.

Rules:

1. A rule gets only data that it would get in production: demand windows with the delay of the metrics, and the
   connector's observations. Only rules that know the future (`RuleContext.future`) get more. The decisions of a rule are
   written through the simulated connector.
2. Attainment is the share of all requests that keep all latency targets of the scenario (`Slo`). Requests that were refused, or whose
   deadline passed, count as missing the targets.
3. A replica's GPUs count from its start until it has left. Results are measured from the end of the warm-up to the last arrival,
   so the measured span is the same for all rules. Only `ReplayOutcome.plans` counts the warm-up too.
4. The direction of a pool changes when it grows after it has shrunk, or shrinks after it has grown.
"""

import asyncio
import gc
from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from random import Random

from msgspec import Struct, structs

from fleet.core.clock import SECOND, Nanos
from fleet.core.errors import ConfigurationRefused
from fleet.planner.connectors.virtual import VirtualConnector
from fleet.planner.decisions import DecisionReason, PlanCondition, PlanDecision, PlanGoals, PlannedPool, ScalingRule
from fleet.planner.demand import DemandWindow
from fleet.planner.messages import Observation, Plan, PlanId, PoolName
from fleet.sim.cluster.elastic_pools import ElasticPool, ElasticPools, PoolState
from fleet.sim.cluster.pools import PoolProfile
from fleet.sim.kernel import Kernel
from fleet.sim.planning.capacity import capacity_of
from fleet.sim.planning.demand import DemandCollector
from fleet.sim.planning.orchestrator import SimulatedOrchestrator, simulated_connector
from fleet.sim.planning.outcome import ReplayOutcome
from fleet.sim.planning.rule_context import RuleContext, ScheduledReplicas, SimulatedRule
from fleet.sim.planning.scenario import ReplayScenario
from fleet.sim.results.history import ArrivalWindow, History
from fleet.sim.results.outcomes import EndedRequest, Slo
from fleet.sim.run import RunPlan, world_arguments
from fleet.sim.run_plan import plan, traffic
from fleet.sim.workload.clients import start_clients
from fleet.sim.world import World
from kvstore.eviction.trace_replay import TraceRequest

HOUR = 3600.0
PLAN_WITHIN = Nanos(600 * SECOND)
FORECAST, HORIZON = "forecast", "horizon_seconds"
"""Keys in `PlanDecision.numbers` for a rule's forecast in requests per second, and for the number of seconds from the
decision to the instant that the forecast is for."""

WORST_OF = Nanos(300 * SECOND)
LEAST_REQUESTS = 20
"""Length of the spans of time for `ReplayOutcome.worst_attainment` (`WORST_OF`), and the minimum number of requests
in a span. A span with fewer requests is not counted."""

AROUND = Nanos(30 * SECOND)
"""Time before and after the instant of a forecast in which the real arrivals are counted, to compare their rate with the
forecast."""


class ReplayStep(Struct, frozen=True, kw_only=True):
    """One decision of a scaling rule, with the rate of arrivals and the replicas at that instant."""

    at: float
    """Seconds since the beginning of the replay."""

    rate: float
    """Arrivals per second in the demand window from which the decision was made."""

    wanted: dict[str, int]
    ready: dict[str, int]
    held: dict[str, int]
    """Replicas that occupy GPUs, by pool: starting, ready and draining ones."""

    reason: DecisionReason
    message: str
    conditions: tuple[PlanCondition, ...]
    changed: bool


class ReplayResult(Struct, frozen=True, kw_only=True):
    """Results of one scaling rule, in total and over time."""

    outcome: ReplayOutcome
    steps: list[ReplayStep]
    windows: list[ArrivalWindow]
    span: tuple[float, float]
    """Begin and end of the measured span, in seconds since the beginning of the replay."""


class Replay:
    """Replays the requests of one scenario with any scaling rule. The scenario is checked when the object is created."""

    def __init__(self, scenario: ReplayScenario, folder: Path) -> None:
        """Read and check the profiles, policy and workload that the scenario names.

        Raises:
            ConfigurationRefused: A GPU, a model, a policy or a trace cannot be used, or the last request arrives before the
            warm-up ends.
        """
        self.scenario = scenario
        self._plan = plan(scenario, folder)
        self._requests = [each for each in traffic(scenario, folder) if isinstance(each, TraceRequest)]
        if not self._requests:  # only phases can be without requests
            raise ConfigurationRefused(
                "workload.phases: no request arrives in them; raise their rates or make them longer"
            )
        self._span = (
            Nanos(round(scenario.planner.warm_up_seconds * SECOND)),
            Nanos(self._requests[-1].arrival),
        )
        if self._span[0] and self._span[0] >= self._span[1]:
            raise ConfigurationRefused(
                f"planner.warm_up_seconds: {scenario.planner.warm_up_seconds:.9g} must be less than {self._span[1] / SECOND:.6g}, the"
                " second of the last arrival, because results leave the warm-up out"
            )

    @property
    def replica_prices(self) -> dict[str, float]:
        """Dollars per hour of one replica, by pool."""
        return {profile.name: profile.gpus * profile.dollars_per_hour for profile in self._plan.pools}

    @property
    def goals(self) -> PlanGoals:
        slo, percentile = self.scenario.slo, self.scenario.planner.percentile
        return PlanGoals(ttft_seconds=slo.ttft_ms / 1000, tpot_seconds=slo.tpot_ms / 1000, percentile=percentile)

    def context(self) -> RuleContext:
        """Return the data that a rule gets when it is created."""
        profiles = self._profiles()
        return RuleContext(
            goals=self.goals,
            attainment=self.scenario.planner.attainment,
            budget=self.scenario.planner.budget,
            pools=tuple(self._planned(profile) for profile in profiles),
            profiles={PoolName(profile.name): profile for profile in profiles},
            capacities={PoolName(profile.name): capacity_of(profile) for profile in profiles},
            future=self._requests,
            attempt=lambda rule: self.run("trial", rule).outcome,
        )

    def run_rule(self, name: str, settings: SimulatedRule) -> ReplayResult:
        """Create a rule from its parameters and replay the requests with it."""
        return self.run(name, settings.open(self.context()))

    def run(self, name: str, rule: ScalingRule, on_end: Callable[[EndedRequest], None] | None = None) -> ReplayResult:
        """Replay all requests with a rule, until the last request has ended. `on_end` is called with each ended request.

        Raises:
            ConfigurationRefused: The first replicas have more GPUs than the budget allows.
        """
        profiles = self._profiles()
        if isinstance(rule, ScheduledReplicas):
            begin = rule.begin
            profiles = [structs.replace(each, workers=begin[PoolName(each.name)]) for each in profiles]
        most, first = self.scenario.planner.budget.gpus, sum(each.workers * each.gpus for each in profiles)
        if most is not None and first > most:
            raise ConfigurationRefused(
                f"planner.budget.gpus: {most} is below the {first} GPUs of the replicas at the beginning"
            )
        was_on = gc.isenabled()
        # Python's cyclic garbage collector is off: it would take a third of the run's time, and a run makes few cycles.
        gc.disable()
        try:
            plan_ = structs.replace(self._plan, pools=tuple(profiles))
            return _Run(self, name, rule, plan_, self._requests, on_end).result()
        finally:
            if was_on:
                gc.enable()

    @property
    def span(self) -> tuple[Nanos, Nanos]:
        """Begin and end of the measured span: the end of the warm-up and the last arrival."""
        return self._span

    def _profiles(self) -> list[PoolProfile]:
        return [
            structs.replace(profile, start_time=Nanos(round(self.scenario.limits(profile.name).start_seconds * SECOND)))
            for profile in self._plan.pools
        ]

    def _planned(self, profile: PoolProfile) -> PlannedPool:
        limits = self.scenario.limits(profile.name)
        return PlannedPool(
            name=PoolName(profile.name),
            role=profile.role,
            gpu=profile.gpu,
            gpus=profile.gpus,
            least=limits.least,
            most=limits.most,
            dollars_per_hour=profile.dollars_per_hour,
            start_seconds=limits.start_seconds,
            drain_seconds=limits.drain_seconds,
        )


class _Run:
    """Runs one replay with one rule."""

    def __init__(
        self,
        replay: Replay,
        name: str,
        rule: ScalingRule,
        plan_: RunPlan,
        requests: Sequence[TraceRequest],
        on_end: Callable[[EndedRequest], None] | None,
    ) -> None:
        scenario = replay.scenario
        self._name, self._rule, self._plan = name, rule, plan_
        self._begin, self._end = replay.span
        self._kernel = Kernel(plan_.seed)
        self._score = _Score(plan_.slo, self._begin, self._end)
        self._on_end = on_end
        self._clients_over = False
        planner = scenario.planner
        self._collector = DemandCollector(
            self._kernel,
            delay=Nanos(round(planner.metric_delay_seconds * SECOND)),
            gaps=tuple(_gaps(planner.gap_every_seconds, planner.gap_seconds, self._end)),
            over=lambda: self._clients_over,
        )
        self._world = World(
            self._kernel,
            plan_.pools,
            plan_.router,
            ended=self._ended,
            record=self._collector,
            **world_arguments(plan_),
        )
        elastic = [
            ElasticPool(
                profile=profile,
                start_spread=scenario.limits(profile.name).start_spread,
                drain_limit=Nanos(round(scenario.limits(profile.name).drain_seconds * SECOND)),
            )
            for profile in plan_.pools
        ]
        self._pools = ElasticPools(
            self._kernel, self._world.cluster, elastic, random=Random(plan_.seed), gpus=planner.budget.gpus
        )
        self._collector.watch(self._world.cluster, self._pools)
        self._connector: VirtualConnector = simulated_connector(
            self._kernel, SimulatedOrchestrator(self._kernel, self._pools)
        )
        start_clients(plan_.clients, self._kernel, self._world, iter(requests), self._ended)
        self._steps: list[ReplayStep] = []

    def result(self) -> ReplayResult:
        asyncio.run(self._decide())
        self._clients_over = True
        self._kernel.run()
        self._world.check()
        self._pools.check()
        return ReplayResult(
            outcome=self._outcome(),
            steps=self._steps,
            windows=self._score.history.windows(),
            span=(self._begin / SECOND, self._end / SECOND),
        )

    def _ended(self, ended: EndedRequest) -> None:
        self._score.add(ended)
        if self._on_end is not None:
            self._on_end(ended)

    async def _decide(self) -> None:
        """Run the simulation up to the last arrival, and let the rule decide at the end of each of its intervals."""
        kernel, rule = self._kernel, self._rule
        while kernel.instant < self._end:
            until = Nanos(min(kernel.instant + rule.interval, self._end))
            kernel.run(until)
            kernel.skip(until)
            window = self._collector.window()
            seen = await self._connector.observe()
            decision = rule.decide(kernel.instant, window, seen)
            changes = {
                name: replicas
                for name, replicas in decision.replicas.items()
                if (pool := seen.pool(name)) is not None and pool.wanted != replicas
            }
            if changes:
                plan_id = PlanId(f"{self._name}-{len(self._steps)}")
                await self._connector.apply(Plan(id=plan_id, replicas=changes, within=PLAN_WITHIN), seen)
            self._note(decision, window, seen, changed=bool(changes))

    def _note(self, decision: PlanDecision, window: DemandWindow, seen: Observation, *, changed: bool) -> None:
        self._score.decided(decision)
        wanted = {each.name: decision.replicas.get(each.name, each.wanted) for each in seen.pools}
        self._steps.append(
            ReplayStep(
                at=self._kernel.instant / SECOND,
                rate=window.rate,
                wanted={str(name): count for name, count in wanted.items()},
                ready={str(each.name): each.ready for each in seen.pools},
                held={name: self._pools.state(name).held for name in self._pools.names},
                reason=decision.reason,
                message=decision.message,
                conditions=decision.conditions,
                changed=changed,
            )
        )

    def _outcome(self) -> ReplayOutcome:
        gpu_seconds = {
            profile.name: self._pools.gpu_seconds(profile.name, self._begin, self._end) for profile in self._plan.pools
        }
        prices = {profile.name: profile.dollars_per_hour for profile in self._plan.pools}
        histories = [self._pools.history(name) for name in self._pools.names]
        return ReplayOutcome(
            rule=self._name,
            attainment=round(self._score.attainment, 5),
            worst_attainment=round(self._score.worst_attainment, 5),
            gpu_hours=round(sum(gpu_seconds.values()) / HOUR, 4),
            dollars=round(sum(gpu_seconds[name] * prices[name] for name in gpu_seconds) / HOUR, 4),
            direction_changes=sum(direction_changes(self._wanted(history)) for history in histories),
            most_replicas=self._most_replicas(histories),
            predicted_error=self._score.predicted_error(),
            requests=self._score.requests,
            refused=self._score.refused,
            plans=sum(step.changed for step in self._steps),
            cached_share=round(self._score.cached_share, 5),
            lowest_ttft_ms=self._score.lowest_ttft_ms,
            lowest_tpot_ms=self._score.lowest_tpot_ms,
        )

    def _wanted(self, history: Sequence[PoolState]) -> Iterable[int]:
        """Return the numbers of replicas that a pool wanted: at the beginning of the measured span, and in each later state of the span."""
        return [state.wanted for state in history if state.at <= self._end][
            max(0, sum(state.at < self._begin for state in history) - 1) :
        ]

    def _most_replicas(self, histories: Sequence[Sequence[PoolState]]) -> int:
        changes = sorted(
            (max(state.at, self._begin), place, state.held)
            for place, history in enumerate(histories)
            for state in history
            if state.at <= self._end
        )
        held: dict[int, int] = {}
        most = 0
        for number, (at, place, count) in enumerate(changes):
            held[place] = count
            if number + 1 == len(changes) or changes[number + 1][0] > at:
                most = max(most, sum(held.values()))
        return most


class _Score:
    """Adds up the ended requests and collects the forecasts of a replay, to compute its results."""

    def __init__(self, slo: Slo, begin: Nanos, end: Nanos) -> None:
        self._slo, self._begin, self._end = slo, begin, end
        self.history = History(slo)
        self.requests = self.refused = self._good = 0
        self._prompt_tokens = self._cached_tokens = 0
        self.lowest_ttft_ms: float | None = None
        self.lowest_tpot_ms: float | None = None
        # maps the index of each span of time (its length is `WORST_OF`) to two counts: all requests, and good requests
        self._spans: dict[int, list[int]] = {}
        self._arrivals: list[Nanos] = []
        self._forecasts: list[tuple[Nanos, float]] = []

    def add(self, ended: EndedRequest) -> None:
        self.history.add(ended)
        if not self._begin <= ended.arrival <= self._end:
            return
        answered = not ended.refused and ended.first_token is not None
        good = answered and self._slo.kept_by(ended)
        self.requests += 1
        self.refused += not answered
        self._good += good
        span = self._spans.setdefault(ended.arrival // WORST_OF, [0, 0])
        span[0] += 1
        span[1] += good
        if answered:
            self._prompt_tokens += ended.prompt_tokens
            self._cached_tokens += ended.cached_tokens
            self.lowest_ttft_ms = _lower(self.lowest_ttft_ms, ended.ttft_ms)
            if ended.output_tokens > 1:
                self.lowest_tpot_ms = _lower(self.lowest_tpot_ms, ended.tpot_ms)
        self._arrivals.append(ended.arrival)

    def decided(self, decision: PlanDecision) -> None:
        if (rate := decision.numbers.get(FORECAST)) is not None:
            at = Nanos(decision.at + round(decision.numbers.get(HORIZON, 0.0) * SECOND))
            self._forecasts.append((at, rate))

    @property
    def attainment(self) -> float:
        return self._good / self.requests if self.requests else 1.0

    @property
    def worst_attainment(self) -> float:
        shares = [good / count for count, good in self._spans.values() if count >= LEAST_REQUESTS]
        return min(shares, default=self.attainment)

    @property
    def cached_share(self) -> float:
        return self._cached_tokens / self._prompt_tokens if self._prompt_tokens else 0.0

    def predicted_error(self) -> float | None:
        """Return the mean absolute error of the forecast rates, divided by the mean real rate.

        Only forecasts count whose instant is in the measured span, at least `AROUND` from its ends. Return None if there are none, or if no
        request arrived within `AROUND` of these instants.
        """
        arrivals = sorted(self._arrivals)
        distance = came = 0.0
        for at, forecast in self._forecasts:
            if not self._begin + AROUND <= at <= self._end - AROUND:
                continue
            count = bisect(arrivals, at + AROUND) - bisect(arrivals, at - AROUND)
            rate = count * SECOND / (2 * AROUND)
            distance += abs(forecast - rate)
            came += rate
        return round(distance / came, 5) if came else None


def _lower(before: float | None, value: float) -> float:
    return round(value if before is None else min(before, value), 3)


def direction_changes(numbers: Iterable[int]) -> int:
    """Return how often a series of numbers changes from growth to decline or from decline to growth."""
    changes, direction, before = 0, 0, None
    for number in numbers:
        if before is not None and number != before:
            towards = 1 if number > before else -1
            changes += direction not in {0, towards}
            direction = towards
        before = number
    return changes


def _gaps(every: float, length: float, end: Nanos) -> Iterable[tuple[Nanos, Nanos]]:
    if not every:
        return
    begin = every
    while begin * SECOND < end:
        yield Nanos(round(begin * SECOND)), Nanos(round((begin + length) * SECOND))
        begin += every
