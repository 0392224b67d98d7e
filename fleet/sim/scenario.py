"""Scenarios: what a simulation is of, as an operator writes it, and the plan that follows from it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, structs

from fleet.adapters.router_policies import open_policy
from fleet.clock import MILLISECOND, SECOND, Nanos
from fleet.config import load
from fleet.errors import ConfigurationRefused
from fleet.hardware.coefficients import Estimate, estimate
from fleet.hardware.gpus import GIB, Gpu, gpu
from fleet.hardware.models import Model, read_model
from fleet.hardware.placement import MEMORY_SHARE, Parallelism, Placement, place
from fleet.hardware.power import ERROR
from fleet.hardware.transfers import REACHED
from fleet.ids import StoreId, WorkerId
from fleet.roles import Role
from fleet.router.settings import RouterSettings
from fleet.sim.clients import ClientSection, Closed, Open, Sessions, Traffic
from fleet.sim.engine import EngineLimits
from fleet.sim.faults import Fault, NetworkCut, NodeLost, RoleFlip, StoreLost, WorkerLost, WorkerSlow
from fleet.sim.pools import PoolProfile, node_of
from fleet.sim.results import Ended, Quality, Slo
from fleet.sim.run import Plan, Run, simulate
from fleet.sim.store import StoreProfile, TierProfile
from fleet.sim.workloads import Drawn, Recorded, Workload, requests_of, sessions_of
from kvstore.eviction.policies import PolicyName
from kvstore.messages import POOL_TIER

Positive = Annotated[int, Meta(ge=1, le=1 << 31)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Share = Annotated[float, Meta(gt=0, le=1)]
Gib = Annotated[float, Meta(ge=0, le=1e9)]
Bandwidth = Annotated[float, Meta(ge=1, le=1e15)]
Microseconds = Annotated[float, Meta(ge=0, le=1e9)]
FileName = Annotated[str, Meta(min_length=1, pattern=r"^[^\x00]+$")]

MOST_WORKERS = 10_000
SHOWN = 8
"""Names of workers or nodes in a refusal."""


class EngineSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All engines; defaults are vLLM's where it has any."""

    backend: Literal["vllm", "sglang", "trtllm"] = "vllm"
    """Whose measured efficiencies count."""

    block_tokens: Positive = 512
    """Of a KV block; that of the trace."""

    max_running: Positive = 256
    """Sequences in one batch."""

    step_tokens: Positive = 8192
    """Tokens of one step: prompts come in chunks of what the running sequences leave of it."""

    memory_share: Share = MEMORY_SHARE
    """Of a GPU's memory that weights, activations and KV take."""

    start_seconds: Seconds = 120.0
    """From starting a worker to its first request: loading weights and capturing graphs."""


class PoolSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Workers that are alike."""

    name: Annotated[str, Meta(max_length=100, pattern=r"^[^\x00-\x1f\x7f]*$")] = ""
    """In results; empty: role and GPU."""

    role: Role = Role.BOTH
    gpu: Annotated[str, Meta(min_length=1)]
    """Short name: `fleet hardware list`."""

    gpus: Positive
    """All together; each worker takes as many as its parallelism says."""

    tp: Positive = 1
    pp: Positive = 1
    dp: Positive = 1
    ep: Positive = 1

    dollars_per_hour: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    """One GPU; by default the list price that comes with the profile."""


class StoreSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A KV store on every node; without this section there is none."""

    memory_gib: Annotated[float, Meta(gt=0, le=1e9)]
    """Of a node's memory, the pool."""

    policy: PolicyName = "lru"
    """Which blocks go first, in all tiers."""

    ssd_gib: Gib = 0.0
    """Of a node's disks; 0: none."""

    ssd_read_bandwidth: Bandwidth = 6.8e9
    ssd_write_bandwidth: Bandwidth = 4.0e9
    ssd_latency_us: Microseconds = 100.0
    """Bytes a second of all disks of a node together; the defaults are about one data-centre disk of PCIe 4 by its data sheet."""

    ssd_admission: Literal["all", "reuse"] = "reuse"
    """Which blocks are written to disk: all, or those that were seen before."""

    remote_gib: Gib = 0.0
    """Of one store for all nodes (Redis, S3, a file system); 0: none."""

    remote_bandwidth: Bandwidth = 10e9
    remote_latency_us: Microseconds = 500.0
    """Bytes a second that one node reads from it, and as many that it writes."""


class WorkerFault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="worker"):
    """A worker dies, and is started again."""

    at_seconds: Seconds
    worker: Annotated[str, Meta(min_length=1)]
    """Pool's name, a dash, a number from 0."""

    down_seconds: Seconds = 10.0
    """Until it is started again."""

    start_seconds: Seconds | None = None
    """That it then takes; by default `engine.start_seconds`."""


