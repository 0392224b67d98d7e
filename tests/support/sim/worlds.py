"""Simulated worlds for tests: small clusters in virtual time with the production router machine, and their workloads."""

from fleet.batching.attempts import EngineLimits
from fleet.core.clock import SECOND, Nanos
from fleet.core.roles import Role
from fleet.router.settings.router import RouterSettings
from fleet.sim.cluster.faults import Fault
from fleet.sim.cluster.node_store import StoreProfile
from fleet.sim.cluster.pools import PoolProfile
from fleet.sim.kernel import Kernel
from fleet.sim.results.outcomes import EndedRequest, Slo
from fleet.sim.run import RunPlan, RunResult, simulate
from fleet.sim.workload.drawn import DrawnWorkload
from fleet.sim.workload.traffic import requests_of
from fleet.sim.world import World

BLOCK = 16


class LinearStepTimes:
    """Predicts the step times of a small model: 2 ms per step, 20 µs per prompt token, and 0.1 ms per sequence."""

    def seconds(self, prefill_tokens: float, prefill_pairs: float, decodes: float, decode_context: float) -> float:
        return 0.002 + 2e-5 * prefill_tokens + 1e-4 * decodes + 1e-8 * decode_context


def a_pool(role: Role = Role.BOTH, workers: int = 2, **limits: int) -> PoolProfile:
    given = {"kv_blocks": 400, "block_tokens": BLOCK, "max_running": 16, "step_tokens": 512, **limits}
    return PoolProfile(
        name=role.value,
        role=role,
        workers=workers,
        times=LinearStepTimes(),
        limits=EngineLimits(**given),
        gpus=1,
        dollars_per_hour=2.0,
        busy_watts=700.0,
        idle_watts=70.0,
        kv_bytes_per_token=1000.0,
        bandwidth=1e9,
        link_latency=Nanos(10_000),
        start_time=Nanos(2 * SECOND),
    )


def a_plan(
    *pools: PoolProfile,
    seed: int = 1,
    faults: tuple[Fault, ...] = (),
    store: StoreProfile | None = None,
    **router: object,
) -> RunPlan:
    return RunPlan(
        pools=pools or (a_pool(),),
        router=RouterSettings(**router),
        slo=Slo(ttft_ms=200.0, tpot_ms=20.0),
        block_tokens=BLOCK,
        message_delay=Nanos(200_000),
        seed=seed,
        faults=faults,
        store=store,
    )


def a_world(kernel: Kernel, plan: RunPlan, record=None) -> tuple[World, list[EndedRequest]]:
    """Return a simulated world and the list of its ended requests."""
    ended: list[EndedRequest] = []
    world = World(
        kernel,
        plan.pools,
        plan.router,
        seed=plan.seed,
        block_tokens=plan.block_tokens,
        message_delay=plan.message_delay,
        ended=ended.append,
        record=record,
        store=plan.store,
    )
    return world, ended


def a_run(plan: RunPlan, ended: list[EndedRequest] | None = None, **drawn: object) -> RunResult:
    workload = DrawnWorkload(**{"requests": 200, "rate": 20.0, "prompt_tokens": 300, "output_tokens": 40, **drawn})
    requests = requests_of(workload, None, block_tokens=BLOCK, seed=plan.seed)
    return simulate(plan, requests, on_end=None if ended is None else ended.append)
