"""A scenario, run: the world, its clients, and what came of it."""

import gc
import time
from collections.abc import Callable, Iterator
from functools import partial

from msgspec import Struct

from fleet.clock import SECOND, Nanos
from fleet.router.policies.ports import Policy
from fleet.router.settings import RouterSettings
from fleet.sim.kernel import Kernel
from fleet.sim.results import Ended, Outcome, Slo, Tally, Timeline, seconds
from fleet.sim.world import Fault, PoolProfile, World
from kvstore.replay import Request

HOUR = 3600.0
LOOK_EVERY = Nanos(10 * SECOND)
LOOKS = 240
"""Of a timeline, at most: more than a plot can show."""


class Plan(Struct, frozen=True, kw_only=True):
    """Everything that a run depends on."""

    pools: tuple[PoolProfile, ...]
    router: RouterSettings
    slo: Slo
    block_tokens: int
    message_delay: Nanos
    seed: int
    faults: tuple[Fault, ...] = ()
    policy: Policy | None = None


class Run(Struct, frozen=True, kw_only=True):
    """What a run showed, with what its report draws."""

    outcome: Outcome
    tally: Tally
    timeline: list[Timeline]


def simulate(
    plan: Plan,
    requests: Iterator[Request],
    *,
    told: Callable[[Ended], None] | None = None,
    progress: Callable[[int, float], None] | None = None,
    look_every: Nanos = LOOK_EVERY,
) -> Run:
    """Run to the end of the last request.

    Args:
        plan: What is simulated.
        requests: In the order of their arrival.
        told: Gets each request that is over.
        progress: Told now and then: requests that are over, simulated seconds.
        look_every: Between two entries of the timeline; it grows with the run, so that there are at most `LOOKS`.
    """
    began = time.process_time()
    kernel = Kernel(plan.seed)
    tally = Tally(plan.slo)

    def ended(request: Ended) -> None:
        tally.add(request)
        if told is not None:
            told(request)

    world = World(
        kernel,
        plan.pools,
        plan.router,
        seed=plan.seed,
        block_tokens=plan.block_tokens,
        message_delay=plan.message_delay,
        ended=ended,
        policy=plan.policy,
    )
    for fault in plan.faults:
        world.fail(fault)
    clients = _OpenLoop(kernel, world, requests)
    timeline = _Looks(kernel, world, look_every, lambda: clients.over, progress)
    with _NoCycles():
        kernel.run()
    world.check()
    return Run(
        outcome=_outcome(world, tally, world.last_end, time.process_time() - began),
        tally=tally,
        timeline=timeline.looks,
    )


class _OpenLoop:
    """Clients that send when the trace says, whatever became of what they sent before. One arrival is in the heap at a time."""

    def __init__(self, kernel: Kernel, world: World, requests: Iterator[Request]):
        self._kernel, self._world, self._requests = kernel, world, requests
        self._ended = False
        self._next()

    @property
    def over(self) -> bool:
        """Whether nothing will come any more, and all is done."""
        return self._ended and not self._world.live

    def _next(self) -> None:
        request = next(self._requests, None)
        if request is None:
            self._ended = True
        else:
            self._kernel.at(request.arrival, partial(self._send, request))

    def _send(self, request: Request) -> None:
        self._world.send(request)
        self._next()


class _Looks:
    """The timeline, thinned out as it grows."""

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
        self.looks: list[Timeline] = []
        kernel.after(every, self._look)

    def _look(self) -> None:
        now = seconds(self._kernel.now())
        self.looks.append(self._world.look(now, self._finished))
        self._finished = self._world.finished
        if self._progress is not None:
            self._progress(self._finished, now)
        if len(self.looks) == LOOKS:
            self._every = Nanos(2 * self._every)
            self.looks = [_joined(*pair) for pair in zip(self.looks[::2], self.looks[1::2], strict=True)]
        if not self._over():
            self._kernel.after(self._every, self._look)


def _joined(earlier: Timeline, later: Timeline) -> Timeline:
    return Timeline(
        seconds=later.seconds,
        running=later.running,
        queued=later.queued,
        kv_share=later.kv_share,
        finished=earlier.finished + later.finished,
    )


class _NoCycles:
    """The collector off: a run makes no cycles worth looking for, and looking takes a third of its time."""

    def __enter__(self) -> None:
        self._was_on = gc.isenabled()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self._was_on:
            gc.enable()


def _outcome(world: World, tally: Tally, end: Nanos, cpu_seconds: float) -> Outcome:
    simulated = seconds(end)
    busy: dict[str, list[float]] = {}
    gpu_seconds = cost = joules = there_all = 0.0
    preempted = 0
    for profile, had, engine in world.workers():
        worked, there = seconds(engine.busy), seconds(had)
        busy.setdefault(profile.name, []).append(worked)
        there_all += there
        gpu_seconds += profile.gpus * there
        cost += profile.gpus * there / HOUR * profile.dollars_per_hour
        joules += profile.gpus * (worked * profile.busy_watts + (there - worked) * profile.idle_watts)
        preempted += engine.preempted
    tokens = tally.prompt_tokens + tally.output_tokens
    worked_all = sum(map(sum, busy.values()))
    return Outcome(
        digest=world.digest,
        requests=tally.requests,
        refused=tally.refused,
        simulated_seconds=round(simulated, 3),
        cpu_seconds=round(cpu_seconds, 3),
        requests_per_cpu_second=round(tally.requests / cpu_seconds, 1) if cpu_seconds else 0.0,
        ttft_ms=tally.ttft.summary(),
        tpot_ms=tally.tpot.summary(),
        e2e_ms=tally.e2e.summary(),
        goodput_rps=round(tally.good / simulated, 4) if simulated else 0.0,
        attainment=round(tally.attainment, 5),
        hit_rate=round(tally.hit_rate, 5),
        imbalance=round(
            max((max(pool) * len(pool) / sum(pool) for pool in busy.values() if sum(pool)), default=0.0), 4
        ),
        utilisation=round(worked_all / there_all, 4) if there_all else 0.0,
        disaggregated=world.machine.snapshot().counters.disaggregated,
        preempted=preempted,
        moved_gb=round(world.moved_bytes / 1e9, 3),
        gpu_hours=round(gpu_seconds / HOUR, 4),
        cost=round(cost, 4),
        cost_per_million_tokens=round(cost / tokens * 1e6, 4) if tokens else 0.0,
        energy_kwh=round(joules / HOUR / 1000, 4),
        joules_per_token=round(joules / tally.output_tokens, 4) if tally.output_tokens else 0.0,
    )
