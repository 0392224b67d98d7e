"""One replica of a model over GPUs: which ways are possible, what each GPU holds, how much KV fits.

Rules:

1. A replica is `pp` stages of `tp` × `dp` GPUs. Attention is cut by heads among `tp`; each of `dp` groups has all heads
   and sequences of its own (data-parallel attention). Dense layers are cut among `tp`, experts among `tp` × `dp`: whole
   experts where `ep` is more than 1 (then it is all of `tp` × `dp`), slices of each otherwise.
2. Where there are fewer KV heads than `tp`, heads are held more than once. MLA's latent vectors are held by every rank.
3. KV gets what `share` of the memory leaves after weights and a reserve for activations, graphs and the runtime.
"""

from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta, Struct

from fleet.core.errors import ConfigurationRefused
from fleet.hardware.gpus import GIB, Gpu, gpus
from fleet.hardware.models import Attention, ModelSizes, stored_bytes

Positive = Annotated[int, Meta(ge=1)]

MEMORY_SHARE = 0.9
"""Of a GPU's memory that an engine takes: vLLM's default."""

RESERVE_BYTES = 3.5 * GIB
"""For activations, graphs and the runtime on each GPU; aiconfigurator 0.12 assumes as much (`other_mem` of its systems)."""

MOST_TRIED = 64
"""GPUs of one replica, when looking for what would hold a model: beyond that, nobody asks for it by accident."""


class ShardingDegrees(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one replica is cut."""

    tp: Positive = 1  # tensor
    pp: Positive = 1  # pipeline
    dp: Positive = 1  # attention groups of one replica (its other replicas are not counted here)
    ep: Positive = 1  # whole experts; 1: each is cut instead

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp


class ShardedModel(Struct, frozen=True, kw_only=True):
    """A model cut that way, on that GPU. `shard_model` makes them and refuses what cannot be."""

    model: ModelSizes
    gpu: Gpu
    parallelism: ShardingDegrees

    @property
    def weights_bytes(self) -> float:
        """On each GPU."""
        model, way = self.model, self.parallelism
        dense = 2.0 * model.embedding_parameters + model.dense_parameters * stored_bytes(model.precision.weights)
        routed = model.moe_layers * model.experts * model.expert_parameters * stored_bytes(model.precision.experts)
        return (dense / way.tp + routed / (way.tp * way.dp)) / way.pp

    @property
    def kv_ranks(self) -> int:
        """Among how many GPUs of a stage the KV of one token is cut; others hold the same again."""
        if self.model.attention is Attention.LATENT:
            return 1
        return min(self.parallelism.tp, self.model.kv_heads)

    @property
    def kv_bytes_per_token(self) -> float:
        """On each GPU that holds a sequence."""
        return self.model.kv_bytes_per_token / self.kv_ranks / self.parallelism.pp

    @property
    def kv_bytes_per_sequence(self) -> float:
        """On each GPU that holds it, besides what its tokens take."""
        return self.model.kv_bytes_per_sequence / self.kv_ranks / self.parallelism.pp

    def kv_room_bytes(self, share: float = MEMORY_SHARE) -> float:
        """Memory for KV on each GPU; below zero when the weights do not fit."""
        return self.gpu.memory_bytes * share - self.weights_bytes - RESERVE_BYTES

    def kv_capacity_tokens(self, share: float = MEMORY_SHARE) -> int:
        """Tokens whose KV the replica can hold, all its attention groups together; states of sequences not taken off."""
        return int(max(0.0, self.kv_room_bytes(share)) // max(self.kv_bytes_per_token, 1.0)) * self.parallelism.dp

    def kv_capacity_blocks(self, block_tokens: int, share: float = MEMORY_SHARE) -> int:
        """Blocks of that many tokens that the replica can hold."""
        return self.kv_capacity_tokens(share) // block_tokens


def shard_model(
    model: ModelSizes, gpu: Gpu, parallelism: ShardingDegrees, *, share: float = MEMORY_SHARE
) -> ShardedModel:
    """Put a model on GPUs.

    Raises:
        ConfigurationRefused: The model cannot be cut like that, or does not fit; names the field, and what would do.
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
    """All placements on up to that many GPUs that leave room for `room_tokens` tokens of KV, fewest GPUs first.

    Sizes are powers of two, as nodes are. Pipelines are tried only across nodes: within one, tensor parallelism wins.
    """
    for size in (1 << power for power in range(most_gpus.bit_length())):
        for tp in (1 << power for power in range(size.bit_length())):
            for way in _ways(model, gpu, size, tp):
                placement = ShardedModel(model=model, gpu=gpu, parallelism=way)
                possible = next(_obstacles(model, gpu, way), None) is None
                if possible and placement.kv_capacity_tokens(share) >= room_tokens:
                    yield placement


def _remedy(tried: ShardedModel, share: float) -> str:
    """What would hold the model: more of the same GPUs, else narrower weights, and larger GPUs cut the same way."""
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
