"""Step model: computes the duration of an engine step on a real GPU from the values that are read, multiplied and sent.

Rules:

1. `work` computes how long each part of a step would take at the speeds in the GPU's data sheet. `Efficiency` says
   which share of these speeds an engine reaches, and which times it adds; it is fitted to measurements
   (`fleet.hardware.latency.coefficients`). A `StepModel` contains the times of `work`, divided by the efficiencies. A
   `StepModel` has only a dozen numbers and a simple formula, because simulators call it a hundred thousand times per
   second.
2. Reading weights overlaps with multiplying them; the times of attention and of exchanges between GPUs are added. The
   time of two overlapping parts is the square root of the sum of their squares. This is about the larger time if they
   differ much, and 1.4 times one of them if they are equal.
3. A step reads those experts to which its tokens are sent. If each token is sent to k of E experts, independently of
   other tokens, the share of experts that is read is 1 - (1 - k/E)^tokens.
4. With sparse attention, each token attends to a limited number of tokens. Window layers and linear layers cost the
   same at any length of the context.
5. The time of a step covers all pipeline stages. If several batches run in different stages at the same time, the
   caller has to model this.
6. The formulas do not branch on values, so they also work on the arrays that the fit of the coefficients uses.

The simulated engine may use a simpler model with measured coefficients instead (`fleet.hardware.latency.linear`).
"""

from math import log2

from msgspec import Struct

from fleet.hardware.gpus import Gpu, GpuLink, Number
from fleet.hardware.models import Attention, stored_bytes
from fleet.hardware.sharding import ShardedModel

MICROSECOND = 1e-6


class StepWork(Struct, frozen=True, kw_only=True):
    """Holds the durations in seconds of the parts of a step at the full speeds of the GPU's data sheet, and some counts.

    The durations are those of the busiest GPU of one attention group (`fleet.hardware.sharding`, rule 1).
    """

    dense_read: float  # seconds to read all dense weights
    dense_token: float  # seconds to multiply one token with the dense weights
    experts_read: float  # seconds to read all experts of the GPU
    experts_token: float  # seconds to multiply one token with the weights of the experts that it is sent to
    missed: float  # probability that a token does not use a given expert
    groups: float  # number of attention groups whose tokens go to the same experts
    pair: float  # seconds for the attention of one token to another one in prefill
    context: float  # seconds for the attention of a decoding sequence to one token of its context
    sequence: float  # seconds to read the windows and states of a decoding sequence
    most_attended: float
    exchanges: float  # number of collective operations in a step, weighted by their number of GPUs
    exchange_token: float  # seconds to send the bytes of one token through the links
    layers: float
    moe_layers: float


class Efficiency(Struct, frozen=True, kw_only=True):
    """Holds the shares of a GPU's data-sheet speeds that an engine reaches (0 to 1), and the times that it adds."""

    memory: float  # share of the memory bandwidth that is reached when dense weights are read
    compute: float  # share of the compute speed that is reached when tokens are multiplied with dense weights
    experts_memory: float
    experts_compute: float
    attention: float  # share of the compute speed in bf16 that is reached in prefill attention
    kv: float  # share of the memory bandwidth that is reached when KV is read
    link: float
    exchange_us: float  # time of one collective operation between two GPUs
    layer_us: float  # all other work of one layer: kernel launches, norms, small kernels
    moe_layer_us: float  # additional work of a layer with experts: routing, sorting tokens, gathering
    step_us: float
    sequence_us: float  # work for one decoding sequence in a step: sampling, scheduling, detokenising


class StepModel(Struct, frozen=True, kw_only=True):
    """Computes the duration of a step for one sharded model and one engine; `step_model` creates it."""

    base: float
    sequence: float
    token: float
    dense_read: float
    dense_token: float
    experts_read: float
    experts_token: float
    missed: float
    groups: float
    pair: float
    context: float
    most_attended: float

    def seconds(self, prefill_tokens: float, prefill_pairs: float, decodes: float, decode_context: float) -> float:
        """Return the duration in seconds of a step that computes at least one token.

        Args:
            prefill_tokens: Tokens of all prompt chunks in the step, for one attention group.
            prefill_pairs: Sum over the chunks of `pairs(new, context)`.
            decodes: Number of sequences for which the step generates one token each.
            decode_context: Sum of the context lengths of these sequences, in tokens.
        """
        tokens = prefill_tokens + decodes
        pairs_most = prefill_tokens * self.most_attended
        context_most = decodes * self.most_attended
        pairs_attended = 0.5 * (prefill_pairs + pairs_most - abs(prefill_pairs - pairs_most))
        context_attended = 0.5 * (decode_context + context_most - abs(decode_context - context_most))
        read = self.experts_read * (1.0 - self.missed ** (tokens * self.groups))
        multiply, route = self.dense_token * tokens, self.experts_token * tokens
        time: float = (
            self.base
            + self.sequence * decodes
            + self.token * tokens
            + (self.dense_read * self.dense_read + multiply * multiply) ** 0.5
            + (read * read + route * route) ** 0.5
            + self.pair * pairs_attended
            + self.context * context_attended
        )
        return time


