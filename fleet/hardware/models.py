"""Model sizes: computes the numbers of parameters, cached values and operations of a model from its config.

Rules:

1. This module counts parameters, cached values and operations of a whole model. `fleet.hardware.sharding` and
   `fleet.hardware.latency.step_model` compute bytes and times on GPUs. A multiply-add counts as two operations.
2. There are three kinds of attention: grouped heads (GQA, MHA), one latent vector per token (MLA), and linear
   attention, which keeps a state of fixed size. The layers of a model may differ: some may attend only to a window of
   tokens, and some may be linear.
3. MLA caches one latent vector and one rotary key per token for all heads, and every rank of a tensor-parallel group
   holds a copy. As in engines, decoding multiplies with the latent vectors, while prefill first computes the keys and
   values of all heads from the latent vectors.
4. If a field has a value that this module does not support, such as an unknown kind of layer, an error names the field.
   Fields that affect neither sizes nor operations are ignored.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from msgspec import Struct

from fleet.core.errors import ConfigurationRefused
from fleet.hardware.gpus import SCALES, Number

FULL = (
    "full_attention",
    "attention",
    "indexed_attention",
    "deepseek_sparse_attention",
    "qwen_sparse_attention",
)
"""Kinds of layers that cache each token. Layers of the last three kinds attend to few of these tokens: to at most `index_topk`
(`ModelSizes.most_attended`), if the config has this field."""

LINEAR = ("linear_attention", "mamba", "recurrent")
WINDOWED = ("sliding_attention", "chunked_attention")
MOST = 1 << 24
"""Largest number that is accepted in a field of a config. Real numbers are much smaller: the largest vocabularies have
a quarter of a million entries."""

MOST_LAYERS = 1 << 12
"""Largest number of layers that is accepted, because the code handles layers one by one. The deepest models have a few
hundred layers."""


class Attention(StrEnum):
    GROUPED = "grouped"
    LATENT = "latent"


class Precision(Struct, frozen=True, kw_only=True):
    """States the data types of a model's weights and of its KV cache."""

    weights: Number = Number.BF16  # data type of attention and dense layers
    experts: Number = Number.BF16
    kv: Number = Number.BF16


