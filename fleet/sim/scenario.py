"""Scenarios: what a simulation is of, as an operator writes it, and the plan that follows from it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from fleet.clock import MILLISECOND, SECOND, Nanos
from fleet.config import load
from fleet.errors import ConfigurationRefused
from fleet.hardware.coefficients import estimate
from fleet.hardware.gpus import gpu
from fleet.hardware.models import Model, read_model
from fleet.hardware.placement import MEMORY_SHARE, Parallelism, Placement, place
from fleet.hardware.transfers import REACHED
from fleet.ids import WorkerId
from fleet.roles import Role
from fleet.router.settings import RouterSettings
from fleet.sim.engine import EngineLimits
from fleet.sim.results import Slo
from fleet.sim.run import Plan
from fleet.sim.workloads import Drawn, Workload
from fleet.sim.world import Fault, PoolProfile

Positive = Annotated[int, Meta(ge=1, le=1 << 31)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Share = Annotated[float, Meta(gt=0, le=1)]


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

    name: str = ""
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

    dollars_per_hour: Annotated[float, Meta(ge=0)] | None = None
    """One GPU; by default the list price that comes with the profile."""


class FaultSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker that dies, and is started again."""

    at_seconds: Seconds
    worker: Annotated[str, Meta(min_length=1)]
    """Pool's name, a dash, a number from 0."""

    down_seconds: Seconds = 10.0
    """Until it is started again; it then takes `engine.start_seconds`."""


class Scenario(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One simulation."""

    model: Annotated[str, Meta(min_length=1)]
    """Folder with a Hugging Face config.json, or that file, relative to the scenario's file."""

    pools: Annotated[tuple[PoolSection, ...], Meta(min_length=1)]
    workload: Workload = Drawn()
    engine: EngineSection = EngineSection()
    router: RouterSettings = RouterSettings()
    slo: Slo = Slo()
    faults: tuple[FaultSection, ...] = ()
    seed: Annotated[int, Meta(ge=0)] = 1
    message_ms: Annotated[float, Meta(ge=0, le=1000)] = 0.2
    """From router to worker or back."""

    def __post_init__(self) -> None:
        names = [pool_name(pool) for pool in self.pools]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise ValueError(f"pools[{index}].name: {name!r} is also that of pools[{names.index(name)}]")
        if not any(pool.role is not Role.PREFILL for pool in self.pools):
            raise ValueError("pools: prefill workers need workers of role decode or both to hand over to")


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
        ConfigurationRefused: A GPU or model is not known, or the model does not fit; names the field.
    """
    model = _model(folder / scenario.model)
    sections = list(enumerate(scenario.pools))
    profiles = [_profile(scenario, index, pool, model) for index, pool in sections]
    workers = {f"{profile.name}-{number}" for profile in profiles for number in range(profile.workers)}
    for index, fault in enumerate(scenario.faults):
        if fault.worker not in workers:
            raise ConfigurationRefused(
                f"faults[{index}].worker: {fault.worker!r} is not one of {', '.join(sorted(workers))}"
            )
    return Plan(
        pools=tuple(profiles),
        router=scenario.router,
        slo=scenario.slo,
        block_tokens=scenario.engine.block_tokens,
        message_delay=Nanos(round(scenario.message_ms * MILLISECOND)),
        seed=scenario.seed,
        faults=tuple(
            Fault(
                at=Nanos(round(fault.at_seconds * SECOND)),
                worker=WorkerId(fault.worker),
                down=Nanos(round(fault.down_seconds * SECOND)),
            )
            for fault in scenario.faults
        ),
    )


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
    return PoolProfile(
        name=pool_name(pool),
        role=pool.role,
        workers=pool.gpus // way.gpus,
        times=estimate(placement, engine.backend).step,
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
    )


def _flops(pool: PoolSection, index: int) -> float:
    return max(gpu(pool.gpu, f"pools[{index}].gpu").flops.values()) * pool.tp * pool.pp


def _bandwidth(placement: Placement) -> float:
    """Bytes a second between workers, which are taken to be in different nodes: each GPU of a stage sends its part."""
    way = placement.parallelism
    return placement.gpu.between_nodes.bandwidth * REACHED * way.tp * way.pp
