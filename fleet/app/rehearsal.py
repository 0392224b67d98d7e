"""Rehearsal: tries plans in the simulator, in a separate process (`python -m fleet.app.rehearsal`).

`fleet.planner.loop` rehearses plans through the port `fleet.planner.ports.Rehearsal`, and may hold back a plan that
shrinks pools (rule 5 of that module).

Rules:

1. The recent requests arrive in their recorded pattern, scaled to the rate that the plan is made for. If they do not
   last for `HORIZON` seconds, they are repeated with other block names, so that no cache has the repeated prompts.
2. If two recent prompts shared blocks, they also share them in the simulation. The caches of the simulated workers are
   empty at the beginning, so the predicted TTFT is too high rather than too low.
3. The simulated router refuses requests as the real one does: if they would wait longer than `max_queue_seconds`. The
   planner does not know the settings of the routers, so its own settings state this limit (`RehearsalSettings`). Refused
   requests miss the goals, and the predicted latencies are those of the answered ones.
4. The process runs with a lower priority than the planner, and with at most `MOST_BYTES` of memory where the system has
   such a limit. When the planner does not wait for the result any more, the process is killed.
"""

import asyncio
import os
import resource
import sys
from asyncio.subprocess import PIPE
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise

import msgspec
from msgspec import Struct

from fleet.app.planner_engines import pool_engine
from fleet.batching.attempts import EngineLimits
from fleet.core.clock import MILLISECOND, SECOND, Nanos
from fleet.core.errors import ConfigurationRefused
from fleet.core.roles import Role
from fleet.core.system_clock import SystemClock
from fleet.planner.decisions import PlanGoals, PlannedPool
from fleet.planner.demand import RecentRequest
from fleet.planner.messages import PoolName
from fleet.planner.ports import PoolsPrediction, RehearsalResult, RehearsalSkipped
from fleet.planner.settings import PlannerSettings
from fleet.planner.sizing.capacity import PoolEngine
from fleet.router.settings.router import RouterSettings
from fleet.sim.cluster.pools import PoolProfile
from fleet.sim.results.outcomes import Slo
from fleet.sim.run import RunPlan, simulate
from kvstore.eviction.trace_replay import TraceRequest

LEAST_REQUESTS = 20
MOST_REQUESTS = 3000
# Minimum duration of a rehearsal in simulated seconds (rule 1). A rehearsal is shorter if `MOST_REQUESTS` arrive in less time.
# This is also the TTFT that is predicted if no request is answered. If no replica can decode, it is the predicted TPOT too.
HORIZON = 60.0
BLOCK_TOKENS = 32
NICE = 10
MOST_BYTES = 2 << 30
"""Maximum memory of the rehearsal process (rule 4). It needs 1.3 GB for `MOST_REQUESTS` prompts of 50,000 tokens that share no
block; with longer ones it needs more than the usual 10 s, too."""

MAX_QUEUE_SECONDS = RouterSettings().max_queue_seconds
"""Limit of the simulated router if the settings of the planner do not state it: the default of routers (rule 3)."""

LINK = 10e9
"""Assumed bytes per second between two workers. Any value gives the same results: `_profile` computes the bytes of a token
from it, so that a transfer takes the time that the settings of the engine state."""


class RehearsedPool(Struct, frozen=True, kw_only=True):
    """A pool whose plan is rehearsed, with the step times and limits of its engines."""

    pool: PlannedPool
    engine: PoolEngine


class RehearsalTask(Struct, frozen=True, kw_only=True):
    """Input of the rehearsal process: the pools and goals, the recent requests, and the present and planned replicas."""

    pools: tuple[RehearsedPool, ...]
    goals: PlanGoals
    max_queue_seconds: float
    sample: tuple[RecentRequest, ...]
    rate: float
    present: dict[PoolName, int]
    planned: dict[PoolName, int]


