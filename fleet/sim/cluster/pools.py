"""Pools of a simulated cluster: what their workers are, and on which nodes they stand."""

from msgspec import Struct

from fleet.core.clock import Nanos
from fleet.core.ids import StoreId
from fleet.core.roles import Role
from fleet.sim.engine.attempts import EngineLimits, StepTimes
from fleet.sim.results.outcomes import PredictionQuality


class PoolProfile(Struct, frozen=True, kw_only=True):
    """Workers that are alike: what the simulation has to know of their hardware, model and engine."""

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
    bandwidth: float  # bytes a second that a worker sends to others, and gets
    link_latency: Nanos
    start_time: Nanos  # from asking for a worker to its first request
    prefill_speed: float = 1.0  # in proportion to the other pools
    decode_speed: float = 1.0
    gpus_per_node: int = 8
    host_bandwidth: float = 64e9  # bytes a second between a worker and its node's memory, each way
    gpu: str = ""
    quality: PredictionQuality = PredictionQuality()
    front: Nanos = Nanos(0)  # around the engine, of one request: HTTP, tokenizer, the scheduler's turn
    front_per_token: float = 0.0  # nanoseconds more for each token of the prompt


def node_of(profile: PoolProfile, number: int) -> StoreId:
    """The node of a pool's worker; of its first GPU, where it spans several. Pools have nodes of their own."""
    return StoreId(f"{profile.name}-node-{number * profile.gpus // profile.gpus_per_node}")