class ModelSizes(Struct, frozen=True, kw_only=True):
    """Holds the sizes of one decoder-only model, as counts of values, and not of bytes."""

    name: str
    layers: int
    hidden: int
    vocabulary: int
    tied_embeddings: bool
    attention: Attention
    heads: int
    kv_heads: int
    key_dim: int  # number of values in the query or key of one head
    value_dim: int
    latent_dim: int = 0  # only with MLA: number of values that a layer caches for a token
    full_layers: int  # number of layers whose cache grows with the context
    window_layers: int = 0
    window: int = 0  # maximum number of tokens to which a token attends in a window layer
    linear_layers: int = 0
    state_numbers: int = 0  # number of values in the state of a sequence in one linear layer
    # Only with sparse attention: maximum number of tokens to which a token attends; 0 if it attends to all tokens.
    most_attended: int = 0
    attention_parameters: int  # number of attention parameters of one full layer or window layer
    linear_parameters: int = 0  # number of attention parameters of one linear layer
    dense_mlp_parameters: int  # number of MLP parameters of all layers together, with the shared experts of MoE layers
    moe_layers: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_parameters: int = 0  # number of parameters of one expert in one layer
    precision: Precision = Precision()

    @property
    def embedding_parameters(self) -> int:
        return self.hidden * self.vocabulary * (1 if self.tied_embeddings else 2)

    @property
    def dense_parameters(self) -> int:
        """Number of parameters that every token uses: all parameters except embeddings and routed experts."""
        attending = self.full_layers + self.window_layers
        return (
            attending * self.attention_parameters
            + self.linear_layers * self.linear_parameters
            + self.dense_mlp_parameters
        )

    @property
    def parameters(self) -> int:
        return (
            self.embedding_parameters + self.dense_parameters + self.moe_layers * self.experts * self.expert_parameters
        )

    @property
    def active_parameters(self) -> int:
        """Number of parameters with which one token is multiplied. The output embedding counts, the input embedding does not."""
        routed = self.moe_layers * self.experts_per_token * self.expert_parameters
        return self.hidden * self.vocabulary + self.dense_parameters + routed

    @property
    def weights_bytes(self) -> float:
        """Bytes of all weights; embeddings count as bf16, because quantised checkpoints keep them in bf16."""
        return (
            2.0 * self.embedding_parameters
            + self.dense_parameters * stored_bytes(self.precision.weights)
            + self.moe_layers * self.experts * self.expert_parameters * stored_bytes(self.precision.experts)
        )

    @property
    def kv_numbers_per_token(self) -> int:
        """Number of values that each token adds to the KV cache.

        Window layers count as 0, because a full window does not grow.
        """
        if self.attention is Attention.LATENT:
            return self.full_layers * self.latent_dim
        return self.full_layers * self.kv_heads * (self.key_dim + self.value_dim)

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes that each token adds to the KV cache of one replica, without the copies that several GPUs hold.

        `fleet.hardware.sharding.ShardedModel.kv_bytes_per_token` is the share of one GPU.
        """
        return self.kv_numbers_per_token * self.precision.kv.num_bytes

    @property
    def kv_bytes_per_sequence(self) -> float:
        """Cached bytes of a sequence that do not depend on its length: full windows, and states of linear layers."""
        windows = self.window_layers * self.window * self.kv_heads * (self.key_dim + self.value_dim)
        return windows * self.precision.kv.num_bytes + 4.0 * self.linear_layers * self.state_numbers

    @property
    def flops_per_pair(self) -> float:
        """Operations in all full layers for one token that attends to one other token, during prefill."""
        return 2.0 * self.full_layers * self.heads * (self.key_dim + self.value_dim)


def stored_bytes(number: Number) -> float:
    """Return the bytes of one stored weight, including its share of the scale that quantised weights have in common."""
    return number.num_bytes * SCALES[number]


def read_model(config: Mapping[str, Any], name: str = "", *, precision: Precision | None = None) -> ModelSizes:
    """Read the sizes of a model from the content of its `config.json`.

    Args:
        config: The content of the file; for a multimodal model, its text part is used.
        name: Name of the model in the result and in messages; if it is empty, the name in the config is used.
        precision: Data types to use instead of those in `quantization_config`.

    Raises:
        ConfigurationRefused: A field is missing or invalid; the message names it.
    """
    fields = _Fields(config, name)
    hidden, layers, heads = (fields.count(each) for each in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    if layers > MOST_LAYERS:
        raise fields.refusal("num_hidden_layers", f"must be at most {MOST_LAYERS:,}")
    kinds = _layer_kinds(fields, layers)
    full = sum(kind in FULL for kind in kinds)
    windowed = sum(kind in WINDOWED for kind in kinds)
    latent = "kv_lora_rank" in fields
    head_dim = fields.count("head_dim", default=max(1, hidden // heads))
    kv_heads = fields.count("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise fields.refusal("num_key_value_heads", f"must divide num_attention_heads, {heads}, and is {kv_heads}")
    key_dim, value_dim = head_dim, head_dim
    if latent:
        key_dim = fields.count("qk_nope_head_dim") + fields.count("qk_rope_head_dim")
        value_dim = fields.count("v_head_dim")
    experts = fields.count("n_routed_experts", "num_local_experts", "num_experts", default=0)
    moe_layers = _moe_layers(fields, layers) if experts else 0
    expert_width = fields.count("moe_intermediate_size", "intermediate_size") if experts else 0
    dense_width = fields.count("intermediate_size", "intermediate_size_mlp", default=expert_width)
    return ModelSizes(
        name=fields.name,
        layers=layers,
        hidden=hidden,
        vocabulary=fields.count("vocab_size"),
        tied_embeddings=bool(fields.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        attention=Attention.LATENT if latent else Attention.GROUPED,
        heads=heads,
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        latent_dim=fields.count("kv_lora_rank") + fields.count("qk_rope_head_dim") if latent else 0,
        full_layers=full,
        window_layers=windowed,
        window=fields.count("sliding_window", "attention_chunk_size") if windowed else 0,
        linear_layers=layers - full - windowed,
        state_numbers=_state_numbers(fields) if full + windowed < layers else 0,
        most_attended=fields.count("index_topk", default=0),
        attention_parameters=_attention_parameters(fields, hidden, heads, kv_heads, head_dim, latent=latent),
        linear_parameters=_linear_parameters(fields, hidden) if full + windowed < layers else 0,
        dense_mlp_parameters=3 * hidden * dense_width * (layers - moe_layers)
        + moe_layers * _shared_parameters(fields, hidden, expert_width, experts),
        moe_layers=moe_layers,
        experts=experts,
        experts_per_token=_experts_per_token(fields, experts),
        expert_parameters=3 * hidden * expert_width,
        precision=precision or _precision(fields, config),
    )


class _Fields:
    """Reads the fields of a config, or of its text part; each error names the field."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        inner = config.get("text_config", config)
        if not isinstance(inner, Mapping):
            raise ConfigurationRefused(f"{name or 'model'}: text_config must be an object")
        self._fields: Mapping[str, Any] = inner
        self._prefix = "text_config." if inner is not config else ""
        self.name = name or str(config.get("_name_or_path") or config.get("model_type") or "model")

    def __contains__(self, field: str) -> bool:
        return self._fields.get(field) is not None

    def get(self, field: str, default: Any = None) -> Any:
        value = self._fields.get(field)
        return default if value is None else value

    def count(self, *fields: str, default: int | None = None) -> int:
        """Return the value of the first of these fields that exists; the default if none exists.

        Raises:
            ConfigurationRefused: None of the fields exists and there is no default. Or the value is not a whole number
                from 1 (from 0 if the default is 0) to `MOST`.
        """
        found = next((field for field in fields if field in self), None)
        if found is None:
            if default is None:
                raise self.refusal(fields[0], "is missing")
            return default
        value = self._fields[found]
        least = 0 if default == 0 else 1
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.refusal(found, f"must be a whole number from {least} on, not {value!r:.50}")
        if value > MOST:
            raise self.refusal(found, f"must be at most {MOST:,}")
        return value

    def refusal(self, field: str, cause: str) -> ConfigurationRefused:
        return ConfigurationRefused(f"{self.name}: {self._prefix}{field} {cause}")