class SimulatedRehearsal:
    """Rehearses plans by a simulation in a separate process. Implements `fleet.planner.ports.Rehearsal`."""

    def __init__(
        self, pools: tuple[RehearsedPool, ...], goals: PlanGoals, max_queue_seconds: float = MAX_QUEUE_SECONDS
    ) -> None:
        self._pools = pools
        self._goals = goals
        self._max_queue_seconds = max_queue_seconds

    async def rehearse(
        self,
        sample: Sequence[RecentRequest],
        rate: float,
        present: Mapping[PoolName, int],
        planned: Mapping[PoolName, int],
    ) -> RehearsalResult:
        if len(sample) < LEAST_REQUESTS:
            raise RehearsalSkipped(f"{len(sample)} recent requests are known, and it takes {LEAST_REQUESTS}")
        if rate <= 0:
            raise RehearsalSkipped("no requests arrive")
        task = RehearsalTask(
            pools=self._pools,
            goals=self._goals,
            max_queue_seconds=self._max_queue_seconds,
            sample=tuple(sample),
            rate=rate,
            present=dict(present),
            planned=dict(planned),
        )
        try:
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "fleet.app.rehearsal", stdin=PIPE, stdout=PIPE, stderr=PIPE
            )
        except OSError as error:
            raise RehearsalSkipped(f"the simulator cannot be started: {error.strerror}") from error
        try:
            output, errors = await child.communicate(msgspec.json.encode(task))
        except RuntimeError as error:  # uvloop raises this if the process has ended and its pipe is closed
            raise RehearsalSkipped(
                f"the simulator ended before it read its task: status {await child.wait()}"
            ) from error
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
        try:
            return msgspec.json.decode(output, type=RehearsalResult)
        except msgspec.DecodeError as error:
            last = errors.decode(errors="replace").strip().rpartition("\n")[2]
            raise RehearsalSkipped(f"the simulator failed: {last or f'status {child.returncode}'}") from error


def rehearsal_of(settings: PlannerSettings) -> SimulatedRehearsal | None:
    """Return the object that rehearses plans. Return None if the settings disable it, or name no engine for one of the pools.

    Raises:
        ConfigurationRefused: An engine's model or GPU is not known, or the model does not fit the GPUs.
    """
    if not settings.rehearsal.enabled or any(pool.name not in settings.engines for pool in settings.pools):
        return None
    pools = tuple(RehearsedPool(pool=pool, engine=pool_engine(settings, pool)) for pool in settings.pools)
    limit = settings.rehearsal.max_queue_seconds
    return SimulatedRehearsal(pools, settings.goals, MAX_QUEUE_SECONDS if limit is None else limit)


def rehearsed(task: RehearsalTask) -> RehearsalResult:
    """Simulate the requests with the present and with the planned replicas, and return both results."""
    clock = SystemClock()
    began = clock.now()
    traffic = tuple(_traffic(task))
    present = _predict(task, task.present, traffic)
    planned = _predict(task, task.planned, traffic)
    seconds = (clock.now() - began) / SECOND
    return RehearsalResult(present=present, planned=planned, requests=len(traffic), seconds=seconds)


