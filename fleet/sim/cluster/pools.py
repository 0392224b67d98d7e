"""Pools of a simulated cluster: the profile of their workers, and the assignment of workers to nodes."""

from msgspec import Struct

from fleet.batching.attempts import EngineLimits, StepTimes
from fleet.core.clock import Nanos
from fleet.core.ids import StoreId, WorkerId
from fleet.core.roles import Role
from fleet.sim.results.outcomes import PredictionQuality


class PoolProfile(Struct, frozen=True, kw_only=True):
    """Hardware, model and engine of the workers of one pool."""

    name: str
    role: Role
    workers: int
    times: StepTimes
    limits: EngineLimits
    gpus: int  # GPUs of one worker
    dollars_per_hour: float  # price of one GPU
    busy_watts: float  # power of one GPU in a step
    idle_watts: float
    kv_bytes_per_token: float  # summed over the GPUs of one worker
    bandwidth: float  # bytes per second between a worker and other nodes, in each direction
    link_latency: Nanos
    start_time: Nanos  # time from starting a worker until it can serve its first request
    prefill_speed: float = 1.0  # speed relative to the pool with the fastest GPUs; 1: as fast as that pool
    decode_speed: float = 1.0
    gpus_per_node: int = 8
    host_bandwidth: float = 64e9  # bytes per second between a worker and its node's memory, in each direction
    gpu: str = ""
    quality: PredictionQuality = PredictionQuality()
    front: Nanos = Nanos(0)  # time of one request outside the engine: HTTP, tokenizer, scheduling
    front_per_token: float = 0.0  # additional nanoseconds for each prompt token


def worker_id_of(profile: PoolProfile, number: int) -> WorkerId:
    return WorkerId(f"{profile.name}-{number}")


def node_of(profile: PoolProfile, number: int) -> StoreId:
    """Return the node of a pool's worker, or of its first GPU if it spans several. Pools do not share nodes."""
    return StoreId(f"{profile.name}-node-{number * profile.gpus // profile.gpus_per_node}")
