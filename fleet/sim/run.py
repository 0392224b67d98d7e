"""Run: simulates a world and its clients from the first request to the last, and collects the results."""

import gc
import time
from collections.abc import Callable
from typing import Any

from msgspec import Struct, structs

from fleet.core.clock import SECOND, Nanos
from fleet.router.policy import PlacementPolicy
from fleet.router.settings.router import RouterSettings
from fleet.sim.cluster.faults import Fault
from fleet.sim.cluster.node_store import StoreProfile
from fleet.sim.cluster.pools import PoolProfile
from fleet.sim.kernel import Kernel
from fleet.sim.results.outcomes import (
    EndedRequest,
    PoolOutcome,
    RequestSums,
    RunOutcome,
    Slo,
    TimelineSample,
    seconds,
)
from fleet.sim.results.quantiles import Quantiles
from fleet.sim.virtual_engine import VirtualEngine
from fleet.sim.workload.clients import ClientSection, OpenClients, Traffic, start_clients
from fleet.sim.world import World

HOUR = 3600.0
SAMPLE_EVERY = Nanos(10 * SECOND)
MOST_SAMPLES = 240
"""Maximum number of samples of a timeline, because a plot cannot show more. At this number, each two samples are joined to one."""


class RunPlan(Struct, frozen=True, kw_only=True):
    """All inputs of a simulation run except for its requests."""

    pools: tuple[PoolProfile, ...]
    router: RouterSettings
    slo: Slo
    block_tokens: int
    message_delay: Nanos
    seed: int
    faults: tuple[Fault, ...] = ()
    policy: PlacementPolicy | None = None
    clients: ClientSection = OpenClients()
    store: StoreProfile | None = None
    verbatim_answers: bool = False


class RunResult(Struct, frozen=True, kw_only=True):
    """Results of a simulation run: its figures, and the sums and samples from which its report is drawn."""

    outcome: RunOutcome
    totals: RequestSums
    timeline: list[TimelineSample]


def simulate(
    plan: RunPlan,
    traffic: Traffic,
    *,
    on_end: Callable[[EndedRequest], None] | None = None,
    progress: Callable[[int, float], None] | None = None,
    sample_every: Nanos = SAMPLE_EVERY,
) -> RunResult:
    """Simulate a run until its last request has ended, and return the results.

    Args:
        plan: All inputs of the run except for its requests.
        traffic: Requests in the order of their arrival, or sessions, that the clients send.
        on_end: Called with each request that has ended.
        progress: Called at each sample of the timeline with the number of ended requests, and the simulated seconds.
        sample_every: First interval between two samples of the timeline. The interval doubles whenever there are `MOST_SAMPLES` samples.
    """
    began = time.process_time()
    kernel = Kernel(plan.seed)
    totals = RequestSums(plan.slo)

    def ended(request: EndedRequest) -> None:
        totals.add(request)
        if on_end is not None:
            on_end(request)

    world = World(kernel, plan.pools, plan.router, ended=ended, **world_arguments(plan))
    for fault in plan.faults:
        world.fail(fault)
    clients = start_clients(plan.clients, kernel, world, traffic, ended)
    timeline = _TimelineSampler(kernel, world, sample_every, lambda: clients.over, progress)
    with _GarbageCollectorOff():
        kernel.run()
    world.check()
    return RunResult(
        outcome=_outcome(world, totals, world.last_end, time.process_time() - began),
        totals=totals,
        timeline=timeline.samples,
    )


def world_arguments(plan: RunPlan) -> dict[str, Any]:
    """Return the keyword arguments for `World` that follow from a plan.

    The agreement test creates its world with the same arguments.
    """
    return {
        "seed": plan.seed,
        "block_tokens": plan.block_tokens,
        "message_delay": plan.message_delay,
        "policy": plan.policy,
        "store": plan.store,
        "verbatim_answers": plan.verbatim_answers,
    }


class _TimelineSampler:
    """Takes samples of a run's timeline. Whenever there are `MOST_SAMPLES`, joins pairs of samples and doubles the interval."""

    def __init__(
        self,
        kernel: Kernel,
        world: World,
        every: Nanos,
        over: Callable[[], bool],
        progress: Callable[[int, float], None] | None,
    ):
        self._kernel, self._world, self._every, self._over, self._progress = kernel, world, every, over, progress
        self._finished = 0
        self.samples: list[TimelineSample] = []
        kernel.after(every, self._sample)

    def _sample(self) -> None:
        now = seconds(self._kernel.now())
        self.samples.append(self._world.look(now, self._finished))
        self._finished = self._world.finished
        if self._progress is not None:
            self._progress(self._finished, now)
        if len(self.samples) == MOST_SAMPLES:
            self._every = Nanos(2 * self._every)
            self.samples = [_joined(*pair) for pair in zip(self.samples[::2], self.samples[1::2], strict=True)]
        if not self._over():
            self._kernel.after(self._every, self._sample)


