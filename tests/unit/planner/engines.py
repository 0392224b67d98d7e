"""Engines of real models and GPUs for tests of the planner."""

from functools import cache

from fleet.hardware.gpus import gpu
from fleet.hardware.known_models import model_by_repository
from fleet.hardware.latency.coefficients import estimate
from fleet.hardware.latency.open_loop import EngineReplica
from fleet.hardware.latency.prediction import BUDGET_TOKENS
from fleet.hardware.sharding import ShardingDegrees, shard_model
from fleet.planner.sizing.capacity import PoolEngine

MODEL = "meta-llama/Llama-3.1-8B-Instruct"


@cache
def engine(gpu_name: str = "h100", tp: int = 1, model: str = MODEL) -> PoolEngine:
    known = model_by_repository(model)
    assert known is not None
    placement = shard_model(known.model, gpu(gpu_name), ShardingDegrees(tp=tp))
    estimated = estimate(placement, "vllm")
    return PoolEngine(
        engine=EngineReplica(
            step=estimated.step,
            client=estimated.client,
            capacity_tokens=placement.kv_capacity_tokens(),
            most_running=256,
            budget_tokens=BUDGET_TOKENS,
        )
    )