def _layer_kinds(fields: _Fields, layers: int) -> Sequence[str]:
    kinds = fields.get("layer_types")
    if kinds is None:
        return ["full_attention"] * layers
    if not isinstance(kinds, Sequence) or isinstance(kinds, str) or len(kinds) != layers:
        raise fields.refusal("layer_types", f"must list num_hidden_layers, {layers}, kinds of layers")
    for index, kind in enumerate(kinds):
        if kind not in (*FULL, *LINEAR, *WINDOWED):
            raise fields.refusal(f"layer_types[{index}]", f"{kind!r:.50} is not a known kind of layer")
    return kinds


def _moe_layers(fields: _Fields, layers: int) -> int:
    dense_first = fields.count("first_k_dense_replace", default=0)
    every = fields.count("decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step", default=1)
    dense = fields.get("mlp_only_layers", ())
    if dense_first > layers:
        raise fields.refusal("first_k_dense_replace", f"must be at most num_hidden_layers, {layers}, not {dense_first}")
    left = (layers - dense_first) // every
    if not isinstance(dense, Sequence) or isinstance(dense, str) or len(dense) > left:
        raise fields.refusal("mlp_only_layers", f"must list at most {left} layers")
    return left - len(dense)


def _experts_per_token(fields: _Fields, experts: int) -> int:
    if not experts:
        return 0
    chosen = fields.count("num_experts_per_tok", "experts_per_token", "top_k_experts")
    if chosen > experts:
        raise fields.refusal("num_experts_per_tok", f"must be at most the {experts} experts, not {chosen}")
    return chosen


