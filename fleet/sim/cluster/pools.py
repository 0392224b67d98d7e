"""Pools of a simulated cluster: the profile of the workers in a pool, and the assignment of workers to nodes."""

from msgspec import Struct

from fleet.batching.attempts import EngineLimits, StepTimes
from fleet.core.clock import Nanos
from fleet.core.ids import StoreId, WorkerId
from fleet.core.roles import Role
from fleet.sim.results.outcomes import PredictionQuality


class PoolProfile(Struct, frozen=True, kw_only=True):
    """Describes the equal workers of one pool: their GPUs, prices, step times, limits and bandwidths."""

    name: str
    role: Role
    workers: int
    times: StepTimes
    limits: EngineLimits
    gpus: int  # GPUs of one worker
    dollars_per_hour: float  # dollars per hour of one GPU
    busy_watts: float  # power limit of one GPU, in watts; a step draws a share of it (`fleet.hardware.power`)
    idle_watts: float
    kv_bytes_per_token: float  # bytes of KV for each token, without the copies that several GPUs of a worker hold
    bandwidth: float  # bytes per second between a worker and other nodes, in each direction
    link_latency: Nanos
    start_time: Nanos  # time from the start of a worker until the worker can serve its first request
    prefill_speed: float = 1.0  # prefill speed of a worker, divided by that of a worker of the fastest pool
    decode_speed: float = 1.0
    gpus_per_node: int = 8
    host_bandwidth: float = 64e9  # bytes per second between a worker and its node's memory, in each direction
    gpu: str = ""
    quality: PredictionQuality = PredictionQuality()
    front: Nanos = Nanos(0)  # time that each request spends outside the engine: HTTP, tokenizer, scheduling
    front_per_token: float = 0.0  # nanoseconds that each prompt token adds to `front`


def worker_id_of(profile: PoolProfile, number: int) -> WorkerId:
    return WorkerId(f"{profile.name}-{number}")


def node_of(profile: PoolProfile, number: int) -> StoreId:
    """Return the node of a worker; if the worker spans several nodes, return the node of its first GPU.

    Pools do not share nodes.
    """
    return StoreId(f"{profile.name}-node-{number * profile.gpus // profile.gpus_per_node}")
