"""How long a step of an engine takes on real accelerators: closed forms over what has to be read, multiplied and exchanged.

Rules:

1. `work` says what a step would take if every part of the hardware reached its data sheet, part by part. `Efficiency` says what
   share of that an engine reaches, and what it adds; it is fitted from measurements (`coefficients`). Their quotient,
   `StepModel`, is a dozen numbers, and a call of it is arithmetic only: simulators make a hundred thousand a second.
2. Reading weights and multiplying with them overlap, attention and exchange come on top. The overlap is the root of the sum
   of squares: the larger of two where they differ, 1.4 times each where they are equal.
3. A step reads the experts that its tokens are sent to: 1 - (1 - k/E)^tokens of them, as if chosen independently.
4. Sparse attention attends to so many tokens at most; windows and states of linear layers cost the same at any length.
5. Times are of one pass through all pipeline stages. Several batches in different stages at once are the caller's to model.
6. Everything here is arithmetic without branches on values, so that arrays do as well as numbers: the fit uses that.
"""

from math import log2

from msgspec import Struct

from fleet.core.clock import SECOND, Nanos
from fleet.hardware.gpus import Gpu, GpuLink, Number
from fleet.hardware.models import Attention, stored_bytes
from fleet.hardware.sharding import ShardedModel

MICROSECOND = 1e-6


class StepWork(Struct, frozen=True, kw_only=True):
    """What a step takes at the hardware's limits, in seconds, on the busiest GPU of one attention group."""

    dense_read: float  # all dense weights, once
    dense_token: float  # multiplying one token with them
    experts_read: float  # all experts of the GPU, once
    experts_token: float  # multiplying one token with those it is sent to
    missed: float  # chance that a token leaves an expert out
    groups: float  # attention groups whose tokens meet in the experts
    pair: float  # one token attending to another one in prefill
    context: float  # one token of context of a decoding sequence
    sequence: float  # states and windows of a decoding sequence
    most_attended: float
    exchanges: float  # collective operations of a step, weighted by how many take part
    exchange_token: float  # bytes of one token through the links
    layers: float
    moe_layers: float


class Efficiency(Struct, frozen=True, kw_only=True):
    """What an engine makes of it. Shares of the hardware's limit (1: all of it), and times that it adds."""

    memory: float  # reading dense weights
    compute: float  # multiplying with them
    experts_memory: float
    experts_compute: float
    attention: float  # prefill attention, of bf16 operations
    kv: float  # reading KV
    link: float
    exchange_us: float  # one collective operation of two GPUs
    layer_us: float  # what one layer needs besides: launches, norms, small kernels
    moe_layer_us: float  # and one with experts: routing, sorting tokens, gathering
    step_us: float
    sequence_us: float  # one decoding sequence: sampling, scheduling, detokenising


class StepModel(Struct, frozen=True, kw_only=True):
    """Times of one placement under one engine, in seconds. Make it with `step_model`; it is a value like any other."""

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
        """How long a step takes; not to be asked of an empty one.

        Args:
            prefill_tokens: Tokens of all chunks of prompts in the step, of one attention group.
            prefill_pairs: What they attend to: the sum over chunks of `pairs(new, context)`.
            decodes: Sequences that get one token each.
            decode_context: Tokens of their contexts, all together.
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

    def step_time(self, prefill_tokens: int, prefill_pairs: float, decodes: int, decode_context: int) -> Nanos:
        """`seconds`, in whole nanoseconds."""
        return Nanos(int(self.seconds(prefill_tokens, prefill_pairs, decodes, decode_context) * SECOND))


def pairs(new_tokens: float, context_tokens: float) -> float:
    """How many pairs of tokens a chunk's attention covers: each new token sees the context, and the new ones before it."""
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
    output = model.hidden * model.vocabulary  # the embedding that logits are made with; in bf16
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
    """Reading one token's KV; with MLA, multiplying with it weighs as much: all heads share one vector."""
    model, gpu = placement.model, placement.gpu
    read = model.kv_bytes_per_token / placement.kv_ranks / gpu.bandwidth
    if model.attention is not Attention.LATENT:
        return read
    operations = 4.0 * model.full_layers * model.heads * model.latent_dim / placement.parallelism.tp
    return read + operations / gpu.flops[gpu.computes_in(model.precision.kv)]


def _exchanges(placement: ShardedModel) -> float:
    """Collective operations of a step; among 2 GPUs each counts 1, and half more for every doubling."""
    model, way = placement.model, placement.parallelism
    attention = model.layers * _rounds(way.tp)
    if way.dp == 1:
        return 2.0 * attention + way.pp - 1
    return attention + 2.0 * model.moe_layers * _rounds(way.tp * way.dp) + way.pp - 1


def _rounds(ranks: int) -> float:
    return 0.0 if ranks == 1 else 0.5 + 0.5 * log2(ranks)


def _exchange_seconds(placement: ShardedModel) -> float:
    """Of one token's hidden states, in bf16, through the links: all-reduces, and where groups meet, to the experts and back."""
    model, gpu, way = placement.model, placement.gpu, placement.parallelism
    num_bytes = 2.0 * model.hidden
    ranks = way.tp * way.dp
    reduce = 2.0 * (way.tp - 1) / way.tp * num_bytes / group_bandwidth(gpu, way.tp)
    if way.dp == 1:
        return 2.0 * model.layers * reduce
    copies = min(model.experts_per_token or 1, ranks - 1)
    return model.layers * reduce + 2.0 * model.moe_layers * copies * num_bytes / group_bandwidth(gpu, ranks)


def group_bandwidth(gpu: Gpu, ranks: int) -> float:
    """Bytes a second that one of so many GPUs can send to the others, the slowest link on the way."""
    link: GpuLink = gpu.in_node if ranks <= gpu.gpus_per_node else gpu.between_nodes
    return link.bandwidth * min(link.links, max(1, ranks - 1))