def _traffic(task: RehearsalTask) -> Iterator[TraceRequest]:
    """Yield the requests of the rehearsal: the recent ones, scaled to the rate of the task and repeated (rule 1)."""
    sample = task.sample
    gaps = [max(0, later.arrived - earlier.arrived) for earlier, later in pairwise(sample)]
    mean = sum(gaps) / max(1, len(gaps))
    scale = SECOND / task.rate / mean if mean else 0.0
    count = min(MOST_REQUESTS, max(len(sample), round(HORIZON * task.rate)))
    at, fresh = 0.0, -1
    for number in range(count):
        again, index = divmod(number, len(sample))
        request = sample[index]
        blocks = max(1, -(-request.prompt_tokens // BLOCK_TOKENS))
        shared = _shared(request, blocks, again)
        unknown = tuple(range(fresh, fresh - (blocks - len(shared)), -1))
        fresh -= len(unknown)
        yield TraceRequest(Nanos(round(at)), request.prompt_tokens, shared + unknown, max(1, request.answer_tokens))
        at += gaps[index] * scale if mean and index < len(gaps) else SECOND / task.rate


def _shared(request: RecentRequest, blocks: int, again: int) -> tuple[int, ...]:
    """Return names for those blocks of a prompt whose block keys are known, in the block size of the simulation.

    A block key stands for the whole prompt up to the end of its block. So a block of the simulation is named by the
    first block key that covers all of its tokens.

    `again` is the number of the repetition. Each repetition gets other names (rule 1).
    """
    if not request.block_tokens:
        return ()
    keys = request.block_keys
    covered = min(blocks, len(keys) * request.block_tokens // BLOCK_TOKENS)
    last = (-(-(at + 1) * BLOCK_TOKENS // request.block_tokens) - 1 for at in range(covered))
    return tuple((keys[index] ^ (again << 8)) * 64 + at % 64 for at, index in enumerate(last))


def _predict(task: RehearsalTask, replicas: Mapping[PoolName, int], traffic: Sequence[TraceRequest]) -> PoolsPrediction:
    held = [(each, replicas.get(each.pool.name, 0)) for each in task.pools]
    gpus = float(sum(count * each.pool.replica_gpus for each, count in held))
    dollars = sum(count * each.pool.replica_dollars for each, count in held)
    if not any(count and each.pool.role is not Role.PREFILL for each, count in held):
        longest = HORIZON
        return PoolsPrediction(
            ttft_seconds=longest, tpot_seconds=longest, attainment=0.0, refused=1.0, gpu_hours=gpus, dollars=dollars
        )
    goals = task.goals
    plan = RunPlan(
        pools=tuple(_profile(each, count) for each, count in held if count),
        router=RouterSettings(max_queue_seconds=task.max_queue_seconds),
        slo=Slo(ttft_ms=1000 * goals.ttft_seconds, tpot_ms=1000 * goals.tpot_seconds),
        block_tokens=BLOCK_TOKENS,
        message_delay=Nanos(MILLISECOND // 4),
        seed=1,
    )
    totals = simulate(plan, iter(traffic)).totals
    return PoolsPrediction(
        ttft_seconds=totals.ttft.quantile(goals.percentile) / 1000 if totals.ttft.count else HORIZON,
        tpot_seconds=totals.tpot.quantile(goals.percentile) / 1000 if totals.tpot.count else 0.0,
        attainment=totals.attainment,
        refused=sum(totals.refused.values()) / max(1, totals.requests),
        gpu_hours=gpus,
        dollars=dollars,
    )


def _profile(each: RehearsedPool, workers: int) -> PoolProfile:
    engine, pool = each.engine.engine, each.pool
    return PoolProfile(
        name=pool.name,
        role=pool.role,
        workers=workers,
        times=engine.step,
        limits=EngineLimits(
            kv_blocks=max(1, int(engine.capacity_tokens // BLOCK_TOKENS)),
            block_tokens=BLOCK_TOKENS,
            max_running=int(engine.most_running),
            step_tokens=int(engine.budget_tokens),
        ),
        gpus=pool.gpus,
        dollars_per_hour=pool.dollars_per_hour,
        busy_watts=0.0,
        idle_watts=0.0,
        kv_bytes_per_token=each.engine.transfer_token * LINK,
        bandwidth=LINK,
        link_latency=Nanos(round(each.engine.transfer_base * SECOND)),
        start_time=Nanos(round(pool.start_seconds * SECOND)),
        gpu=pool.gpu,
    )


def _limit_memory() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = MOST_BYTES if most == resource.RLIM_INFINITY else min(MOST_BYTES, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, most))


def _main() -> int:
    os.nice(NICE)
    with suppress(OSError, ValueError):  # the system has no such limit
        _limit_memory()
    try:
        task = msgspec.json.decode(sys.stdin.buffer.read(), type=RehearsalTask)
        found = rehearsed(task)
    except (msgspec.DecodeError, ConfigurationRefused) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except MemoryError:
        sys.stderr.write(f"it needs more than {MOST_BYTES >> 20} MiB of memory\n")
        return 1
    sys.stdout.buffer.write(msgspec.json.encode(found))
    return 0


if __name__ == "__main__":
    sys.exit(_main())
