"""Sharding: splits one replica of a model over GPUs, and computes the bytes on each GPU and the room for KV.

Rules:

1. A replica has `pp` pipeline stages with `tp` × `dp` GPUs each. The GPUs of a stage form `dp` attention groups, each
   with its own sequences (data-parallel attention). The `tp` GPUs of a group split the attention heads and the dense
   layers. Experts are split over all `tp` × `dp` GPUs. If `ep` is 1, each GPU has a slice of every expert. Otherwise `ep`
   equals `tp` × `dp`, and each GPU has whole experts.
2. If a model has fewer KV heads than `tp`, several GPUs hold the same KV head. With MLA, every GPU of a group holds all
   latent vectors.
3. An engine uses the share `MEMORY_SHARE` of a GPU's memory, unless the caller states another share. The KV cache gets
   what remains of this share after the weights and a reserve for activations, CUDA graphs and the runtime.
"""

from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta, Struct

from fleet.core.errors import ConfigurationRefused
from fleet.hardware.gpus import GIB, Gpu, gpus
from fleet.hardware.models import Attention, ModelSizes, stored_bytes

Positive = Annotated[int, Meta(ge=1)]

MEMORY_SHARE = 0.9
"""Share of a GPU's memory that an engine uses; the value is vLLM's default."""

RESERVE_BYTES = 3.5 * GIB
"""Bytes on each GPU for activations, CUDA graphs and the runtime, as in aiconfigurator 0.12 (field `other_mem`)."""

MOST_TRIED = 64
"""Maximum number of GPUs per replica in the sharding that an error message proposes for a model that does not fit."""


