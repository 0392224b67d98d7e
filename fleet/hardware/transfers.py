"""Transfers: the links over which KV moves from one engine to another, and the bytes on the busiest link.

Rules:

1. All GPUs send their parts at once, each through its own link. A transfer takes as long as the GPU that sends or receives most.
   Every rank has the latent KV of MLA, so the ranks divide it among them.
2. Large contiguous transfers reach `REACHED` of a link's data sheet.
3. Transfers on one link share its bandwidth evenly; `fleet.sim.cluster.network` simulates transfers that begin and end meanwhile.
"""

from fleet.hardware.gpus import Gpu, GpuLink
from fleet.hardware.sharding import ShardedModel

REACHED = 0.8
"""Share of a link's bandwidth that transfers reach. aiconfigurator 0.12 has 75 to 85 % for large NCCL messages on NVLink; 400 Gb/s
NICs reach more.
"""


def link_between(gpu: Gpu, *, same_node: bool) -> GpuLink:
    return gpu.in_node if same_node else gpu.between_nodes


def kv_bytes_per_link(source: ShardedModel, target: ShardedModel, tokens: int) -> float:
    """Return the bytes through the busiest link when `tokens` tokens of KV move between two replicas."""
    total = source.model.kv_bytes_per_token * tokens + source.model.kv_bytes_per_sequence
    return total / min(_lanes(source), _lanes(target))


def _lanes(placement: ShardedModel) -> int:
    """Return the number of GPUs that send or receive one sequence's KV, each its own part."""
    return placement.parallelism.tp * placement.parallelism.pp