def _joined(earlier: TimelineSample, later: TimelineSample) -> TimelineSample:
    return structs.replace(later, finished=earlier.finished + later.finished)


class _GarbageCollectorOff:
    """Turns Python's cyclic garbage collector off during a run.

    The collector would take a third of the run's time, and free little memory.
    """

    def __enter__(self) -> None:
        self._was_on = gc.isenabled()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self._was_on:
            gc.enable()


def _outcome(world: World, totals: RequestSums, end: Nanos, cpu_seconds: float) -> RunOutcome:
    simulated = seconds(end)
    sums: dict[str, _PoolSums] = {}
    gaps = Quantiles()
    for profile, up, engine in world.workers():
        sums.setdefault(profile.name, _PoolSums(profile)).add(seconds(up), engine)
        gaps.take(engine.gaps)
    pools = [pool.outcome() for pool in sums.values()]
    up_all = sum(pool.up for pool in sums.values())
    busy_all = sum(sum(pool.busy) for pool in sums.values())
    cost = sum(pool.cost for pool in sums.values())
    joules = sum(pool.joules for pool in sums.values())
    tokens = totals.prompt_tokens + totals.output_tokens
    return RunOutcome(
        digest=world.digest,
        requests=totals.requests,
        refused=totals.refused,
        simulated_seconds=round(simulated, 3),
        cpu_seconds=round(cpu_seconds, 3),
        requests_per_cpu_second=round(totals.requests / cpu_seconds, 1) if cpu_seconds else 0.0,
        ttft_ms=totals.ttft.summary(),
        tpot_ms=totals.tpot.summary(),
        itl_ms=gaps.summary(),
        e2e_ms=totals.e2e.summary(),
        goodput_rps=round(totals.good / simulated, 4) if simulated else 0.0,
        attainment=round(totals.attainment, 5),
        hit_rate=round(totals.hit_rate, 5),
        hit_rate_by_tier={tier: round(share, 5) for tier, share in totals.hit_rate_by_tier.items()},
        retries=totals.retries,
        imbalance=max(pool.imbalance for pool in pools),
        utilisation=round(busy_all / up_all, 4) if up_all else 0.0,
        disaggregated=world.machine.snapshot().counters.disaggregated,
        preempted=sum(pool.preempted for pool in sums.values()),
        moved_gb=round(world.moved_bytes / 1e9, 3),
        gpu_hours=round(sum(pool.gpu_hours for pool in pools), 4),
        cost=round(cost, 4),
        cost_per_million_tokens=round(cost / tokens * 1e6, 4) if tokens else 0.0,
        energy_kwh=round(joules / HOUR / 1000, 4),
        joules_per_token=round(joules / totals.output_tokens, 4) if totals.output_tokens else 0.0,
        pools=pools,
    )


class _PoolSums:
    """Adds up the results of the workers of one pool, including workers that died or left."""

    def __init__(self, profile: PoolProfile):
        self._profile = profile
        self.up = 0.0  # seconds for which the workers occupied their GPUs, summed over the workers
        self.busy: list[float] = []  # seconds that each worker spent in steps
        self.cost = 0.0
        self.joules = 0.0
        self.preempted = 0
        self._computed = self._generated = 0

    def add(self, up: float, engine: VirtualEngine) -> None:
        profile, hours = self._profile, up / HOUR
        self.up += up
        self.busy.append(seconds(engine.busy))
        self.cost += profile.gpus * hours * profile.dollars_per_hour
        idle, above = profile.idle_watts * up, profile.busy_watts - profile.idle_watts
        self.joules += profile.gpus * (idle + above * engine.weighted_busy / SECOND)
        self.preempted += engine.preempted
        self._computed += engine.computed_tokens
        self._generated += engine.generated_tokens

    def outcome(self) -> PoolOutcome:
        profile, busy = self._profile, sum(self.busy)
        tokens = self._computed + self._generated
        return PoolOutcome(
            name=profile.name,
            role=profile.role.value,
            gpu=profile.gpu,
            gpus=profile.gpus * profile.workers,
            workers=profile.workers,
            utilisation=round(busy / self.up, 4) if self.up else 0.0,
            imbalance=round(max(self.busy) * len(self.busy) / busy, 4) if busy else 0.0,
            computed_tokens=self._computed,
            generated_tokens=self._generated,
            gpu_hours=profile.gpus * self.up / HOUR,
            cost=round(self.cost, 4),
            energy_kwh=round(self.joules / HOUR / 1000, 4),
            joules_per_token=round(self.joules / tokens, 4) if tokens else 0.0,
            cost_per_million_tokens=round(self.cost / tokens * 1e6, 4) if tokens else 0.0,
            quality=profile.quality,
        )
