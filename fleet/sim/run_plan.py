"""Run plan: converts a scenario into the profiles, store, faults and traffic of a run, and refuses impossible scenarios."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from fleet.batching.attempts import EngineLimits
from fleet.core.clock import MILLISECOND, SECOND, Nanos
from fleet.core.errors import ConfigurationRefused
from fleet.core.ids import StoreId, WorkerId
from fleet.hardware.gpus import GIB, Gpu, gpu
from fleet.hardware.latency.coefficients import StepModelEstimate, estimate
from fleet.hardware.model_configs import read_model_config
from fleet.hardware.models import ModelSizes
from fleet.hardware.power import ERROR
from fleet.hardware.sharding import ShardedModel, ShardingDegrees, shard_model
from fleet.hardware.transfers import REACHED
from fleet.router.placement.plugins import open_policy
from fleet.sim.cluster.faults import Fault, NetworkCut, NodeLost, RoleFlip, StoreLost, WorkerLost, WorkerSlow
from fleet.sim.cluster.node_store import StoreProfile
from fleet.sim.cluster.pools import PoolProfile, node_of
from fleet.sim.cluster.store_tiers import TierProfile
from fleet.sim.results.outcomes import EndedRequest, PredictionQuality
from fleet.sim.run import RunPlan, RunResult, simulate
from fleet.sim.scenario import (
    CutFault,
    FaultSection,
    NodeFault,
    RoleFlipFault,
    Scenario,
    SimulatedPoolSection,
    SimulatedStoreSection,
    SlowFault,
    StoreFault,
    WorkerFault,
    pool_name,
)
from fleet.sim.workload.clients import SessionClients, Traffic
from fleet.sim.workload.traffic import requests_of, sessions_of
from kvstore.messages import POOL_TIER

MOST_WORKERS = 10_000
MOST_NAMES = 8
"""Maximum number of names of workers or nodes that an error message lists."""


def plan(scenario: Scenario, folder: Path) -> RunPlan:
    """Return the run plan of a scenario. Paths in the scenario are relative to `folder`.

    Raises:
        ConfigurationRefused: The scenario is impossible. For example, a name in it is unknown, the model does not fit, or there are too many
            workers. The message names the field.
    """
    open_policy(scenario.router)  # the call raises an error for an unknown policy; its result is not used
    model = _model(folder / scenario.model)
    sections = list(enumerate(scenario.pools))
    profiles = [_profile(scenario, index, pool, model) for index, pool in sections]
    if (workers := sum(profile.workers for profile in profiles)) > MOST_WORKERS:
        raise ConfigurationRefused(f"pools: {workers:,} workers are more than {MOST_WORKERS:,}")
    return RunPlan(
        pools=tuple(profiles),
        router=scenario.router,
        slo=scenario.slo,
        block_tokens=scenario.engine.block_tokens,
        message_delay=Nanos(round(scenario.message_ms * MILLISECOND)),
        seed=scenario.seed,
        clients=scenario.clients,
        verbatim_answers=scenario.verbatim_answers,
        store=None if scenario.store is None else _store(scenario.store, scenario.engine.block_tokens, model),
        faults=_faults(scenario, profiles),
    )


def traffic(scenario: Scenario, folder: Path) -> Traffic:
    """Return the requests or sessions that the clients of a scenario send.

    Raises:
        ConfigurationRefused: The workload cannot be read, or does not suit the clients. For an invalid row of a trace, the
            returned iterator raises this error when it reaches the row.
    """
    made = sessions_of if isinstance(scenario.clients, SessionClients) else requests_of
    return made(scenario.workload, folder, block_tokens=scenario.engine.block_tokens, seed=scenario.seed)


def run_scenario(
    scenario: Scenario,
    folder: Path,
    *,
    on_end: Callable[[EndedRequest], None] | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> RunResult:
    """Plan and run a scenario. `simulate` explains `on_end` and `progress`, and `plan` explains `folder`.

    Raises:
        ConfigurationRefused: The scenario is impossible, or its workload cannot be read (`plan`, `traffic`).
    """
    return simulate(plan(scenario, folder), traffic(scenario, folder), on_end=on_end, progress=progress)


def _store(section: SimulatedStoreSection, block_tokens: int, model: ModelSizes) -> StoreProfile:
    block_bytes = model.kv_bytes_per_token * block_tokens

    def blocks(field: str, gib: float) -> int:
        if not (count := int(gib * GIB // block_bytes)):
            raise ConfigurationRefused(
                f"store.{field}: {gib:g} GiB hold no block: one is {block_bytes / GIB:.4f} GiB of {block_tokens} tokens"
            )
        return count

    tiers = [TierProfile(name=POOL_TIER, blocks=blocks("memory_gib", section.memory_gib), policy=section.policy)]
    if section.ssd_gib:
        tiers.append(
            TierProfile(
                name="ssd",
                blocks=blocks("ssd_gib", section.ssd_gib),
                policy=section.policy,
                admission=section.ssd_admission,
                read_bandwidth=section.ssd_read_bandwidth,
                write_bandwidth=section.ssd_write_bandwidth,
                latency=Nanos(round(section.ssd_latency_us * 1000)),
            )
        )
    if section.remote_gib:
        tiers.append(
            TierProfile(
                name="remote",
                blocks=blocks("remote_gib", section.remote_gib),
                policy=section.policy,
                read_bandwidth=section.remote_bandwidth,
                write_bandwidth=section.remote_bandwidth,
                latency=Nanos(round(section.remote_latency_us * 1000)),
                shared=True,
            )
        )
    return StoreProfile(tiers=tuple(tiers), block_bytes=block_bytes, block_tokens=block_tokens)


def _faults(scenario: Scenario, profiles: Sequence[PoolProfile]) -> tuple[Fault, ...]:
    places = [(profile, number) for profile in profiles for number in range(profile.workers)]
    workers = {WorkerId(f"{profile.name}-{number}") for profile, number in places}
    nodes = {node_of(profile, number) for profile, number in places}

    def made(index: int, section: FaultSection) -> Fault:
        at = Nanos(round(section.at_seconds * SECOND))
        if isinstance(section, NodeFault | StoreFault):
            node = StoreId(section.node)
            if node not in nodes:
                raise ConfigurationRefused(f"faults[{index}].node: {section.node!r} is not one of {_named(nodes)}")
            if isinstance(section, StoreFault) and scenario.store is None:
                raise ConfigurationRefused(f"faults[{index}].kind: there is no store to be lost; add a section [store]")
            down = Nanos(round(section.down_seconds * SECOND))
            kind = NodeLost if isinstance(section, NodeFault) else StoreLost
            return kind(at=at, node=node, down=down)
        worker = WorkerId(section.worker)
        if worker not in workers:
            raise ConfigurationRefused(f"faults[{index}].worker: {section.worker!r} is not one of {_named(workers)}")
        match section:
            case WorkerFault():
                start = None if section.start_seconds is None else Nanos(round(section.start_seconds * SECOND))
                return WorkerLost(at=at, worker=worker, down=Nanos(round(section.down_seconds * SECOND)), start=start)
            case SlowFault():
                lasting = Nanos(round(section.lasting_seconds * SECOND))
                return WorkerSlow(at=at, worker=worker, factor=section.factor, lasting=lasting)
            case CutFault():
                return NetworkCut(at=at, worker=worker, lasting=Nanos(round(section.lasting_seconds * SECOND)))
            case RoleFlipFault():
                return RoleFlip(at=at, worker=worker, role=section.role)

    return tuple(made(index, section) for index, section in enumerate(scenario.faults))


def _named(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - MOST_NAMES:,} more" if len(ordered) > MOST_NAMES else ""
    return ", ".join(ordered[:MOST_NAMES]) + more


def _model(path: Path) -> ModelSizes:
    try:
        return read_model_config(path)
    except ConfigurationRefused as error:
        raise ConfigurationRefused(f"model: {error}") from error


def _profile(scenario: Scenario, index: int, pool: SimulatedPoolSection, model: ModelSizes) -> PoolProfile:
    engine, where = scenario.engine, f"pools[{index}]"
    device = gpu(pool.gpu, f"{where}.gpu")
    degrees = ShardingDegrees(tp=pool.tp, pp=pool.pp, dp=pool.dp, ep=pool.ep)
    if pool.gpus % degrees.gpus:
        raise ConfigurationRefused(
            f"{where}.gpus: {pool.gpus} is no multiple of the {degrees.gpus} that a worker takes"
        )
    try:
        sharded = shard_model(model, device, degrees, share=engine.memory_share)
    except ConfigurationRefused as error:
        raise ConfigurationRefused(f"{where}: {error}") from error
    kv_blocks = sharded.kv_capacity_blocks(engine.block_tokens, engine.memory_share)
    if kv_blocks < 2:
        raise ConfigurationRefused(f"{where}: no room is left for KV; take more GPUs for a worker (tp)")
    best = max(_flops(other, index) for index, other in enumerate(scenario.pools))
    widest = max(gpu(other.gpu).bandwidth * other.tp * other.pp for other in scenario.pools)
    price = 0.0 if device.price is None else device.price.dollars
    estimated = estimate(sharded, engine.backend)
    return PoolProfile(
        name=pool_name(pool),
        role=pool.role,
        workers=pool.gpus // degrees.gpus,
        times=estimated.step,
        limits=EngineLimits(
            kv_blocks=kv_blocks,
            block_tokens=engine.block_tokens,
            max_running=engine.max_running,
            step_tokens=engine.step_tokens,
        ),
        gpus=degrees.gpus,
        dollars_per_hour=price if pool.dollars_per_hour is None else pool.dollars_per_hour,
        busy_watts=device.watts,
        idle_watts=device.idle_watts,
        kv_bytes_per_token=model.kv_bytes_per_token,
        bandwidth=_bandwidth(sharded),
        link_latency=Nanos(round(device.between_nodes.latency_us * 1000)),
        start_time=Nanos(round(engine.start_seconds * SECOND)),
        prefill_speed=_flops(pool, index) / best,
        decode_speed=device.bandwidth * pool.tp * pool.pp / widest,
        gpus_per_node=device.gpus_per_node,
        host_bandwidth=device.host.bandwidth * REACHED * degrees.tp * degrees.pp,
        gpu=device.id,
        quality=_quality(pool, device, estimated),
        front=Nanos(round(estimated.client.front * SECOND)),
        front_per_token=estimated.client.front_token * SECOND,
    )


def _quality(pool: SimulatedPoolSection, device: Gpu, estimated: StepModelEstimate) -> PredictionQuality:
    if pool.dollars_per_hour is not None:
        price = "as the scenario says"
    elif device.price is not None:
        price = f"{device.price.source}, {device.price.date}"
    else:
        price = "none is known: set dollars_per_hour"
    return PredictionQuality(
        basis=estimated.basis.value,
        ttft_error=estimated.ttft_error,
        tpot_error=estimated.tpot_error,
        power_error=ERROR,
        price=price,
    )


def _flops(pool: SimulatedPoolSection, index: int) -> float:
    return max(gpu(pool.gpu, f"pools[{index}].gpu").flops.values()) * pool.tp * pool.pp


def _bandwidth(sharded: ShardedModel) -> float:
    """Return the bytes per second between two workers, under the assumption that they are on different nodes.

    All GPUs of a worker send at the same time, so their bandwidths add up.
    """
    degrees = sharded.parallelism
    return sharded.gpu.between_nodes.bandwidth * REACHED * degrees.tp * degrees.pp
