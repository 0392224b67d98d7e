"""Transfers: finds the links over which KV moves from one engine to another, and the bytes on the busiest link.

Rules:

1. All GPUs of a replica that hold KV of a sequence send their parts of this KV at the same time, each through its own link.
   The GPU that sends or receives the most bytes determines the duration of the transfer. With MLA, every one of these
   GPUs in a pipeline stage holds the whole latent KV of the stage, so each sends only a part of it.
2. Large contiguous transfers reach the share `REACHED` of the bandwidth in a link's data sheet.
3. Transfers on one link share its bandwidth evenly. `fleet.sim.cluster.network` simulates how these shares change when
   transfers begin and end.
"""

from fleet.hardware.gpus import Gpu, GpuLink
from fleet.hardware.sharding import ShardedModel

REACHED = 0.8
"""Share of a link's bandwidth that transfers reach. The data of aiconfigurator 0.12 has 75 to 85 % for large NCCL
messages on NVLink; network cards with 400 Gb/s reach more.
"""


def link_between(gpu: Gpu, *, same_node: bool) -> GpuLink:
    return gpu.in_node if same_node else gpu.between_nodes


def kv_bytes_per_link(source: ShardedModel, target: ShardedModel, tokens: int) -> float:
    """Return the bytes through the busiest link when the KV of `tokens` tokens moves between two replicas."""
    total = source.model.kv_bytes_per_token * tokens + source.model.kv_bytes_per_sequence
    return total / min(_lanes(source), _lanes(target))


def _lanes(placement: ShardedModel) -> int:
    """Return the number of GPUs that each send or receive a part of one sequence's KV."""
    return placement.parallelism.tp * placement.parallelism.pp
