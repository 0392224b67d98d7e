"""How long KV takes from one engine to another.

Rules:

1. Every GPU sends what it holds through a link of its own, all at once; a transfer takes as long as the GPU that sends or
   receives most. Latent KV (MLA) is on every rank, so ranks share it out among them.
2. A link reaches `REACHED` of its data sheet with large contiguous transfers.
3. Transfers on one link share it evenly; those that come and go in between are `fleet.sim.cluster.network`'s.
"""

from fleet.core.clock import SECOND, Nanos
from fleet.hardware.gpus import Gpu, GpuLink
from fleet.hardware.sharding import ShardedModel

REACHED = 0.8
"""Of a link's bandwidth; aiconfigurator 0.12 has large NCCL messages at 75 to 85 % of NVLink's, and 400 Gb/s NICs do better."""


def transfer_time(num_bytes: float, link: GpuLink, sharers: int = 1) -> Nanos:
    """Time of one transfer while `sharers` of them, itself included, are on the link all the time."""
    assert num_bytes >= 0, num_bytes
    assert sharers >= 1, sharers
    if not num_bytes:
        return Nanos(0)
    return Nanos(int(link.latency_us * 1000 + num_bytes * sharers / (link.bandwidth * REACHED) * SECOND))


def link_between(gpu: Gpu, *, same_node: bool) -> GpuLink:
    return gpu.in_node if same_node else gpu.between_nodes


def kv_bytes_per_link(source: ShardedModel, target: ShardedModel, tokens: int) -> float:
    """Bytes through the busiest link when the KV of so many tokens of one sequence moves between two replicas."""
    total = source.model.kv_bytes_per_token * tokens + source.model.kv_bytes_per_sequence
    return total / min(_lanes(source), _lanes(target))


def _lanes(placement: ShardedModel) -> int:
    """GPUs that can send or receive one sequence's KV, each its own part."""
    return placement.parallelism.tp * placement.parallelism.pp
