"""Engines of planned pools: computes the step times and limits of one replica from the settings of a planner."""

from pathlib import Path

from fleet.core.errors import ConfigurationRefused
from fleet.hardware.gpus import gpu
from fleet.hardware.known_models import model_by_repository
from fleet.hardware.latency.coefficients import estimate
from fleet.hardware.latency.linear import EngineLatency
from fleet.hardware.latency.open_loop import EngineReplica
from fleet.hardware.model_configs import read_model_config
from fleet.hardware.sharding import ShardingDegrees, shard_model
from fleet.planner.decisions import PlannedPool
from fleet.planner.settings import GpuEngineSettings, LinearEngineSettings, PlannerSettings
from fleet.planner.sizing.capacity import PoolEngine, linear_engine


def pool_engine(settings: PlannerSettings, pool: PlannedPool) -> PoolEngine:
    """Return the step times and limits of the engine that one replica of a pool runs.

    Raises:
        ConfigurationRefused: The model or the GPU is not known, or the model does not fit the GPUs.
    """
    engine = settings.engines[pool.name]
    match engine:
        case LinearEngineSettings():
            return linear_engine(
                _faster(engine),
                pool.role,
                capacity_tokens=engine.kv_tokens,
                most_running=engine.max_running,
                budget_tokens=engine.step_tokens,
                kv_bytes_per_token=engine.bytes_per_token,
            )
        case GpuEngineSettings():
            return _gpu_engine(engine, pool)


def _faster(engine: LinearEngineSettings) -> EngineLatency:
    """Return the latencies in the settings of an engine, each divided by the speed-up in these settings."""
    latency = engine.latency
    divided = {name: getattr(latency, name) / engine.speedup for name in EngineLatency.__struct_fields__}
    return EngineLatency(**divided)


def _gpu_engine(engine: GpuEngineSettings, pool: PlannedPool) -> PoolEngine:
    try:
        known = model_by_repository(engine.model)
        model = known.model if known is not None else read_model_config(Path(engine.model))
        degrees = ShardingDegrees(tp=engine.tp, pp=engine.pp, dp=engine.dp, ep=engine.ep)
        placement = shard_model(model, gpu(pool.gpu, "gpu"), degrees)
        estimated = estimate(placement, engine.backend)
    except ConfigurationRefused as error:
        raise ConfigurationRefused(f"engines.{pool.name}: {error}") from error
    return PoolEngine(
        engine=EngineReplica(
            step=estimated.step,
            client=estimated.client,
            capacity_tokens=placement.kv_capacity_tokens(),
            most_running=engine.max_running,
            budget_tokens=engine.step_tokens,
        )
    )