class ShardingDegrees(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """States the degrees of parallelism of one replica."""

    tp: Positive = 1  # tensor parallelism
    pp: Positive = 1  # pipeline parallelism: number of stages
    dp: Positive = 1  # data-parallel attention: number of attention groups
    # Expert parallelism: number of GPUs over which whole experts are distributed. 1 means that every expert is sliced.
    ep: Positive = 1

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp


class ShardedModel(Struct, frozen=True, kw_only=True):
    """Describes a model that is split over GPUs of one type. The split may be impossible; `shard_model` checks it."""

    model: ModelSizes
    gpu: Gpu
    parallelism: ShardingDegrees

    @property
    def weights_bytes(self) -> float:
        """Bytes of weights on each GPU."""
        model, way = self.model, self.parallelism
        dense = 2.0 * model.embedding_parameters + model.dense_parameters * stored_bytes(model.precision.weights)
        routed = model.moe_layers * model.experts * model.expert_parameters * stored_bytes(model.precision.experts)
        return (dense / way.tp + routed / (way.tp * way.dp)) / way.pp

    @property
    def kv_ranks(self) -> int:
        """Number of GPUs of a stage over which the KV of one token is split; further GPUs of the group hold copies."""
        if self.model.attention is Attention.LATENT:
            return 1
        return min(self.parallelism.tp, self.model.kv_heads)

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of KV per token, on each GPU that holds KV of the token's sequence."""
        return self.model.kv_bytes_per_token / self.kv_ranks / self.parallelism.pp

    @property
    def kv_bytes_per_sequence(self) -> float:
        """Cached bytes of a sequence that do not depend on its length, on each GPU that holds KV of the sequence."""
        return self.model.kv_bytes_per_sequence / self.kv_ranks / self.parallelism.pp

    def kv_room_bytes(self, share: float = MEMORY_SHARE) -> float:
        """Return the bytes for the KV cache on each GPU, if an engine uses this share of the GPU's memory (rule 3).

        The number is negative if weights and reserve do not fit.
        """
        return self.gpu.memory_bytes * share - self.weights_bytes - RESERVE_BYTES

    def kv_capacity_tokens(self, share: float = MEMORY_SHARE) -> int:
        """Return the number of tokens whose KV a replica can hold; window layers and linear layers are neglected."""
        return int(max(0.0, self.kv_room_bytes(share)) // max(self.kv_bytes_per_token, 1.0)) * self.parallelism.dp

    def kv_capacity_blocks(self, block_tokens: int, share: float = MEMORY_SHARE) -> int:
        """Return the number of blocks whose KV a replica can hold."""
        return self.kv_capacity_tokens(share) // block_tokens


def shard_model(
    model: ModelSizes, gpu: Gpu, parallelism: ShardingDegrees, *, share: float = MEMORY_SHARE
) -> ShardedModel:
    """Split a model over GPUs; `share` is the share of a GPU's memory that the engine may use.

    Raises:
        ConfigurationRefused: The model cannot be split in this way; the message names the field. Or the model does not fit;
            the message also names a remedy.
    """
    for field, cause in _obstacles(model, gpu, parallelism):
        raise ConfigurationRefused(f"{model.name}: parallelism.{field}: {cause}")
    placement = ShardedModel(model=model, gpu=gpu, parallelism=parallelism)
    if placement.kv_room_bytes(share) <= 0:
        needed = (placement.weights_bytes + RESERVE_BYTES) / GIB
        raise ConfigurationRefused(
            f"{model.name}: gpu: does not fit: {needed:.1f} GiB on each of {parallelism.gpus} GPUs before any KV, and "
            f"{gpu.name} has {gpu.memory_gib * share:.1f} GiB to give; {_remedy(placement, share)}"
        )
    return placement


def feasible(
    model: ModelSizes, gpu: Gpu, most_gpus: int, *, room_tokens: int = 1, share: float = MEMORY_SHARE
) -> Iterator[ShardedModel]:
    """Yield all shardings over at most `most_gpus` GPUs with room for `room_tokens` tokens, those with few GPUs first.

    Numbers of GPUs are powers of two, because nodes have such numbers. Pipeline parallelism is tried only over several
    nodes, because tensor parallelism is faster within a node.
    """
    for size in (1 << power for power in range(most_gpus.bit_length())):
        for tp in (1 << power for power in range(size.bit_length())):
            for way in _ways(model, gpu, size, tp):
                placement = ShardedModel(model=model, gpu=gpu, parallelism=way)
                possible = next(_obstacles(model, gpu, way), None) is None
                if possible and placement.kv_capacity_tokens(share) >= room_tokens:
                    yield placement


def _remedy(tried: ShardedModel, share: float) -> str:
    """Return a text that proposes how the model would fit: on more GPUs, with smaller weights, or on larger GPUs."""
    model, way = tried.model, tried.parallelism
    larger = [
        other.id
        for other in gpus().values()
        if ShardedModel(model=model, gpu=other, parallelism=way).kv_room_bytes(share) > 0
        and next(_obstacles(model, other, way), None) is None
    ]
    ways = [each.parallelism for each in feasible(model, tried.gpu, MOST_TRIED, share=share)]
    if ways:
        fewest = [each for each in ways if each.gpus == ways[0].gpus]
        within = [each for each in fewest if each.tp <= tried.gpu.gpus_per_node]
        said = f"it fits with {_in_words(max(within or fewest, key=lambda each: each.tp))}"
    else:
        said = f"no {MOST_TRIED} of them would do; take narrower weights (fp8, fp4)"
    return said + (f", or cut like that on {', '.join(larger)}" if larger else "")


def _in_words(way: ShardingDegrees) -> str:
    chosen = ((name, getattr(way, name)) for name in way.__struct_fields__)
    return " ".join(f"{name}={degree}" for name, degree in chosen if degree > 1)


def _ways(model: ModelSizes, gpu: Gpu, size: int, tp: int) -> Iterator[ShardingDegrees]:
    rest = size // tp
    if rest == 1 or size > gpu.gpus_per_node >= tp:
        yield ShardingDegrees(tp=tp, pp=rest)
    if model.experts and size > 1:
        yield ShardingDegrees(tp=tp, dp=rest, ep=size)


def _obstacles(model: ModelSizes, gpu: Gpu, way: ShardingDegrees) -> Iterator[tuple[str, str]]:
    if way.tp > 1 and model.heads % way.tp:
        yield "tp", f"{way.tp} does not divide the {model.heads} heads"
    if way.tp > 1 and way.tp > model.kv_heads and way.tp % model.kv_heads and model.attention is not Attention.LATENT:
        yield "tp", f"{way.tp} is no multiple of the {model.kv_heads} KV heads"
    if way.tp <= model.kv_heads and model.kv_heads % way.tp and model.attention is not Attention.LATENT:
        yield "tp", f"{way.tp} does not divide the {model.kv_heads} KV heads"
    if way.tp > gpu.gpus_per_node * 2:
        yield "tp", f"{way.tp} spans more than two nodes of {gpu.gpus_per_node} GPUs"
    if way.pp > model.layers:
        yield "pp", f"{way.pp} is more than the {model.layers} layers"
    if way.ep > 1 and not model.experts:
        yield "ep", f"{way.ep}, and the model has no experts"
    if way.ep > 1 and way.ep != way.tp * way.dp:
        yield "ep", f"{way.ep} is neither 1 nor tp × dp, {way.tp * way.dp}"
    if way.ep > 1 and model.experts % way.ep:
        yield "ep", f"{way.ep} does not divide the {model.experts} experts"