def pairs(new_tokens: float, context_tokens: float) -> float:
    """Return the number of attended pairs in a chunk: each new token with its context and the new tokens before it."""
    return new_tokens * (context_tokens + 0.5 * new_tokens)


def step_model(work: StepWork, efficiency: Efficiency) -> StepModel:
    return StepModel(
        base=(
            efficiency.step_us
            + efficiency.moe_layer_us * work.moe_layers
            + efficiency.layer_us * work.layers
            + efficiency.exchange_us * work.exchanges
        )
        * MICROSECOND,
        sequence=efficiency.sequence_us * MICROSECOND + work.sequence / efficiency.kv,
        token=work.exchange_token / efficiency.link,
        dense_read=work.dense_read / efficiency.memory,
        dense_token=work.dense_token / efficiency.compute,
        experts_read=work.experts_read / efficiency.experts_memory,
        experts_token=work.experts_token / efficiency.experts_compute,
        missed=work.missed,
        groups=work.groups,
        pair=work.pair / efficiency.attention,
        context=work.context / efficiency.kv,
        most_attended=work.most_attended,
    )


def work(placement: ShardedModel) -> StepWork:
    model, gpu, way = placement.model, placement.gpu, placement.parallelism
    number = model.precision
    ranks = way.tp * way.dp
    output = model.hidden * model.vocabulary  # the output embedding, in bf16
    dense = model.dense_parameters * stored_bytes(number.weights) + 2.0 * output
    routed = model.moe_layers * model.expert_parameters
    seen = model.window_layers * model.window * model.heads * (model.key_dim + model.value_dim)
    bf16 = gpu.flops[Number.BF16]
    return StepWork(
        dense_read=dense / way.tp / gpu.bandwidth,
        dense_token=(2.0 * model.dense_parameters / gpu.flops[gpu.computes_in(number.weights)] + 2.0 * seen / bf16)
        / way.tp,
        experts_read=routed * model.experts * stored_bytes(number.experts) / ranks / gpu.bandwidth,
        experts_token=2.0 * routed * model.experts_per_token / way.tp / gpu.flops[gpu.computes_in(number.experts)],
        missed=1.0 - model.experts_per_token / model.experts if model.experts else 0.0,
        groups=float(way.dp),
        pair=model.flops_per_pair / way.tp / bf16,
        context=_context_seconds(placement),
        sequence=model.kv_bytes_per_sequence / placement.kv_ranks / gpu.bandwidth,
        most_attended=float(model.most_attended or 1 << 40),
        exchanges=_exchanges(placement),
        exchange_token=_exchange_seconds(placement),
        layers=float(model.layers),
        moe_layers=float(model.moe_layers),
    )


def _context_seconds(placement: ShardedModel) -> float:
    """Return the seconds that a decoding sequence needs to attend to one token of its context.

    With MLA, the time of multiplying is added to that of reading: all heads multiply with each vector that is read, so
    multiplying takes too long to be neglected.
    """
    model, gpu = placement.model, placement.gpu
    read = model.kv_bytes_per_token / placement.kv_ranks / gpu.bandwidth
    if model.attention is not Attention.LATENT:
        return read
    operations = 4.0 * model.full_layers * model.heads * model.latent_dim / placement.parallelism.tp
    return read + operations / gpu.flops[gpu.computes_in(model.precision.kv)]


def _exchanges(placement: ShardedModel) -> float:
    """Return the weighted number of collective operations in a step.

    An operation between 2 GPUs counts as 1; every doubling of the number of GPUs adds 0.5.
    """
    model, way = placement.model, placement.parallelism
    attention = model.layers * _rounds(way.tp)
    if way.dp == 1:
        return 2.0 * attention + way.pp - 1
    return attention + 2.0 * model.moe_layers * _rounds(way.tp * way.dp) + way.pp - 1


def _rounds(ranks: int) -> float:
    return 0.0 if ranks == 1 else 0.5 + 0.5 * log2(ranks)


def _exchange_seconds(placement: ShardedModel) -> float:
    """Return the seconds to send the hidden states of one token over the links in all layers.

    The states are sent in all-reduce operations and, if there are several attention groups, to the experts and back.
    """
    model, gpu, way = placement.model, placement.gpu, placement.parallelism
    num_bytes = 2.0 * model.hidden
    ranks = way.tp * way.dp
    reduce = 2.0 * (way.tp - 1) / way.tp * num_bytes / group_bandwidth(gpu, way.tp)
    if way.dp == 1:
        return 2.0 * model.layers * reduce
    copies = min(model.experts_per_token or 1, ranks - 1)
    return model.layers * reduce + 2.0 * model.moe_layers * copies * num_bytes / group_bandwidth(gpu, ranks)


def group_bandwidth(gpu: Gpu, ranks: int) -> float:
    """Return the bytes per second that each of `ranks` GPUs can send to the others over the slowest link."""
    link: GpuLink = gpu.in_node if ranks <= gpu.gpus_per_node else gpu.between_nodes
    return link.bandwidth * min(link.links, max(1, ranks - 1))