class NodeFault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="node"):
    """A node dies with its workers and its store's memory, and is started again."""

    at_seconds: Seconds
    node: Annotated[str, Meta(min_length=1)]
    """Pool's name, `-node-`, a number from 0; a pool's workers fill nodes of `gpus_per_node`."""

    down_seconds: Seconds = 60.0


class SlowFault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="slow"):
    """A worker takes `factor` times as long for each step."""

    at_seconds: Seconds
    worker: Annotated[str, Meta(min_length=1)]
    factor: Annotated[float, Meta(ge=1e-3, le=1e6)] = 3.0
    lasting_seconds: Seconds = 60.0


class CutFault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="cut"):
    """Nothing passes between a worker and the router."""

    at_seconds: Seconds
    worker: Annotated[str, Meta(min_length=1)]
    lasting_seconds: Seconds = 10.0


class StoreFault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="store"):
    """The store of a node dies with what it had in memory, and is started again."""

    at_seconds: Seconds
    node: Annotated[str, Meta(min_length=1)]
    down_seconds: Seconds = 10.0


class Flip(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="flip"):
    """A worker drains, and goes on in another role."""

    at_seconds: Seconds
    worker: Annotated[str, Meta(min_length=1)]
    role: Role


FaultSection = WorkerFault | NodeFault | SlowFault | CutFault | StoreFault | Flip
"""What happens to a cluster."""