def _attention_parameters(
    fields: _Fields, hidden: int, heads: int, kv_heads: int, head_dim: int, *, latent: bool
) -> int:
    if not latent:
        gates = heads * head_dim * hidden if fields.get("attn_output_gate") else 0
        return hidden * head_dim * (2 * heads + 2 * kv_heads) + gates
    rank, rotary = fields.count("kv_lora_rank"), fields.count("qk_rope_head_dim")
    nope, value = fields.count("qk_nope_head_dim"), fields.count("v_head_dim")
    query_rank = fields.count("q_lora_rank", default=0)
    query = heads * (nope + rotary)
    queries = hidden * query_rank + query_rank * query if query_rank else hidden * query
    indexer = (
        fields.count("index_n_heads", default=0) * fields.count("index_head_dim", default=0) * (query_rank or hidden)
    )
    return queries + hidden * (rank + rotary) + rank * heads * (nope + value) + heads * value * hidden + indexer


def _linear_parameters(fields: _Fields, hidden: int) -> int:
    keys = fields.count("linear_num_key_heads") * fields.count("linear_key_head_dim")
    values = fields.count("linear_num_value_heads") * fields.count("linear_value_head_dim")
    return hidden * (2 * keys + 3 * values)  # the matrices of query and key, and those of value, gate and output


def _state_numbers(fields: _Fields) -> int:
    heads = fields.count("linear_num_value_heads")
    return heads * fields.count("linear_key_head_dim") * fields.count("linear_value_head_dim")


def _shared_parameters(fields: _Fields, hidden: int, expert_width: int, experts: int) -> int:
    """Return the number of parameters of one MoE layer that every token uses: shared experts, and the gate that chooses experts."""
    shared = fields.count("shared_expert_intermediate_size", "shared_intermediate_size", default=0)
    if not shared:
        shared = fields.count("n_shared_experts", default=0) * expert_width
    return 3 * hidden * shared + hidden * experts


def _precision(fields: _Fields, config: Mapping[str, Any]) -> Precision:
    """Return the data types of the checkpoint's weights, with bf16 for the KV cache, as engines use by default."""
    quantization = fields.get("quantization_config") or config.get("quantization_config")
    if quantization is None:
        return Precision()
    if not isinstance(quantization, Mapping):
        raise fields.refusal("quantization_config", "must be an object")
    method = str(quantization.get("quant_method", "")).lower()
    algorithm = str(quantization.get("quant_algo", "")).lower()
    if method in ("fp8", "fbgemm_fp8") or "fp8" in algorithm:
        return Precision(weights=Number.FP8, experts=Number.FP8)
    if method == "mxfp4":
        return Precision(experts=Number.FP4)
    if "fp4" in algorithm or "fp4" in method:
        return Precision(weights=Number.FP4, experts=Number.FP4)
    bits = _weight_bits(quantization)
    ignored = str(quantization.get("ignore", ""))
    if bits == 4:
        return Precision(weights=Number.BF16 if "self_attn" in ignored else Number.INT4, experts=Number.INT4)
    if bits == 8:
        return Precision(weights=Number.FP8, experts=Number.FP8)
    raise fields.refusal("quantization_config.quant_method", f"{method!r} is not known; give a precision")


def _weight_bits(quantization: Mapping[str, Any]) -> int | None:
    if isinstance(bits := quantization.get("bits"), int):
        return bits
    groups = quantization.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and isinstance(bits := weights.get("num_bits"), int):
            return bits
    return None
