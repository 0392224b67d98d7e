"""Pools of a simulated cluster: the profile of their workers, and the nodes of these."""

from msgspec import Struct

from fleet.core.clock import Nanos
from fleet.core.ids import StoreId, WorkerId
from fleet.core.roles import Role
from fleet.sim.engine.attempts import EngineLimits, StepTimes
from fleet.sim.results.outcomes import PredictionQuality


class PoolProfile(Struct, frozen=True, kw_only=True):
    """Hardware, model and engine of the workers of one pool."""

    name: str
    role: Role
    workers: int
    times: StepTimes
    limits: EngineLimits
    gpus: int  # of one worker
    dollars_per_hour: float  # of one GPU
    busy_watts: float  # of one GPU
    idle_watts: float
    kv_bytes_per_token: float  # of one worker
    bandwidth: float  # bytes a second between a worker and others, in each direction
    link_latency: Nanos
    start_time: Nanos  # from asking for a worker to its first request
    prefill_speed: float = 1.0  # relative to the other pools
    decode_speed: float = 1.0
    gpus_per_node: int = 8
    host_bandwidth: float = 64e9  # bytes a second between a worker and its node's memory, in each direction
    gpu: str = ""
    quality: PredictionQuality = PredictionQuality()
    front: Nanos = Nanos(0)  # time of one request outside the engine: HTTP, tokenizer, scheduling
    front_per_token: float = 0.0  # additional nanoseconds for each prompt token


def worker_id_of(profile: PoolProfile, number: int) -> WorkerId:
    return WorkerId(f"{profile.name}-{number}")


def node_of(profile: PoolProfile, number: int) -> StoreId:
    """Return the node of a pool's worker, or of its first GPU if it spans several. Pools do not share nodes."""
    return StoreId(f"{profile.name}-node-{number * profile.gpus // profile.gpus_per_node}")