class Scenario(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One simulation."""

    model: FileName
    """Folder with a Hugging Face config.json, or that file, relative to the scenario's file."""

    pools: Annotated[tuple[PoolSection, ...], Meta(min_length=1)]
    workload: Workload = Drawn()
    clients: ClientSection = Open()
    engine: EngineSection = EngineSection()
    router: RouterSettings = RouterSettings()
    slo: Slo = Slo()
    store: StoreSection | None = None
    faults: tuple[FaultSection, ...] = ()
    seed: Annotated[int, Meta(ge=0)] = 1
    message_ms: Annotated[float, Meta(ge=0, le=1000)] = 0.2
    """From router to worker or back."""

    verbatim_answers: bool = False
    """Whether the next turn of a conversation repeats the answer before it token by token, so that its blocks are found in a
    cache. A trace does not say; where thoughts are dropped, or answers edited, it is not so."""

    def __post_init__(self) -> None:
        names = [pool_name(pool) for pool in self.pools]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise ValueError(f"pools[{index}].name: {name!r} is also that of pools[{names.index(name)}]")
        if not any(pool.role is not Role.PREFILL for pool in self.pools):
            raise ValueError("pools: prefill workers need workers of role decode or both to hand over to")
        deadline_ms = 1000 * self.clients.deadline_seconds
        if 0 < deadline_ms < self.slo.ttft_ms:
            raise ValueError(
                f"slo.ttft_ms: {self.slo.ttft_ms:g} is more than clients.deadline_seconds: nobody would wait so long"
            )
        if isinstance(self.clients, Sessions) and not self.clients.users and isinstance(self.workload, Recorded):
            raise ValueError("clients.users: 0 needs sessions that say when they begin, which a trace does not")


def read_scenario(path: Path, changes: Mapping[str, Any] | None = None) -> Scenario:
    """The scenario in a TOML file, with some of its fields changed.

    Raises:
        ConfigurationRefused: It cannot be read; names file and field.
    """
    return load(path, Scenario, changes)


def pool_name(pool: PoolSection) -> str:
    return pool.name or f"{pool.role.value}-{pool.gpu}"


def plan(scenario: Scenario, folder: Path) -> Plan:
    """What follows from a scenario.

    Args:
        scenario: As it was read.
        folder: That its paths are relative to.

    Raises:
        ConfigurationRefused: A GPU, model or policy is not known, or the model does not fit; names the field.
    """
    open_policy(scenario.router)  # an unknown one is refused here, before anything runs
    model = _model(folder / scenario.model)
    sections = list(enumerate(scenario.pools))
    profiles = [_profile(scenario, index, pool, model) for index, pool in sections]
    if (workers := sum(profile.workers for profile in profiles)) > MOST_WORKERS:
        raise ConfigurationRefused(f"pools: {workers:,} workers are more than {MOST_WORKERS:,}")
    return Plan(
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


def _store(section: StoreSection, block_tokens: int, model: Model) -> StoreProfile:
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
            case Flip():
                return RoleFlip(at=at, worker=worker, role=section.role)

    return tuple(made(index, section) for index, section in enumerate(scenario.faults))


def _named(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - SHOWN:,} more" if len(ordered) > SHOWN else ""
    return ", ".join(ordered[:SHOWN]) + more


def traffic(scenario: Scenario, folder: Path) -> Traffic:
    """What a scenario's clients send.

    Args:
        scenario: As it was read.
        folder: That its paths are relative to.

    Raises:
        ConfigurationRefused: It cannot be read, or these clients cannot send it. A wrong row further down is refused when it
            is reached.
    """
    made = sessions_of if isinstance(scenario.clients, Sessions) else requests_of
    return made(scenario.workload, folder, block_tokens=scenario.engine.block_tokens, seed=scenario.seed)


def scaled(scenario: Scenario, load: float) -> Scenario:
    """The same with so many times the load: the rate of arrivals, or of clients that wait for answers their number."""
    clients, workload = scenario.clients, scenario.workload
    if users := waiting_users(scenario):
        return structs.replace(scenario, clients=structs.replace(clients, users=max(1, round(users * load))))
    if isinstance(workload, Drawn):
        return structs.replace(scenario, workload=structs.replace(workload, rate=workload.rate * load))
    return structs.replace(scenario, workload=structs.replace(workload, speed=workload.speed * load))


def waiting_users(scenario: Scenario) -> int:
    """Clients that wait for answers before they send more; 0: they come at a rate."""
    return scenario.clients.users if isinstance(scenario.clients, Closed | Sessions) else 0


def run_scenario(
    scenario: Scenario,
    folder: Path,
    *,
    told: Callable[[Ended], None] | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> Run:
    """Plan it and run it; for the arguments and what is raised, see `plan`, `traffic` and `simulate`."""
    return simulate(plan(scenario, folder), traffic(scenario, folder), told=told, progress=progress)


def _model(path: Path) -> Model:
    file = path / "config.json" if path.is_dir() else path
    try:
        config = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ConfigurationRefused(f"model: {file}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ConfigurationRefused(f"model: {file}: {error}") from error
    return read_model(config, name=path.stem if path.is_file() else path.name)


def _profile(scenario: Scenario, index: int, pool: PoolSection, model: Model) -> PoolProfile:
    engine, where = scenario.engine, f"pools[{index}]"
    device = gpu(pool.gpu, f"{where}.gpu")
    way = Parallelism(tp=pool.tp, pp=pool.pp, dp=pool.dp, ep=pool.ep)
    if pool.gpus % way.gpus:
        raise ConfigurationRefused(f"{where}.gpus: {pool.gpus} is no multiple of the {way.gpus} that a worker takes")
    try:
        placement = place(model, device, way, share=engine.memory_share)
    except ConfigurationRefused as error:
        raise ConfigurationRefused(f"{where}: {error}") from error
    kv_blocks = placement.kv_capacity_blocks(engine.block_tokens, engine.memory_share)
    if kv_blocks < 2:
        raise ConfigurationRefused(f"{where}: no room is left for KV; take more GPUs for a worker (tp)")
    best = max(_flops(other, index) for index, other in enumerate(scenario.pools))
    widest = max(gpu(other.gpu).bandwidth * other.tp * other.pp for other in scenario.pools)
    price = 0.0 if device.price is None else device.price.dollars
    estimated = estimate(placement, engine.backend)
    return PoolProfile(
        name=pool_name(pool),
        role=pool.role,
        workers=pool.gpus // way.gpus,
        times=estimated.step,
        limits=EngineLimits(
            kv_blocks=kv_blocks,
            block_tokens=engine.block_tokens,
            max_running=engine.max_running,
            step_tokens=engine.step_tokens,
        ),
        gpus=way.gpus,
        dollars_per_hour=price if pool.dollars_per_hour is None else pool.dollars_per_hour,
        busy_watts=device.watts,
        idle_watts=device.idle_watts,
        kv_bytes_per_token=model.kv_bytes_per_token,
        bandwidth=_bandwidth(placement),
        link_latency=Nanos(round(device.between_nodes.latency_us * 1000)),
        start_time=Nanos(round(engine.start_seconds * SECOND)),
        prefill_speed=_flops(pool, index) / best,
        decode_speed=device.bandwidth * pool.tp * pool.pp / widest,
        gpus_per_node=device.gpus_per_node,
        host_bandwidth=device.host.bandwidth * REACHED * way.tp * way.pp,
        gpu=device.id,
        quality=_quality(pool, device, estimated),
        front=Nanos(round(estimated.client.front * SECOND)),
        front_per_token=estimated.client.front_token * SECOND,
    )


def _quality(pool: PoolSection, device: Gpu, estimated: Estimate) -> Quality:
    if pool.dollars_per_hour is not None:
        price = "as the scenario says"
    elif device.price is not None:
        price = f"{device.price.source}, {device.price.date}"
    else:
        price = "none is known: set dollars_per_hour"
    return Quality(
        basis=estimated.basis.value,
        ttft_error=estimated.ttft_error,
        tpot_error=estimated.tpot_error,
        power_error=ERROR,
        price=price,
    )


def _flops(pool: PoolSection, index: int) -> float:
    return max(gpu(pool.gpu, f"pools[{index}].gpu").flops.values()) * pool.tp * pool.pp


def _bandwidth(placement: Placement) -> float:
    """Bytes a second between workers, which are taken to be in different nodes: each GPU of a stage sends its part."""
    way = placement.parallelism
    return placement.gpu.between_nodes.bandwidth * REACHED * way.tp * way.pp
